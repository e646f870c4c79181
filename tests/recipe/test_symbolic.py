"""Traces compared with eager torch on element numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hypothesis_settings import count_examples
from tests.recipe.graphs import Graph, element_numbers, graphs, run_copies
from zerostart import geometry
from zerostart.recipe import SymbolicTensor


@settings(max_examples=count_examples(130, 4000))
@given(graphs())
def test_traced_graphs_equal_eager_torch(graph: Graph) -> None:
    for symbolic, eager in graph.results:
        assert symbolic.shape == eager.shape
        assert torch.equal(element_numbers(symbolic, graph.sources), eager)


@settings(max_examples=count_examples(100, 3000))
@given(graphs(), st.data())
def test_any_run_of_the_row_major_order_is_pulled_back(graph: Graph, data: st.DataObject) -> None:
    symbolic, eager = graph.results[-1]
    start = data.draw(st.integers(0, eager.numel()))
    stop = data.draw(st.integers(start, eager.numel()))
    strides = geometry.row_major_strides(eager.shape)
    out = torch.full((stop - start,), -1)
    copied = 0
    for box in geometry.row_major_boxes(tuple(eager.shape), start, stop):
        first = sum(o * s for o, s in zip(box.origin, strides, strict=True))
        copied += run_copies(symbolic, box, first - start, strides, out, graph.sources)
    assert torch.equal(out, eager.reshape(-1)[start:stop])
    assert copied == stop - start, "an element was copied twice"


def test_a_stack_of_experts_is_one_piece_and_a_rotary_permutation_too() -> None:
    experts = [SymbolicTensor.of(f"e{i}", (8, 4), torch.bfloat16) for i in range(64)]
    stacked = torch.stack(experts)
    assert len(stacked.pieces) == 1
    both = torch.cat(
        [stacked, torch.stack([SymbolicTensor.of(f"u{i}", (8, 4), torch.bfloat16) for i in range(64)])], 1
    )
    assert len(both.pieces) == 2
    rows = SymbolicTensor.of("q", (64, 16), torch.float32)
    assert len(rows.view(4, 8, 2, 16).transpose(1, 2).reshape(64, 16).pieces) == 1


def test_einops_patterns_arrive_as_the_same_operators() -> None:
    einops = pytest.importorskip("einops")
    numbers = torch.arange(2 * 3 * 4 * 5).view(6, 20)
    symbolic = SymbolicTensor.of("w", (6, 20), torch.float32)
    pattern = "(a b) (c d) -> (b c) a d"
    result = einops.rearrange(symbolic, pattern, a=2, c=4)
    assert torch.equal(element_numbers(result, {"w": numbers}), einops.rearrange(numbers, pattern, a=2, c=4))


def test_a_cast_is_noted_and_moves_nothing() -> None:
    result = SymbolicTensor.of("w", (2, 2), torch.float32).to(torch.bfloat16)
    assert result.dtype is torch.bfloat16
    assert torch.equal(element_numbers(result, {"w": torch.arange(4)}), torch.arange(4).view(2, 2))
