"""Options that the construction does not know take the stock route, with one warning that says so."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engines.zero12 import routes
from tests.engines.zero12.routes import Case
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

ZENFLOW = Case(
    zero={
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 2, "update_interval": 2},
    },
    top={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
)


def with_zenflow(model: nn.Module) -> dict[str, Any]:
    """What the engine starts with; that ZenFlow can train a model as small is not to be expected."""
    engine = routes.started(model.train(), ZENFLOW)
    found = routes.state_of(engine)
    engine.destroy()
    return found


def check(path: Path) -> list[str]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerostart").addHandler(handler)
    wanted = with_zenflow(routes.stock(path, ZENFLOW))
    lines = [f"stock warns: {record}" for record in records]
    lines += routes.differing(with_zenflow(routes.ours(path, ZENFLOW)), wanted)
    if len(records) != 1 or "ZenFlow lays parameters out in an order of its own" not in records[0]:
        lines.append(f"warnings: {records}")
    return lines


def test_zenflow(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    assert run_ranks(check, 2, path, timeout=120) == [[], []]
