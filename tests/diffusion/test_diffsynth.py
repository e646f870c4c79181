"""DiffSynth-Studio's own classes by its own ``load_model``, with zerostart enabled and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.diffusion.families import FAMILIES
from tests.diffusion.oracle import import_diffsynth, needs_diffsynth
from tests.diffusion.sharded import ZERO3, differing, fill, gradients_of, kept, off, started
from tests.ranks import run_ranks

pytestmark = needs_diffsynth
#: Of every kind one is fast.
QUICK = ("wan2.1 t2v",)
SETTINGS: dict[str, dict[str, Any]] = {
    "zero3": {"engine": "deepspeed", "zero_stage": 3, "engine_config": ZERO3},
    "fsdp2": {"engine": "fsdp2"},
}


#: These hold parameters themselves, which pipelines read: FSDP2 has them whole, and frozen.
HOLDING = ("z-image",)


def refused_training(model: nn.Module, family: Any) -> list[str]:
    """What is wrong with the refusal to train it in parts."""
    try:
        family.call(model)
    except zerostart.errors.EngineError as error:
        return [] if "is called part by part and holds" in str(error) else [str(error)]
    return ["trained in parts"]


class Whole(nn.Module):
    """As DiffSynth's training module: it has the models, and its forward runs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Any) -> Any:
        return call(self.model)


def write(key: str, folder: str) -> str:
    """The family's file, in the layout that its converter takes."""
    from safetensors.torch import save_file

    family = FAMILIES[key]
    model = fill(family.model()(**family.config))
    stored = family.stored({n: t.contiguous().clone() for n, t in model.state_dict().items()})
    path = Path(folder) / ("release.pth" if family.pth else "release.safetensors")
    if family.pth:
        torch.save(stored, path)
    else:
        save_file(stored, path)
    return str(path)


def loaded(key: str, setting: str, folder: str) -> tuple[Any, nn.Module]:
    """The family's model as DiffSynth loads it, and in shards."""
    import_diffsynth()
    import torch.distributed as dist
    from diffsynth.core import loader

    if dist.get_rank() == 0:
        write(key, folder)
    dist.barrier()
    family = FAMILIES[key]
    path = str(Path(folder) / ("release.pth" if family.pth else "release.safetensors"))
    arguments = (family.model(), path, dict(family.config), family.dtype, "cpu", family.convert())
    alone = aligned(loader.load_model(*arguments))
    with zerostart.enabled(progress=False, **SETTINGS[setting]):
        return alone, loader.load_model(*arguments, use_disk_map=True)


def aligned(model: nn.Module) -> nn.Module:
    """``model`` with its weights in memory of their own, as every engine has them.

    DiffSynth leaves them in the mapped file, at any byte: a product there differs in the last bit from one of
    the same weights elsewhere, on some processors.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def checked(key: str, setting: str, folder: str) -> list[str]:
    """Everything that differs between the family's model in shards and the one that DiffSynth loads."""
    alone, model = loaded(key, setting, folder)
    family = FAMILIES[key]
    lines = tensors(model, alone)
    with torch.no_grad():
        wanted = kept(family.call(alone))
    model.requires_grad_(family.trained)  # scripts freeze the others
    whole, made = started(SETTINGS[setting]["engine"], Whole(model), family.trained)
    whole = whole if made is None else made
    with torch.inference_mode():
        lines += [f"inference: {line}" for line in differing(kept(whole(family.call)), wanted)]
    with torch.no_grad():
        lines += [f"forward: {line}" for line in differing(kept(whole(family.call)), wanted)]
    if family.trained and setting == "fsdp2" and key in HOLDING:
        lines += refused_training(model, family)
    elif family.trained:
        expected = gradients_of(alone, family.call(alone))
        bound = 1e-5 if family.dtype == torch.float32 else 2e-2
        lines += off(gradients_of(model, whole(family.call), made), expected, bound)
    return lines


def tensors(model: nn.Module, alone: nn.Module) -> list[str]:
    """What differs of parameters, buffers and plain tensors."""
    held = dict(zerostart.full_tensors(model, rank=None))
    lines = [f"state: {line}" for line in differing(held, dict(alone.state_dict()))]
    lines += [
        f"buffer {line}" for line in differing(dict(model.named_buffers()), dict(alone.named_buffers()))
    ]
    for (name, own), (_, other) in zip(model.named_modules(), alone.named_modules(), strict=True):
        plain = {key: value for key, value in vars(other).items() if is_tensors(value)}
        lines += [f"{name}.{line}" for line in differing({key: vars(own).get(key) for key in plain}, plain)]
    return lines


def is_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(is_tensors(v) for v in value)
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in QUICK else pytest.mark.slow) for key in FAMILIES]
)
def test_a_family_in_shards_is_as_diffsynth_loads_and_runs_it(key: str, setting: str, tmp_path: Path) -> None:
    for lines in run_ranks(checked, 2, key, setting, str(tmp_path)):
        assert lines == []
