"""Bits of computed conversions equal eager torch's, for any chunk, world and layout.

One thread computes the references, since eager torch's bits depend on the number of threads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from zerostart.checkpoint.memory import memory_catalog
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.recipe.recording import trace_call
from zerostart.recipe.symbolic import snapshot
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, Plan, PlanOptions, join

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors], Tensors]
aten = torch.ops.aten
#: Elements after which torch's vectorised loops repeat.
BLOCK = 1024


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def layouts(shape: tuple[int, ...], world: int) -> Iterator[Layout]:
    for rank in range(world):
        yield flat_partition(shape, rank, world)
        if shape:
            yield dimension_shard(shape, len(shape) - 1, rank, world)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bfloat16:  # torch's own routines differ in the payload of a NaN
        tensor = tensor.masked_fill(tensor.isnan(), float("nan"))
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differing(
    convert: Convert, source: Tensors, world: int = 3, chunk: int = 1 << 13, reference: Tensors | None = None
) -> list[str]:
    """Return names of results whose bits on a rank differ from eager ``convert``."""
    return [name for name, right, _ in loaded(convert, source, world, chunk, reference) if not right]


def loaded(
    convert: Convert, source: Tensors, world: int, chunk: int, reference: Tensors | None = None
) -> Iterator[tuple[str, bool, Plan]]:
    """Yield each result in each layout's shards: name, whether the bits are equal, and plan."""
    if reference is None:
        with threads(1):
            reference = convert(dict(source))
    catalog = memory_catalog(source)
    symbols = {n: SymbolicTensor.of(n, tuple(t.shape), t.dtype, t.stride()) for n, t in source.items()}
    result = trace_call("test", lambda: {name: snapshot(t) for name, t in convert(dict(symbols)).items()})
    for name, want in reference.items():
        shape = tuple(want.shape)
        assert (tuple(result[name].shape), result[name].dtype) == (shape, want.dtype), name
        recipe = Recipe(Target(name, shape, want.dtype), result[name].pieces)
        want = want.reshape(-1)
        for layout in layouts(shape, world):
            destination = Destination(name, layout.numel, layout.owned, want.dtype, direct=True)
            plan = join(catalog, [(recipe, layout, destination)], PlanOptions(chunk_size=chunk))
            storage = torch.zeros(layout.numel, dtype=want.dtype)
            execute(plan, [storage], Progress(0, shown=False), threads=2)
            right = torch.zeros(layout.numel, dtype=want.dtype)
            for first, count, to in layout.runs():
                right[to : to + count] = want[first : first + count]
            yield name, torch.equal(bits(storage), bits(right)), plan


# All operators that torch tags as pointwise.


def pointwise() -> dict[str, Any]:
    actual = {}
    for packet in (getattr(aten, name) for name in dir(aten)):
        for overload in getattr(packet, "overloads", list)():
            function = getattr(packet, overload)
            if torch.Tag.pointwise in function.tags and not function._schema.is_mutable:
                actual[str(function)] = function
    return actual


def arguments(function: Any, tensors: list[torch.Tensor], scalar: float) -> list[Any]:
    """Return arguments for an operator by its schema, except those with defaults."""
    result: list[Any] = []
    remaining = iter(tensors)
    for argument in function._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            break
        if kind in ("Tensor", "Optional[Tensor]"):
            result.append(next(remaining))
        elif kind == "Optional[number]":
            result.append(scalar)
        elif argument.has_default_value():
            break
        else:
            result.append({"number": scalar, "float": scalar, "int": 2, "bool": False}[kind])
    return result


