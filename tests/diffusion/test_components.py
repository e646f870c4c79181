"""Each component of a pipeline, of diffusers and transformers: loaded in shards, run, and differentiated."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.diffusion.components import COMPONENTS
from tests.diffusion.sharded import ENGINES, differing, fill, gradients_of, kept, load, off, started
from tests.ranks import run_ranks

#: Of every kind one is fast: a transformer whose inputs are lists, and the residual autoencoder.
QUICK = ("z-image",)
#: What the last bits of fp32 come to, after some layers.
ROUNDED = 2e-6


def checked(key: str, folder: str) -> list[str]:
    """What differs between the component in shards, on either engine, and whole."""
    component = COMPONENTS[key]
    kind = component.find()
    alone = kind.from_pretrained(folder)
    with torch.no_grad():
        wanted = kept(component.call(alone))
    expected = gradients_of(alone, component.call(alone)) if component.trained else {}
    lines: list[str] = []
    for engine in ENGINES:
        model = load(engine, folder, kind)
        held = dict(zerostart.full_tensors(model, rank=None))
        found = [f"state: {line}" for line in differing(held, dict(alone.state_dict()))]
        buffers: Any = (dict(m.named_buffers()) for m in (model, alone))
        found += [f"buffers: {line}" for line in differing(*buffers)]
        model, made = started(engine, model, component.trained)
        with torch.inference_mode():
            found += [
                f"inference: {line}" for line in differing(kept(component.call(model)), wanted, ROUNDED)
            ]
        with torch.no_grad():
            found += [f"forward: {line}" for line in differing(kept(component.call(model)), wanted, ROUNDED)]
        if component.trained:
            found += off(gradients_of(model, component.call(model), made), expected)
        lines += [f"{engine}: {line}" for line in found]
    return lines


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in QUICK else pytest.mark.slow) for key in COMPONENTS]
)
def test_a_component_in_shards_is_what_it_is_alone(key: str, tmp_path: Path) -> None:
    fill(COMPONENTS[key].build()).save_pretrained(tmp_path)
    for lines in run_ranks(checked, 2, key, str(tmp_path)):
        assert lines == []
