"""Chunked initialisation equals torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zerostart.geometry.layout import flat_partition
from zerostart.models import initialise
from zerostart.models.initialise import fill_missing, find_program
from zerostart.models.operator_log import OperatorLog

#: Initialises a parameter, with draws that count for values or only for the generator.
Initialiser = Callable[[torch.Tensor], object]
CHUNKED: dict[str, tuple[Initialiser, Initialiser | None]] = {
    "normal": (lambda t: nn.init.normal_(t, 0.5, 0.02), None),
    "uniform": (lambda t: nn.init.uniform_(t, -0.1, 0.3), None),
    "kaiming_uniform": (lambda t: nn.init.kaiming_uniform_(t, a=5**0.5), None),
    "xavier_normal": (lambda t: nn.init.xavier_normal_(t), None),
    "ones": (lambda t: nn.init.ones_(t), None),
    "padding row": (lambda t: (nn.init.normal_(t), t[1].zero_()), None),
    "overwritten": (
        lambda t: (nn.init.kaiming_uniform_(t), nn.init.normal_(t, std=3.0)),
        lambda t: nn.init.normal_(t, std=3.0),
    ),
}
WHOLE: dict[str, tuple[Initialiser, Initialiser | None]] = {
    "trunc_normal": (lambda t: nn.init.trunc_normal_(t, std=0.02, a=-0.01, b=0.03), None),
    "overwritten by trunc_normal": (
        lambda t: (nn.init.kaiming_uniform_(t), nn.init.trunc_normal_(t)),
        lambda t: nn.init.trunc_normal_(t),
    ),
    "eye": (lambda t: nn.init.eye_(t), None),
    "orthogonal": (lambda t: nn.init.orthogonal_(t), None),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialise, "CHUNK", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5), (16, 16), (33, 31), (2, 64)])
@pytest.mark.parametrize("name", [*CHUNKED, *WHOLE])
def test_shards_equal_the_whole_initialiser(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if name == "orthogonal" and dtype is not torch.float32:
        pytest.skip("torch has no QR in bfloat16")
    run, counts = {**CHUNKED, **WHOLE}[name]
    torch.manual_seed(11)
    expected = torch.empty(shape, dtype=dtype)
    (counts or run)(expected)
    after = torch.rand(1)
    log = OperatorLog()
    with torch.no_grad(), torch.device("meta"), log:
        meta = torch.empty(shape, dtype=dtype)
        run(meta)
    program = find_program(meta, log)
    assert program is not None
    assert program.whole == (name in WHOLE)
    for world in (1, 3):
        parts = []
        for rank in range(world):
            torch.manual_seed(11)
            layout = flat_partition(shape, rank, world)
            storage = torch.full((layout.numel,), 9.0, dtype=dtype)
            program.fill(layout, storage)
            parts.append(storage)
            assert torch.equal(torch.rand(1), after), "the generator must end where the whole call leaves it"
        actual = torch.cat(parts)
        assert torch.equal(actual[: expected.numel()].view(shape), expected)
        assert not actual[expected.numel() :].any()


def test_programs_draw_in_the_order_of_the_initialiser() -> None:
    def initialise_both(first: torch.Tensor, second: torch.Tensor) -> None:
        second.normal_()  # a child's parameter, drawn before its parent's
        first.uniform_()
        first.copy_(torch.rand(first.shape, device=first.device))
        torch.empty(3, device=first.device).bernoulli_(0.5)  # unused
        nn.init.trunc_normal_(first)  # earlier values are lost, but the generator has moved
        first.normal_(std=2.0)

    shapes = [(9, 20), (31, 7)]
    expected = [torch.empty(shape) for shape in shapes]
    torch.manual_seed(5)
    initialise_both(*expected)
    log = OperatorLog()
    with torch.no_grad(), torch.device("meta"), log:
        metas = [torch.empty(shape).uniform_() for shape in shapes]  # a constructor draws nothing on meta
        start = len(log.ops)
        initialise_both(*metas)
    missing = []
    for meta in metas:
        program = find_program(meta, log)
        assert program is not None
        layout = flat_partition(meta.shape, 0, 1)
        missing.append((program, layout, torch.empty(layout.numel)))
    torch.manual_seed(5)
    fill_missing(missing, start)
    for (_, _, storage), want in zip(missing, expected, strict=True):
        assert torch.equal(storage.view(want.shape), want)


def test_values_of_buffers_come_from_what_made_them() -> None:
    def make() -> list[torch.Tensor]:
        table = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
        angles = torch.outer(torch.arange(5).float(), table)
        mask = torch.full((4, 4), float("-inf")).triu_(1)
        order = torch.tensor([3, 1, 2])
        return [angles.cos(), mask, order, order[1:] * 2]

    expected = make()
    log = OperatorLog()
    with torch.device("meta"), log:
        metas = make()
    for got, want in zip(log.values(metas, torch.device("cpu")), expected, strict=True):
        assert torch.equal(got, want)


def test_a_value_looked_at_before_it_was_overwritten_is_the_old_one() -> None:
    log = OperatorLog()
    with torch.device("meta"), log:
        first = torch.arange(4.0)
        second = first * 2
        first.fill_(7)
    actual = log.values([first, second], torch.device("cpu"))
    assert actual[0].tolist() == [7, 7, 7, 7]
    assert actual[1].tolist() == [0, 2, 4, 6]
