"""Computed conversions, compared with the same code on real tensors."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hypothesis_settings import count_examples
from tests.recipe.graphs import operations
from tests.recipe.shards import compare, recipe_of, symbols_of
from zerostart.errors import ConversionError
from zerostart.recipe import SymbolicTensor
from zerostart.recipe.recording import trace_call
from zerostart.transfer.planning import Plan

Tensors = dict[str, torch.Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plans(
    convert: Callable[[Tensors], Tensors], source: Tensors, world: int = 3, chunk: int = 1 << 16
) -> list[Plan]:
    """Load the results of ``convert`` in shards, compare them, and return the plans."""
    expected = convert({name: tensor.clone() for name, tensor in source.items()})
    result = trace_call("test", lambda: convert(dict(symbols_of(source))))
    recipes = {name: recipe_of(name, tensor) for name, tensor in result.items()}
    return compare(recipes, expected, source, world, chunk)


def most_memory(actual: list[Plan]) -> int:
    return max(computation.nbytes for plan in actual for computation in plan.computations)


def test_arithmetic_is_done_in_chunks_on_its_own_elements_only() -> None:
    actual = plans(lambda d: {"w": (d["w"] + 1) * d["scale"]}, {"w": random(300, 200), "scale": random(200)})
    assert most_memory(actual) <= 1 << 16
    assert sum(plan.read_bytes for plan in actual[::2]) <= 1.1 * 4 * (300 * 200 + 3 * 200)


def test_a_block_scale_is_read_where_its_block_is() -> None:
    def dequantise(d: Tensors) -> Tensors:
        blocks = d["w"].to(torch.float32).view(4, 128, 3, 128)
        return {"w": (blocks * d["s"].view(4, 1, 3, 1)).to(torch.bfloat16).view(512, 384)}

    source = {"w": random(512, 384, dtype=torch.float8_e4m3fn), "s": random(4, 3, seed=1)}
    actual = plans(dequantise, source)
    assert most_memory(actual) <= 1 << 16
    assert sum(plan.read_bytes for plan in actual[::2]) <= 1.05 * 512 * 384


def test_a_cast_that_rounds_is_not_skipped() -> None:
    plans(lambda d: {"w": d["w"].to(torch.bfloat16).to(torch.float32)}, {"w": random(30, 20)})
    plans(lambda d: {"w": d["w"].half().to(torch.bfloat16).T}, {"w": random(30, 20)})
    assert not plans(lambda d: {"w": d["w"].float().double()}, {"w": random(8, 2)})[0].computations


def test_writes_into_tensors_are_followed() -> None:
    def assemble(d: Tensors) -> Tensors:
        out = torch.empty(60, 20)
        out[:30] = d["a"]
        out[30:] = d["b"]
        out[:, 3] = 0
        out[1::2] *= 2
        out[5].add_(d["a"][2])
        d["a"].mul_(3)
        return {"out": out, "a": d["a"]}

    plans(assemble, {"a": random(30, 20), "b": random(30, 20, seed=1)})


def test_constants_tables_and_rows_by_number() -> None:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    source = {"w": random(6, 5), "bits": torch.randint(0, 256, (7, 9), dtype=torch.uint8)}
    plans(
        lambda d: {
            "rows": d["w"][torch.tensor([3, 4, 5, 1, 0, 2])],
            "few": d["w"][[0, 3]],
            "padded": torch.nn.functional.pad(d["w"], (0, 3, 1, 0), value=2.0),
            "more": torch.cat([d["w"], torch.zeros(3, 5), torch.ones_like(d["w"])]),
            "table": torch.stack([table[(d["bits"] & 7).long()], table[(d["bits"] >> 5).int()]], -1),
            "bits": d["w"].view(torch.int32),
            "kept": torch.where(d["w"] > 0, d["w"], -0.25),
        },
        source,
    )


def test_what_needs_whole_tensors_is_computed_once_and_right() -> None:
    def mix(d: Tensors) -> Tensors:
        return {"w": (d["a"] @ d["b"]) * 2, "n": d["a"] / d["a"].norm(dim=1, keepdim=True)}

    actual = plans(mix, {"a": random(30, 20), "b": random(20, 40)})
    assert all(len(plan.computations) <= 1 for plan in actual)


def test_random_and_value_dependent_conversions_are_refused_by_name() -> None:
    w = SymbolicTensor.of("w", (2, 2), torch.float32)
    with pytest.raises(ConversionError, match=r"conversion of w calls .*random"):
        torch.rand_like(w)
    for depends in (lambda: w.sum().item(), lambda: w.nonzero(), lambda: bool(w[0, 0] > 0), lambda: w[w > 0]):
        with pytest.raises(ConversionError, match=r"conversion of w calls .*depends on the values"):
            depends()


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def overwritten(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out.copy_(x)
    out[::2] *= 2
    return out


#: Computations whose bits do not depend on the grouping of elements.
CALCULATIONS: dict[str, Step] = {
    "add": lambda x, first: x + 1,
    "scale": lambda x, first: x * first.reshape(-1)[0],
    "self": lambda x, first: x * x - x,
    "round": lambda x, first: x.to(torch.bfloat16).to(torch.float32),
    "half": lambda x, first: x.half().float(),
    "sign": lambda x, first: torch.where(x > 0, x, -x),
    "write": lambda x, first: overwritten(x, first) if x.dim() else x,
    "cat": lambda x, first: torch.cat([x, x + 2]) if x.dim() else x,
    "rows": lambda x, first: x.amax(0, keepdim=True) + x if x.dim() and x.shape[0] else x,
}


@settings(max_examples=count_examples(50, 1500))
@given(st.data())
def test_random_mixtures_of_moves_and_arithmetic(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    source = {"w": random(*shape)}
    steps: list[Step] = []
    value = source["w"]
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            steps.append(CALCULATIONS[data.draw(st.sampled_from(sorted(CALCULATIONS)))])
        else:
            move = data.draw(operations(value))
            if move is None:
                continue
            steps.append(lambda x, first, move=move: move(x))
        value = steps[-1](value, source["w"])
        if not value.numel() or value.numel() > 2000:
            return

    def convert(tensors: Tensors) -> Tensors:
        result = tensors["w"]
        for step in steps:
            result = step(result, tensors["w"])
        return {"w": result}

    plans(convert, source, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([64, 1024, 1 << 20])))
