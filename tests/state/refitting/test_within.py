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
from zerostart.errors import ConversionError

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


class _Rows(nn.Module):
    """An engine that takes a table, and nothing else."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 16)

    def load_weights(self, weights: Any) -> None:
        self.table.weight.data.copy_(dict(weights)["table.weight"])


def test_a_model_whose_tensors_change_between_pushes() -> None:
    """The engine is asked again in its own call, and refuses what it cannot take, and nothing later."""
    model, engine = nn.Module(), _Rows(10)
    model.table = nn.Embedding(10, 16)
    with zerostart.refit(model, engine, full_every=9, timeout=20) as refitter:
        assert refitter.push().base is None
        model.head = nn.Linear(3, 3)
        assert refitter.push().base is None
        assert refitter.push().base == 2
        before, model.table = model.table, nn.Embedding(11, 16)
        with pytest.raises(ConversionError, match="cannot take"):
            refitter.push()
        assert torch.equal(engine.table.weight, before.weight)
        model.table = nn.Embedding(10, 16)
        assert refitter.push().version == 5
        assert torch.equal(engine.table.weight, model.table.weight)
