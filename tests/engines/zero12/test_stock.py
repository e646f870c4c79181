"""Compare ZeRO stages 1 and 2 with DeepSpeed's stock start, bit for bit."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.zero12 import routes
from tests.engines.zero12.routes import CASES, Case
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def compare(path: Path, names: list[str]) -> dict[str, list[str]]:
    """Compare both routes for each case, and where our parameters lie."""
    lines_by_case = {}
    for name in routes.available({name: CASES[name] for name in names}):
        case = CASES[name]
        expected = routes.trace_training(routes.stock(path, case), case)
        model = routes.ours(path, case)
        loaded_at = {p.untyped_storage().data_ptr() for p in model.parameters()}
        lines = routes.differing_keys(routes.trace_training(model, case), expected)
        trained_at = {p.untyped_storage().data_ptr() for p in model.parameters()}
        if trained_at != loaded_at or len(trained_at) != 1:
            lines.append("the parameters have left the buffer that they were loaded into")
        lines_by_case[name] = lines
    return lines_by_case


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["stage 1", "decay, round robin, aligned"]),
        *(pytest.param(size, [*CASES], marks=pytest.mark.slow) for size in (1, 2, 3)),
    ],
)
def test_every_option_equals_the_stock_route(
    world_size: int, names: list[str], checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16, sharded=True)
    for lines_by_case in run_ranks(compare, world_size, path, names, timeout=400):
        assert not {name: lines for name, lines in lines_by_case.items() if lines}


# Options that zerostart does not support use the stock route, with one warning.


ZENFLOW = Case(
    zero={
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 2, "update_interval": 2},
    },
    top={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
)


def state_with_zenflow(model: nn.Module) -> dict[str, Any]:
    """Return the engine's state at its start."""
    engine = routes.start_engine(model.train(), ZENFLOW)
    state = routes.state_of(engine)
    engine.destroy()
    return state


def check_zenflow(path: Path) -> list[str]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerostart").addHandler(handler)
    expected = state_with_zenflow(routes.stock(path, ZENFLOW))
    lines = [f"stock warns: {record}" for record in records]
    lines += routes.differing_keys(state_with_zenflow(routes.ours(path, ZENFLOW)), expected)
    if len(records) != 1 or "ZenFlow orders parameters in its own way" not in records[0]:
        lines.append(f"warnings: {records}")
    return lines


@pytest.mark.slow
def test_zenflow_uses_the_stock_route(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    assert run_ranks(check_zenflow, 2, path, timeout=120) == [[], []]
