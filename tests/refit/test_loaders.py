"""Trace loaders on symbolic tensors, and compare with a run on element numbers."""

from collections.abc import Callable, Iterable, Mapping
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hypothesis_settings import count_examples
from tests.recipe.graphs import operations
from zerostart import geometry
from zerostart.errors import ConversionError
from zerostart.recipe import Computed, Recipe, Recipes, SymbolicTensor
from zerostart.refit.loaders import trace_loader

Pairs = Iterable[tuple[str, torch.Tensor]]
Tensors = dict[str, torch.Tensor]
#: Larger than any element number of a source; numbers of own tensors are negative.
STRIDE = 10_000


def symbols(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, SymbolicTensor]:
    return {name: SymbolicTensor.of(name, shape, dtype) for name, shape in shapes.items()}


def numbers(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    return {
        name: 1 + torch.arange(i * STRIDE, i * STRIDE + torch.Size(shape).numel()).view(shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


def as_numbers(recipe: Recipe, before: torch.Tensor, sources: Tensors) -> torch.Tensor:
    """Apply the recipe to element numbers, over the contents ``before``."""
    shape = tuple(before.shape)
    out = before.clone(memory_format=torch.contiguous_format).reshape(-1)
    box = geometry.Box((0,) * len(shape), shape)
    for piece in recipe.pieces:
        for copy in geometry.copies_between(piece, box, 0, geometry.row_major_strides(shape)):
            source = copy.source.value if isinstance(copy.source, Computed) else sources[str(copy.source)]
            assert source is not None, "only constants are computed here"
            sizes = [size for size, _, _ in copy.loops]
            values = source.reshape(-1).as_strided(sizes, [s for _, s, _ in copy.loops], copy.start)
            out.as_strided(sizes, [d for _, _, d in copy.loops], copy.to).copy_(values)
    return out.view(shape)


def check(
    load: Callable[[Mapping[str, torch.Tensor]], Callable[[Pairs], object]],
    shapes: Mapping[str, tuple[int, ...]],
    make: Callable[[], Tensors],
    dtype: torch.dtype = torch.float32,
) -> Recipes:
    """Trace and run the loader ``load(own)`` of own tensors, which ``make`` creates as numbers."""
    before, after = make(), make()
    load(after)(iter(numbers(shapes).items()))
    own = {name: t.to(dtype) if t.is_contiguous() else t.t().to(dtype).t() for name, t in make().items()}
    tied = {name: next(o for o, t in before.items() if t is before[name]) for name in before}
    own = {name: own[tied[name]] for name in own}
    copies = {name: t.clone() for name, t in own.items()}
    recipes = trace_loader(load(own), symbols(shapes, dtype), own, "a loader")
    for name, want in after.items():
        assert torch.equal(own[name], copies[name]), "the trace changed a tensor"
        recipe = recipes.by_name.get(name)
        have = before[name] if recipe is None else as_numbers(recipe, before[name], numbers(shapes))
        assert torch.equal(have, want), name
        unfilled = int((want < 0).sum())
        assert (recipe is None) == (unfilled == want.numel())
        assert recipes.partial.get(name, 0) == (0 if recipe is None else unfilled)
        if recipe is not None:
            assert sum(prod(piece.extent) for piece in recipe.pieces) == want.numel() - unfilled
    all_numbers = torch.cat([t.reshape(-1) for t in after.values()])
    have = {name for name, t in numbers(shapes).items() if torch.isin(t, all_numbers).any()}
    assert set(recipes.coverage.unexpected) <= shapes.keys() - have
    return recipes


@st.composite
def programs(
    draw: st.DrawFn,
) -> tuple[Callable[..., Callable[[Pairs], object]], dict[str, tuple[int, ...]], Callable[[], Tensors]]:
    """Draw a loader that copies parts of its sources into views of its tensors."""
    shapes = {
        f"s{i}": tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
        for i in range(draw(st.integers(1, 3)))
    }
    sizes = [draw(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=1, max_size=3)) for _ in range(2)]
    turned = draw(st.booleans())

    def make() -> Tensors:
        tensors = {}
        for number, size in enumerate(sizes):
            numel = torch.Size(size).numel()
            tensors[f"p{number}"] = -1 - torch.arange(number * STRIDE, number * STRIDE + numel).view(size)
        if turned and tensors["p0"].dim() == 2:
            tensors["p0"] = tensors["p0"].t().contiguous().t()
        tensors["tied"] = tensors["p1"]
        return tensors

    moves: list[
        tuple[
            str,
            list[Callable[[torch.Tensor], torch.Tensor]],
            str | None,
            list[Callable[[torch.Tensor], torch.Tensor]],
        ]
    ] = []
    example = make()
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(example)))
        into, view = [], example[name]
        for _ in range(draw(st.integers(0, 3))):
            step = draw(operations(view))
            # Writes into a copy are lost, and writes into repeated elements are refused.
            if step is not None and (result := step(view)).numel() and shares(result, view):
                into.append(step)
                view = result
        source = draw(st.sampled_from([*shapes, None]))
        of: list[Callable[[torch.Tensor], torch.Tensor]] = []
        if source is not None:
            weight = numbers(shapes)[source]
            for _ in range(draw(st.integers(0, 2))):
                step = draw(operations(weight))
                if step is not None and (result := step(weight)).numel() < 500 and result.numel():
                    of.append(step)
                    weight = result
            n = weight.numel()
            while view.numel() > n:
                dim = next(d for d, size in enumerate(view.shape) if size > 1)
                into.append(lambda x, dim=dim: x.narrow(dim, 0, 1))
                view = into[-1](view)
            size = tuple(view.shape)
            m = view.numel()
            if m > n:
                of.append(lambda x, size=size: x.reshape(-1)[:1].expand(size))
            else:
                of.append(lambda x, m=m, size=size: x.reshape(-1)[:m].reshape(size))
        moves.append((name, into, source, of))

    def load(own: Mapping[str, torch.Tensor]) -> Callable[[Pairs], object]:
        def run(pairs: Pairs) -> None:
            weights = dict(pairs)
            for name, into, source, of in moves:
                view = own[name].data
                for step in into:
                    view = step(view)
                if source is None:
                    view.zero_()
                else:
                    weight = weights[source]
                    for step in of:
                        weight = step(weight)
                    view.copy_(weight)

        return run

    return load, shapes, make


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    overlaps = any(s == 0 and n > 1 for s, n in zip(a.stride(), a.shape, strict=True))
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and not overlaps


