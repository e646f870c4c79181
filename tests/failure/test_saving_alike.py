"""Saves and resumes of ranks that do not mean the same: one error on all of them, and nothing written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import run_ranks
from zerostart.errors import ConfigError


def _model() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return zerostart.load(
        weights,
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)),
        engine="fsdp2",
        dtype=torch.bfloat16,
        progress=False,
    )


def differing(folder: Path) -> dict[str, str]:
    """What each call says in which this rank differs from the other."""
    rank, model = dist.get_rank(), _model()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    place = folder / "place"
    for number in range(2):
        zerostart.save_state(folder / f"state{number}", model, extra=number)
    dtypes = (torch.bfloat16, torch.float16)
    calls: dict[str, Callable[[], object]] = {
        "path": lambda: zerostart.save(model, folder / f"place{rank}"),
        "dtype": lambda: zerostart.save(model, place, dtype=dtypes[rank]),
        "shard": lambda: zerostart.save(model, place, max_shard_size=("1GB", 40)[rank]),
        "trainable": lambda: zerostart.save(model, place, trainable_only=bool(rank)),
        "state's path": lambda: zerostart.save_state(folder / f"place{rank}", model),
        "optimizer": lambda: zerostart.save_state(place, model, (None, optimizer)[rank]),
        "value": lambda: zerostart.save_state(place, model, extra={"rank": rank}),
        "tensor": lambda: zerostart.save_state(place, model, extra=[torch.full((3,), float(rank))]),
        "background": lambda: zerostart.save_state(place, model, wait=bool(rank)).wait(),
        "resumed path": lambda: zerostart.load_state(folder / f"state{rank}", model),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except ConfigError as error:
            told[name] = str(error)
        else:
            told[name] = "no error"
        dist.barrier()
    assert sorted(entry.name for entry in folder.iterdir()) == ["state0", "state1"]
    return told


@pytest.mark.slow
def test_ranks_that_save_other_things_are_told(tmp_path: Path) -> None:
    first, second = run_ranks(differing, 2, tmp_path)
    assert first == second
    rest = {n: text for n, text in first.items() if "the ranks do not do the same: rank 0" not in text}
    assert rest.keys() == {"value", "tensor"}
    assert all("(or a schedule) of rank 1 differs from that of rank 0" in text for text in rest.values())