def values(kind: str, dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "whole numbers":
        return torch.randint(1, 20, (numel,), generator=generator, dtype=torch.int32)
    return (torch.randn(numel, generator=generator) * 5).to(dtype)


def each_operator(dtype: torch.dtype, kind: str, numel: int) -> tuple[dict[str, Convert], Tensors]:
    """Return a converter for each operator that accepts such tensors, and its inputs."""
    source = {name: values(kind, dtype, numel, seed) for seed, name in enumerate("abc")}
    converters: dict[str, Convert] = {}
    for name, function in pointwise().items():
        scalar = 3 if kind == "whole numbers" else 0.7

        def convert(d: Tensors, function: Any = function, scalar: float = scalar) -> Tensors:
            result = function(*arguments(function, list(d.values()), scalar))
            return {"w": result} if isinstance(result, torch.Tensor) else dict(zip("vw", result, strict=True))

        try:
            convert(source)
        except (RuntimeError, TypeError, KeyError, StopIteration):
            continue
        converters[name] = convert
    return converters, source


def wrong_operators(dtype: torch.dtype, kind: str, numel: int, world: int, chunk: int) -> list[str]:
    converters, source = each_operator(dtype, kind, numel)
    assert len(converters) > (40 if kind == "whole numbers" else 100), "the operators are tried"
    return [name for name, convert in converters.items() if differing(convert, source, world, chunk)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_pointwise_operator_has_the_bits_of_eager_torch(dtype: torch.dtype) -> None:
    assert wrong_operators(dtype, "normal", 3 * BLOCK + 77, 2, 1 << 13) == []


def test_every_pointwise_operator_on_integers_too() -> None:
    assert wrong_operators(torch.int32, "whole numbers", BLOCK + 77, 2, 1 << 12) == []


# Compositions, and operands with other strides.

functional = torch.nn.functional


def smooth(d: Tensors) -> Tensors:
    """Combine several computations of conversions."""
    w, v, row = d["w"], d["v"], d["row"]
    column = w.float().pow(2).mean(1, keepdim=True)
    return {
        "square": w**2,
        "cube": w**3,
        "power": w.abs() ** 0.3,
        "inverse": 1 / w,
        "rsqrt": torch.rsqrt(w.abs() + 1),
        "decay": -torch.exp(w.float()),
        "step": functional.softplus(w) + 1,
        "silu": functional.silu(w) * v,
        "gelu": functional.gelu(w, approximate="tanh"),
        "two": torch.exp2(w) * torch.exp(-w),
        "weighed": torch.sigmoid(w) * w + v,
        "mixed": torch.lerp(w, v, 0.3),
        "added": torch.addcmul(w, v, v, value=0.7),
        "twice": torch.add(w, v, alpha=0.7),
        "norm": w * torch.rsqrt(column + 1e-6),
        "scaled": torch.exp(w) * row,
        "row": torch.pow(w.abs(), row.abs()),
        "softmax": w.softmax(-1),
        "columns": w.softmax(0),
        "layer": functional.layer_norm(w, w.shape[-1:]),
        "turned": torch.exp(w).t().contiguous() * 3,
        "flipped": torch.tanh(w).flip(1),
        "fused": torch.cat([torch.tanh(w), torch.exp(v)], 1) * 1.5,
        "cast": torch.exp(w.float()).to(torch.bfloat16),
        "plain": (w + 1) * row - v / 3,
        "some": torch.where(w > 0, torch.expm1(w), w),
        "bounded": w.clamp(-0.5, 0.5).maximum(row),
    }


def sums(d: Tensors) -> Tensors:
    w, v = d["w"], d["v"]
    return {
        "rows": w.sum(0),
        "columns": w.sum(1),
        "all": w.sum(),
        "mean": w.mean(0, keepdim=True) + w,
        "most": w.amax(1),
        "norm": w / w.norm(dim=1, keepdim=True),
        "running": w.cumsum(0),
        "along": w.cumsum(1),
        "spread": w.std(0),
        "logs": w.logsumexp(1),
    } | products(w, v)


def products(w: torch.Tensor, v: torch.Tensor) -> Tensors:
    left, right = w[:64], v[:64]
    return {
        "mm": left @ right.mT,
        "gram": left.mT @ right,
        "addmm": torch.addmm(right[:, :64], left, right.mT, beta=0.5),
        "einsum": torch.einsum("ab,cb->ac", left, right),
        "batch": torch.bmm(left.reshape(8, 8, -1), right.reshape(8, -1, 8)),
        "outer": torch.einsum("ab,ac->abc", left[:, :9], right[:, :7]),
        "vector": left @ right[0],
        "linear": functional.linear(left, right),
    }


def matrices(dtype: torch.dtype, lie: str) -> Tensors:
    """Return tensors of one shape in row-major and column-major order, and as columns."""
    rows, columns = 69, 131
    generator = torch.Generator().manual_seed(1)
    result = {}
    for name, shape in {"w": (rows, columns), "v": (rows, columns), "row": (columns,)}.items():
        tensor = torch.randn(shape, generator=generator).to(dtype)
        if lie == "columns" and name != "row":
            tensor = tensor.t().contiguous().t()
        if lie == "gaps" and name != "row":
            tensor = torch.cat([tensor, tensor], 1)[:, :columns]
        result[name] = tensor
    return result


@pytest.mark.parametrize(
    ("lie", "dtype"), [("rows", torch.float32), ("columns", torch.bfloat16), ("gaps", torch.float32)]
)
def test_compositions_have_the_bits_of_eager_torch(lie: str, dtype: torch.dtype) -> None:
    for convert in (smooth, sums):
        assert differing(convert, matrices(dtype, lie), 2) == []


def test_memory_read_in_another_type_has_the_bits_of_eager_torch() -> None:
    def convert(d: Tensors) -> Tensors:
        w, short = d["w"], d["short"]
        written = short.t().contiguous()
        written.view(torch.uint8)[0].fill_(3)
        copied = torch.empty(24, 16).copy_(w.t())
        pairs = torch.view_as_complex(copied.view(24, 8, 2))
        pairs.imag.mul_(2)
        return {
            "bytes": short.t().contiguous().view(torch.uint8),
            "same size": short.t().contiguous().view(torch.int16),
            "joined": torch.cat([short.t()]).view(torch.uint8),
            "kept": short.t()
            .to(torch.bfloat16, memory_format=torch.contiguous_format, copy=True)
            .view(torch.uint8),
            "reshaped": short.t().reshape(48, 8).view(torch.int32),
            "complex": torch.view_as_real(
                torch.view_as_complex(w.t().contiguous().reshape(-1, 2)).conj().resolve_conj()
            ),
            "inner": torch.view_as_real(
                torch.view_as_complex(w.view(16, 12, 2).permute(1, 0, 2).contiguous())
            ),
            "written": written,
            "copied": copied,
            "powers": torch.exp(w.t().contiguous()),
        }

    real = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    assert differing(convert, {"w": real, "short": real.flip(0).bfloat16()}) == []


def test_the_number_of_threads_changes_nothing() -> None:
    numel = 90_003
    source = {"w": values("normal", torch.float32, numel, 0).view(3, -1)}

    def convert(d: Tensors) -> Tensors:
        return {"silu": functional.silu(d["w"]), "turned": torch.exp2(d["w"].t()), "sum": d["w"].sum()}

    with threads(1):
        reference = convert(source)
    for count in (2, 3):
        with threads(count):
            assert differing(convert, source, 2, 1 << 20, reference) == []
            assert torch.get_num_threads() == count


# Python numbers and tensors of one element.


def test_numbers_keep_the_precision_of_the_tensor_they_go_into() -> None:
    def convert(d: Tensors) -> Tensors:
        like = d["double"]
        written = like.clone()
        written[1] = 0.1
        scalar = torch.scalar_tensor(0.1, dtype=torch.float64)
        return {
            "filled": torch.empty_like(like).fill_(0.1) + like,
            "tensor": torch.empty_like(like).fill_(scalar) * like,
            "written": written,
            "full": torch.full(like.shape, 0.1, dtype=torch.float64) * like,
            "new": like.new_full(like.shape, 1 / 3) + like,
            "alike": torch.full_like(like, 1 / 3) * like,
            "scalar": scalar * like,
            "times": like * 0.1,
            "masked": like.masked_fill(like > 0, 0.1),
            "where": torch.where(like > 0, like, 0.1),
            "padded": functional.pad(like, (0, 1), value=0.1),
            "half": d["half"] * 0.1 + scalar,
            "halves": d["half"] * torch.tensor(0.1) / 3,
            "one": d["half"] * d["one"],
            "whole": d["whole"] * 0.1,
            "big": d["whole"].clone().fill_(2**53 + 1) + d["whole"],
            "int": d["whole"] // 3 + d["whole"] % 5,
        }

    source = {
        "double": values("normal", torch.float64, 77, 0).view(7, 11),
        "half": values("normal", torch.bfloat16, 77, 1).view(7, 11),
        "one": torch.tensor(0.1),
        "whole": torch.arange(-38, 39).view(7, 11),
    }
    for world, chunk in ((1, 64), (3, 64), (2, 1 << 16)):
        assert differing(convert, source, world, chunk) == []
