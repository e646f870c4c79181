"""Drawing the lines of random converters to fit the tensors that there are."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.recipe import program_tables as tables

REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int32, torch.int64, torch.int16)
#: A tensor is left alone if it is larger.
MOST_ELEMENTS = 1500


class Draw:
    """Draws lines for the tensors of ``space``, whose names are ``v`` and a number."""

    def __init__(self, rng: random.Random, space: dict[str, Any], known: int) -> None:
        self.rng = rng
        self.space = space
        self.known = known
        self.tries = 0

    @property
    def new(self) -> str:
        """The name of the next tensor."""
        return f"v{self.known}"

    def next_name(self, line: str) -> None:
        """Go on after a line that was kept."""
        self.known += f"v{self.known} " in line

    def line(self, kinds: "Sequence[tuple[int, Callable[[Draw], str | None]]]") -> str | None:
        """One more line; None where what was drawn does not fit."""
        self.tries += 1
        (chosen,) = self.rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        return chosen(self)

    def any(self, least: int = 0, kind: str = "any") -> str | None:
        """A tensor with ``least`` dimensions or more, the later ones more often."""
        fit = [
            name
            for name, t in self.space.items()
            if name[0] == "v" and name[1:].isdigit() and isinstance(t, torch.Tensor)
            if t.numel() <= MOST_ELEMENTS and t.dim() >= least and is_kind(t, kind)
        ]
        return self.rng.choices(fit, range(1, len(fit) + 1))[0] if fit else None

    def like(self, x: str) -> str:
        """Something that broadcasts with ``x``."""
        for _ in range(6):
            if (y := self.any()) and broadcasts(self.space[y], self.space[x]):
                return y
        return x

    def part(self, t: torch.Tensor) -> str:
        """An index that takes a part of ``t``, by slices and numbers."""
        parts = []
        for size in t.shape[: self.rng.randint(1, max(1, t.dim()))]:
            start = self.rng.randrange(size) if size else 0
            stop, step = self.rng.randint(start, size), self.rng.randint(1, 3)
            kinds = [
                ":",
                f"{start}:{stop}",
                f"{start}:",
                f"::{step}",
                str(start),
                f"-{1 + start}:",
                f"{start}::2",
            ]
            parts.append(self.rng.choice(kinds))
        if self.rng.random() < 0.15:
            parts.append("..." if len(parts) < t.dim() else "None")
        return ", ".join(parts) or "..."

    def dim(self, t: torch.Tensor) -> int:
        """A dimension, from either end."""
        return self.rng.randrange(-t.dim(), t.dim()) if t.dim() else 0

    def shape(self, numel: int) -> list[int]:
        """A factorisation of ``numel``."""
        shape, left = [], numel
        while left > 1 and len(shape) < 4:
            shape.append(self.rng.choice([f for f in range(1, left + 1) if left % f == 0]))
            left //= shape[-1]
        return [*shape, left] if left > 1 or not shape else shape

    def dtype(self, t: torch.Tensor) -> torch.dtype:
        """A dtype that ``t`` can be cast to with the same bits everywhere."""
        if t.dtype.is_complex:
            return self.rng.choice([torch.complex64, torch.complex128])
        return self.rng.choice([*REAL, *REAL, torch.complex64, *WHOLE])

    def strided(self, t: torch.Tensor) -> str:
        """Size, strides and maybe an offset that stay inside the storage of ``t``."""
        numel = t.untyped_storage().nbytes() // t.element_size()
        size = [self.rng.randint(1, 4) for _ in range(self.rng.randint(1, 3))]
        strides = [*torch.empty(size).stride()]
        if self.rng.random() < 0.5:
            strides = [self.rng.randint(0, 6) for _ in size]
        room = numel - 1 - sum((n - 1) * s for n, s in zip(size, strides, strict=True))
        if room < 0:
            return "(1,), (1,)"
        offset = f", {self.rng.randint(0, room)}" if self.rng.random() < 0.6 else ""
        return f"{tuple(size)}, {tuple(strides)}{offset}"


def is_kind(t: torch.Tensor, kind: str) -> bool:
    """Whether the elements of ``t`` are of that kind."""
    return kind == "any" or (t.dtype.is_floating_point if kind == "real" else t.dtype.is_complex)


def broadcasts(t: torch.Tensor, to: torch.Tensor) -> bool:
    """Whether ``t`` fits ``to``, and is real if that is."""
    if t.dtype.is_complex != to.dtype.is_complex or t.dim() > to.dim():
        return False
    return all(a in (1, b) for a, b in zip(reversed(t.shape), reversed(to.shape), strict=False))


def fill(d: Draw, text: str, x: str) -> str:
    """``text`` about the tensor ``x``, with what is in braces drawn."""
    t = d.space[x]
    dim, first = d.dim(t), t.shape[0] if t.dim() else 1
    size = t.shape[dim] if t.dim() else 1
    at = d.rng.randrange(size) if size else 0
    values = {
        "v": d.new,
        "x": x,
        "y": d.like(x),
        "z": d.any() or x,
        "d": dim,
        "e": d.dim(t),
        "n": d.rng.randint(1, 3),
        "i": at,
        "size": size,
        "length": d.rng.randint(0, max(0, size - at)),
        "part": d.part(t),
        "shape": d.shape(t.numel()),
        "dtype": d.dtype(t),
        "strides": d.strided(t),
        "rows": [d.rng.randrange(max(1, size)) for _ in range(d.rng.randint(1, 4))],
        "first": [d.rng.randrange(max(1, first)) for _ in range(2)],
        "order": d.rng.sample(range(t.dim()), t.dim()),
        "heads": d.rng.choice([f for f in range(1, first + 1) if first % f == 0] or [1]),
        "number": d.rng.choice([0, 1, -2, 0.5, 3]),
    }
    return text.format(**values)


def kinds_of(table: str, weight: int) -> list[tuple[int, Callable[[Draw], str | None]]]:
    """The lines of a table, each as often as ``weight`` says."""

    def drawing(least: str, kind: str, text: str) -> Callable[[Draw], str | None]:
        def draw(d: Draw) -> str | None:
            x = d.any(int(least), kind)
            return None if x is None else fill(d, text, x)

        return draw

    lines = [line.split(maxsplit=2) for line in table.strip().splitlines()]
    return [(weight, drawing(*line)) for line in lines]


def joined(d: Draw) -> str | None:
    """Several tensors of one shape, one after the other."""
    x = d.any(1)
    if x is None:
        return None
    t = d.space[x]
    others = [y for y in (d.any(1) for _ in range(3)) if y and d.space[y].shape == t.shape]
    parts = ", ".join(d.rng.sample([x, x, *others], d.rng.randint(1, 2)))
    how = d.rng.choice(["cat", "stack", "cat", "hstack", "vstack", "dstack", "column_stack"])
    dim = f", {d.dim(t)}" if how in ("cat", "stack") else ""
    return f"{d.new} = torch.{how}([{parts}]{dim})"


def assigned(d: Draw) -> str | None:
    """A part of a tensor given something that broadcasts to it."""
    x = d.any(1)
    if x is None:
        return None
    t = d.space[x]
    target = f"{d.rng.choice([x, x, f'{x}.data', f'{x}.detach()'])}[{d.part(t)}]"
    value = d.rng.choice([d.any() or "0", d.any() or "0", f"{target}.flip(0)", "0", "1.5", "-2"])
    kinds = ["{t} = {y}", "{t} = {y}", "{t}.copy_(torch.as_tensor({y}))", "{t} += {y}"]
    if not t.dtype.is_complex:
        kinds.append("{t} *= 2")
    y = d.space.get(value)
    if isinstance(y, torch.Tensor) and y.dtype.is_complex != t.dtype.is_complex:
        return None
    return d.rng.choice(kinds).format(t=target, y=value)


def through_view(d: Draw) -> str | None:
    """A write into a view of a tensor, or into a view of the view."""
    x = d.any(1)
    if x is None:
        return None
    t = d.space[x]
    dim = d.dim(t)
    views = [
        *(".T", ".view(-1)", f".transpose({dim}, {d.dim(t)})", ".unsqueeze(0)", f"[{d.part(t)}]", ".data"),
        *(f".unbind({dim})[0]", f".chunk(2, {dim})[-1]", f".select({dim}, 0)", ".flatten()", ".squeeze()"),
        *(f".split(2, {dim})[0]", ".mT", f".view_as({x})"),
        *((".real", ".imag", ".conj()", ".mH") if t.dtype.is_complex else ()),
    ]
    view = d.rng.choice(views)
    if d.rng.random() < 0.3:
        view += d.rng.choice([".T", ".unsqueeze(-1)", "[::2]", ".flip(0)[:1]", ".detach()"])
    writes = [".zero_()", ".fill_(1.5)", ".add_(1)", "[...] = 3", ".sub_(0.5)", f".copy_({d.like(x)})"]
    if not t.dtype.is_complex:
        writes += [".mul_(2)", ".neg_()"]
    return x + view + d.rng.choice(writes)


def buffer(d: Draw) -> str | None:
    """A new tensor, of the same size or twice that, which weights are written into."""
    x = d.any(1)
    if x is None:
        return None
    shape = list(d.space[x].shape)
    turned = tuple(torch.empty(shape[::-1], device="meta").permute(*range(len(shape) - 1, -1, -1)).stride())
    v, dtype, rows = d.new, f"dtype={x}.dtype", shape[0]
    if d.rng.random() < 0.4:
        twice = [2 * rows, *shape[1:]]
        make = d.rng.choice([f"torch.zeros({twice}, {dtype})", f"{x}.new_zeros({twice})"])
        part = d.rng.choice([f"[{rows}:]", f"[:{rows}]", "[::2]", "[1::2]"])
        writes = [f"{v}{part} = {x}", f"{v}{part}.copy_({x})", f"{v}[...] = 1; {v}{part} = {x}"]
    else:
        makes = [f"torch.empty_like({x})", f"torch.zeros({shape}, {dtype})", f"{x}.new_empty({shape})"]
        makes += [f"torch.zeros_like({x}).T.contiguous().T", f"torch.full({shape}, 2, {dtype})"]
        makes += [f"torch.empty_strided({shape}, {turned}, {dtype})", f"torch.ones({shape}, {dtype})"]
        make = d.rng.choice(makes)
        writes = [f"{v}[...] = {x}", f"{v}.copy_({x})", f"{v}[:] = {x}", f"{v}.T.copy_({x}.T)"]
        writes += [f"{v}.zero_(); {v}[::2] = {x}[::2]"]
    return f"{v} = {make}; {d.rng.choice(writes)}"


LINES = [
    *((20, kind) for kind in (assigned, through_view, buffer, joined)),
    *kinds_of(tables.ARITHMETIC, 2),
    *kinds_of(tables.VIEWS, 3),
    *kinds_of(tables.NEW, 3),
    *kinds_of(tables.WRITES, 4),
    *kinds_of(tables.COMPLEX, 4),
    *kinds_of(tables.BRANCHES, 4),
]
#: Lines that ask for the values of weights, or for their memory.
READS = kinds_of(tables.READS, 1)
