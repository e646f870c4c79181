"""Engines that live in the trainer's own ranks: each has what its own load of a save gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks
from tests.state.refitting import workers
from tests.state.refitting.test_refit import _change
from tests.tiny import TINY, TinyCheckpoints

BF16 = torch.bfloat16


class _Broken(nn.Module):
    """Its loader does what cannot be followed."""

    def load_weights(self, weights: Any) -> None:
        raise RuntimeError("no such layer")


def _push(path: Path, out: Path, options: dict[str, Any]) -> list[str]:
    """On one rank: two pushes into its own half of an engine, and one into what is none on the other rank."""
    config, rank = dict(TINY["qwen3_even"][1]), torch.distributed.get_rank()
    model = zerostart.load(path, progress=False, engine="fsdp2")
    engine = workers.Engine(config, rank, 2, BF16)
    wrong: list[str] = []
    with zerostart.refit(model, engine, timeout=60, **options) as refitter:
        for version in (1, 2):
            _change(model, 1.0 if version == 1 else -0.5)
            report: Any = refitter.push()
            assert report.version == version
            assert len(report.workers) == 2
            assert report.base == (None if version == 1 else 1)
            zerostart.save(model, out / f"saved-{version}")
            expected = workers.loaded(config, rank, 2, out / f"saved-{version}", BF16)
            found = engine.state_dict()
            wrong += [name for name in expected if not torch.equal(found[name], expected[name])]
    with pytest.raises(zerostart.ZerostartError, match="no such layer"):
        zerostart.refit(model, engine if rank == 0 else _Broken(), timeout=30)
    return wrong


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("group", marks=pytest.mark.slow)])
def test_each_rank_has_its_part(checkpoints: TinyCheckpoints, tmp_path: Path, transport: str) -> None:
    options = {"transport": transport, "full_every": 9}
    path = checkpoints("qwen3_even", BF16)
    assert run_ranks(_push, 2, path, tmp_path, options, timeout=120) == [[], []]
