"""Saves with different arguments on ranks write nothing."""

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


def _load_model() -> Any:
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


def call_differently(folder: Path) -> dict[str, str]:
    """Return the errors of calls with different arguments."""
    rank, model = dist.get_rank(), _load_model()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    target = folder / "target"
    for number in range(2):
        zerostart.save_state(folder / f"state{number}", model, extra=number)
    dtypes = (torch.bfloat16, torch.float16)
    calls: dict[str, Callable[[], object]] = {
        "path": lambda: zerostart.save(model, folder / f"target{rank}"),
        "dtype": lambda: zerostart.save(model, target, dtype=dtypes[rank]),
        "shard": lambda: zerostart.save(model, target, max_shard_size=("1GB", 40)[rank]),
        "trainable": lambda: zerostart.save(model, target, trainable_only=bool(rank)),
        "state's path": lambda: zerostart.save_state(folder / f"target{rank}", model),
        "optimizer": lambda: zerostart.save_state(target, model, (None, optimizer)[rank]),
        "value": lambda: zerostart.save_state(target, model, extra={"rank": rank}),
        "tensor": lambda: zerostart.save_state(target, model, extra=[torch.full((3,), float(rank))]),
        "background": lambda: zerostart.save_state(target, model, wait=bool(rank)).wait(),
        "resumed path": lambda: zerostart.load_state(folder / f"state{rank}", model),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ConfigError as error:
            messages[name] = str(error)
        else:
            messages[name] = "no error"
        dist.barrier()
    assert sorted(entry.name for entry in folder.iterdir()) == ["state0", "state1"]
    return messages


@pytest.mark.slow
def test_different_arguments_are_one_error(tmp_path: Path) -> None:
    first, second = run_ranks(call_differently, 2, tmp_path)
    assert first == second
    values = {n: text for n, text in first.items() if "the ranks do not do the same: rank 0" not in text}
    assert values.keys() == {"value", "tensor"}
    assert all("(or a schedule) of rank 1 differs from that of rank 0" in text for text in values.values())
