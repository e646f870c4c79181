"""ZeRO stages 1 and 2 from our load and from the stock route: buffers, masters and losses to the bit."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engines.zero12 import routes
from tests.engines.zero12.routes import CASES, Case
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.upstream.deepspeed.zero12_optimizers import alike, fingerprint
from zerostart.upstream.torch.byte_sums import BLOCK


def compare(path: Path) -> dict[str, list[str]]:
    """Both routes for each case, with where the flat buffers of ours lie."""
    found = {}
    for name in routes.available(CASES):
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


@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3)])
def test_every_option_is_as_the_stock_route(world_size: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16, sharded=True)
    for found in run_ranks(compare, world_size, path, timeout=400):
        assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.slow
@pytest.mark.timeout(620)
def test_four_ranks(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    for found in run_ranks(compare, 4, path, timeout=600):
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


# What tells whether parameters are the same on all ranks: any difference shows, wherever memory begins.


def hashed(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(fingerprint(tensor))


def test_bits_and_their_order_count_and_nothing_else() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3, 7, 11).bfloat16()
    first = hashed(tensor)
    assert hashed(tensor.clone()) == first
    assert hashed(torch.cat([tensor.new_zeros(5), tensor.reshape(-1)])[5:]) == first
    assert hashed(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == first
    others = [tensor.flip(0), tensor.flip(2), tensor.roll(4), -tensor, tensor.transpose(0, 1)]
    assert len({first, *map(hashed, others)}) == len(others) + 1
    assert hashed(torch.tensor([0.0])) != hashed(torch.tensor([-0.0]))
    assert hashed(torch.empty(0)) == hashed(torch.empty(0, 3))


def test_every_bit_shows() -> None:
    words = torch.zeros(6, dtype=torch.int64)
    seen = {hashed(words)}
    for place in range(6):
        for bit in range(64):
            other = words.clone()
            other[place] = torch.tensor(1, dtype=torch.int64) << bit
            seen.add(hashed(other))
    assert len(seen) == 1 + 6 * 64


def test_chunks_that_change_places_show() -> None:
    size = BLOCK
    data = torch.randint(0, 256, (3 * size + 5,), dtype=torch.uint8)
    other = data.clone()
    other[:size], other[size : 2 * size] = data[size : 2 * size], data[:size]
    assert hashed(data) == hashed(data.clone())
    assert hashed(data) != hashed(other)


def on_ranks() -> list[bool]:
    torch.manual_seed(3)
    tensors = [torch.randn(40) for _ in range(4)]
    if dist.get_rank() == 1:
        tensors[1][7], tensors[1][9] = tensors[1][9].clone(), tensors[1][7].clone()
        tensors[2][0] += 1
    found = alike(tensors, dist.group.WORLD)
    return [any(one is tensor for one in found) for tensor in tensors]


@pytest.mark.slow
def test_ranks_agree() -> None:
    assert run_ranks(on_ranks, 3) == [[True, False, False, True]] * 3
