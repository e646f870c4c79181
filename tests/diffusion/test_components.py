"""Each pipeline component, sharded, against the unsharded model: state, outputs, gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.diffusion.components import COMPONENTS
from tests.diffusion.engine_results import (
    ENGINES,
    compare,
    compare_gradients,
    compute_gradients,
    fill,
    initialize_engine,
    load,
    snapshot,
)
from tests.ranks import run_ranks

#: Components that ``make test`` covers: a transformer whose inputs are lists.
QUICK = ("z-image",)
#: Relative error of fp32 rounding after some layers.
RTOL = 2e-6


def find_errors(key: str, folder: str) -> list[str]:
    """Describe how the sharded component differs from the unsharded one on each engine."""
    component = COMPONENTS[key]
    kind = component.find_class()
    unsharded = kind.from_pretrained(folder)
    with torch.no_grad():
        outputs = snapshot(component.call(unsharded))
    gradients = compute_gradients(unsharded, component.call(unsharded)) if component.trained else {}
    lines: list[str] = []
    for engine in ENGINES:
        model = load(engine, folder, kind)
        state = dict(zerostart.full_tensors(model, rank=None))
        errors = [f"state: {line}" for line in compare(state, dict(unsharded.state_dict()))]
        buffers: Any = (dict(m.named_buffers()) for m in (model, unsharded))
        errors += [f"buffers: {line}" for line in compare(*buffers)]
        model, ds_engine = initialize_engine(engine, model, component.trained)
        with torch.inference_mode():
            errors += [
                f"inference: {line}" for line in compare(snapshot(component.call(model)), outputs, RTOL)
            ]
        with torch.no_grad():
            errors += [f"forward: {line}" for line in compare(snapshot(component.call(model)), outputs, RTOL)]
        if component.trained:
            errors += compare_gradients(compute_gradients(model, component.call(model), ds_engine), gradients)
        lines += [f"{engine}: {line}" for line in errors]
    return lines


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in QUICK else pytest.mark.slow) for key in COMPONENTS]
)
def test_sharded_component_equals_the_unsharded_one(key: str, tmp_path: Path) -> None:
    fill(COMPONENTS[key].build()).save_pretrained(tmp_path)
    for lines in run_ranks(find_errors, 2, key, str(tmp_path)):
        assert lines == []
