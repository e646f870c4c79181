"""Models of DiffSynth-Studio that one rank calls oftener than the other, in parts, in zerostart.synced."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.diffusion.families import FAMILIES
from tests.diffusion.oracle import import_diffsynth, needs_diffsynth
from tests.diffusion.sharded import differing, kept, started
from tests.diffusion.test_diffsynth import SETTINGS, write
from tests.ranks import run_ranks

pytestmark = [needs_diffsynth, pytest.mark.slow]


class Pipe(nn.Module):
    """As DiffSynth's pipelines: a module that has the models, which are called one by one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def called(key: str, setting: str, folder: str) -> list[str]:
    """What differs of three calls on rank 0, and one on rank 1, from those of the unsharded model."""
    import_diffsynth()
    import torch.distributed as dist
    from diffsynth.core import loader

    if dist.get_rank() == 0:
        write(key, folder)
    dist.barrier()
    family = FAMILIES[key]
    path = str(Path(folder) / ("release.pth" if family.pth else "release.safetensors"))
    arguments = (family.model(), path, dict(family.config), family.dtype, "cpu", family.convert())
    alone = loader.load_model(*arguments)
    with zerostart.enabled(progress=False, **SETTINGS[setting]):
        pipe = Pipe(loader.load_model(*arguments, use_disk_map=True).requires_grad_(False))
    started(SETTINGS[setting]["engine"], pipe)
    lines: list[str] = []
    with torch.no_grad(), zerostart.synced(pipe):
        wanted = kept(family.call(alone))
        for _ in range(3 - 2 * dist.get_rank()):
            lines += differing(kept(family.call(pipe.model)), wanted)
    return lines


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("key", ["wan2.1 t2v", "flux.1", "wan2.1 vae"])
def test_each_rank_has_what_it_has_alone(key: str, setting: str, tmp_path: Path) -> None:
    assert run_ranks(called, 2, key, setting, str(tmp_path)) == [[], []]
