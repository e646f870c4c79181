"""ZeRO stages 1 and 2 from our load and from the stock route: buffers, masters and losses to the bit."""

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
    """Both routes for each case, with where the flat buffers of ours lie."""
    found = {}
    for name in routes.available({name: CASES[name] for name in names}):
        case = CASES[name]
        wanted = routes.followed(routes.stock(path, case), case)
        model = routes.ours(path, case)
        born = {p.untyped_storage().data_ptr() for p in model.parameters()}
        lines = routes.differing(routes.followed(model, case), wanted)
        here = {p.untyped_storage().data_ptr() for p in model.parameters()}
        if here != born or len(here) != 1:
            lines.append("the parameters have left the buffer that they were born in")
        found[name] = lines
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["stage 1", "decay, round robin, aligned"]),
        *(pytest.param(size, [*CASES], marks=pytest.mark.slow) for size in (1, 2, 3)),
    ],
)
def test_every_option_is_as_the_stock_route(
    world_size: int, names: list[str], checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16, sharded=True)
    for found in run_ranks(compare, world_size, path, names, timeout=400):
        assert not {name: lines for name, lines in found.items() if lines}


# Options that the construction does not know take the stock route, with one warning that says so.


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
    if len(records) != 1 or "ZenFlow orders parameters in its own way" not in records[0]:
        lines.append(f"warnings: {records}")
    return lines


@pytest.mark.slow
def test_zenflow(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    assert run_ranks(check, 2, path, timeout=120) == [[], []]