@settings(max_examples=count_examples(150, 4000))
@given(programs())
def test_a_traced_loader_fills_what_it_fills_eagerly(
    program: tuple[
        Callable[..., Callable[[Pairs], object]], dict[str, tuple[int, ...]], Callable[[], Tensors]
    ],
) -> None:
    try:
        check(*program)
    except ConversionError as error:
        if "no box of its memory" not in str(error):
            raise


def test_experts_columns_and_padding() -> None:
    """Trace what engines do: stack experts, cut columns, pad the vocabulary."""
    shapes = {f"e{i}.{kind}": (6, 8) for i in range(5) for kind in ("gate", "up")}
    shapes |= {"down": (8, 6), "vocabulary": (5, 8), "qkv": (12, 8)}

    def make() -> Tensors:
        sizes = {"w13": (3, 6, 8), "down": (8, 3), "vocabulary": (8, 8), "qkv": (12, 8), "own": (4,)}
        return {n: -1 - torch.arange(torch.Size(s).numel()).view(s) for n, s in sizes.items()}

    def load(own: Mapping[str, torch.Tensor]) -> Callable[[Pairs], object]:
        def run(pairs: Pairs) -> None:
            for name, weight in pairs:
                if name.startswith("e"):
                    number, kind = int(name[1]), name.split(".")[1]
                    if number not in (1, 3, 4):  # of other ranks
                        continue
                    slot = own["w13"].data[(1, 3, 4).index(number)]
                    slot.narrow(0, 0 if kind == "gate" else 3, 3).copy_(weight.narrow(0, 3, 3))
                elif name == "down":
                    own["down"].data.copy_(weight.chunk(2, dim=1)[1])
                elif name == "vocabulary":
                    own["vocabulary"].data.fill_(0)
                    own["vocabulary"][:5].data.copy_(weight)
                    own["vocabulary"][5:].data.fill_(0)
                else:
                    rows = weight.view(2, 3, 2, 8).transpose(0, 1).reshape(12, 8)
                    for part, into in zip(rows.split([6, 6]), own["qkv"].data.chunk(2), strict=True):
                        into.copy_(part)

        return run

    recipes = check(load, shapes, make)
    assert recipes.coverage.missing == ("own",)
    assert set(recipes.coverage.unexpected) == {n for n in shapes if n[:2] in ("e0", "e2")}
    assert len(recipes.by_name["w13"].pieces) == 2, "a stack of experts is one run of tensors"


def _by_value(own: Tensors, weight: torch.Tensor) -> None:
    if weight.sum() > 0:
        own["p"].data.copy_(weight)


def _outside(own: Tensors, weight: torch.Tensor) -> None:
    OUTSIDE.copy_(weight)


def _added(own: Tensors, weight: torch.Tensor) -> None:
    own["p"].data.add_(weight)


def _by_old_value(own: Tensors, weight: torch.Tensor) -> None:
    own["p"].data.copy_(weight if own["p"].sum() > 0 else -weight)


def _reshaped(own: Tensors, weight: torch.Tensor) -> None:
    own["p"].data = weight[:2]


def _fails(own: Tensors, weight: torch.Tensor) -> None:
    raise KeyError("no such layer")


def _compared(own: Tensors, weight: torch.Tensor) -> None:
    if weight[0, 0].item() > 1:
        own["p"].data.copy_(weight)


OUTSIDE = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (_by_value, "depends on the values of the weights"),
        (_outside, "none of its parameters and buffers"),
        (_added, "fills p from p as it was before the load"),
        (_by_old_value, "uses values that p has before the load"),
        (_reshaped, "replaces p, torch.float32 [4, 4], by a tensor of torch.float32 [2, 4]"),
        (_fails, "after it was given w): KeyError: 'no such layer'"),
        (_compared, "depends on the values of the weights"),
    ],
)
def test_an_untraceable_loader_raises_one_sentence(load: Callable[..., None], says: str) -> None:
    own: Tensors = {"p": torch.ones(4, 4)}

    def run(pairs: Pairs) -> None:
        for _, weight in pairs:
            load(own, weight)

    with pytest.raises(ConversionError) as caught:
        trace_loader(run, symbols({"w": (4, 4)}, torch.float32), own, "the engine")
    assert says in str(caught.value)
    assert torch.equal(own["p"], torch.ones(4, 4))
