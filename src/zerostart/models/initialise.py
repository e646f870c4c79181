"""Initialising what a checkpoint lacks, in shards.

The model's own initialiser has run on the meta device under an ``OpLog``. For a missing parameter the
calls that wrote it are its program. Where they work element by element, with at most one random call, the
program runs chunk by chunk over the row-major order and gives what it would give at once: torch's CPU
generator consumes its stream in element order, ``normal_`` in blocks of 16 (ATen, ``normal_fill``). Every
rank draws the whole stream and keeps its own share, so all world sizes agree without any message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from zerostart.layout import Layout
from zerostart.models.oplog import Op, OpLog

__all__ = ["CHUNK", "Program", "fill_missing", "program_of"]

aten = torch.ops.aten
#: Elements made at a time; a multiple of the generator's block of 16.
CHUNK = 1 << 20
_BLOCK = 16

_RANDOM = {aten.normal_.default, aten.uniform_.default}
_CONSTANT = {aten.fill_.Scalar, aten.zero_.default}
_ELEMENTWISE = {
    aten.mul_.Scalar,
    aten.mul_.Tensor,
    aten.add_.Scalar,
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.div_.Tensor,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.erfinv_.default,
    aten.exp_.default,
    aten.log_.default,
    aten.neg_.default,
}
_FACTORIES: dict[object, Callable[[torch.Tensor], object]] = {
    aten.empty.memory_format: lambda t: t,
    aten.empty_like.default: lambda t: t,
    aten.zeros.default: lambda t: t.zero_(),
    aten.zeros_like.default: lambda t: t.zero_(),
    aten.ones.default: lambda t: t.fill_(1),
    aten.ones_like.default: lambda t: t.fill_(1),
    aten.randn.default: lambda t: t.normal_(),
    aten.rand.default: lambda t: t.uniform_(),
}


@dataclass(frozen=True)
class Program:
    """How a missing tensor gets its values.

    ``steps`` is None where the calls are not element by element: then the whole tensor is made, once, and
    ``whole`` says so in the report. ``place`` orders the programs of a model as its initialiser drew, and
    ``discarded`` are the draws, with places, that a later call overwrote: they too move the generator on.
    """

    meta: torch.Tensor
    log: OpLog
    steps: tuple[Op, ...] | None
    place: tuple[bool, int] = (False, 0)
    discarded: tuple[tuple[int, Op], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the full tensor has to be made on every rank."""
        return self.steps is None

    def fill(self, layout: Layout, storage: torch.Tensor) -> None:
        """Write this rank's share into ``storage`` (1-D, ``layout.numel`` elements) and zero its padding."""
        if layout.owned < layout.numel:
            storage[layout.owned :].zero_()
        for start, values in self._chunks():
            _keep(values, start, layout, storage)

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Consecutive runs of the row-major order, as ``(first element, values on the CPU)``."""
        if self.steps is None:
            (value,) = self.log.values([self.meta], torch.device("cpu"))
            yield 0, value.detach().contiguous().reshape(-1)
            return
        total = self.meta.numel()
        buffer = torch.empty(min(total, CHUNK + _BLOCK), dtype=self.meta.dtype)
        start = 0
        for count in _counts(total):
            chunk = buffer[:count]
            for op in self.steps:
                _apply(op, chunk, start)
            yield start, chunk
            start += count


def fill_missing(missing: Iterable[tuple[Program, Layout, torch.Tensor]]) -> None:
    """Run the programs for this rank's shares of the storages, in the order in which the initialiser drew."""
    draws: list[tuple[tuple[bool, int], Callable[[], None]]] = []
    for program, layout, storage in missing:
        draws.append((program.place, functools.partial(program.fill, layout, storage)))
        draws += [((False, at), functools.partial(_discard, op)) for at, op in program.discarded]
    for _, draw in sorted(draws, key=lambda entry: entry[0]):
        draw()


def program_of(meta: torch.Tensor, log: OpLog, start: int = 0) -> Program | None:
    """The program of a meta tensor, None where nothing in the log gave it a value.

    ``start`` is the first call of the initialiser. Draws before it, in constructors, happen on meta in
    transformers and leave the generator alone; a tensor that has only such comes last.
    """
    steps: list[Op] = []
    drawn: list[tuple[int, Op]] = []
    discarded: list[tuple[int, Op]] = []
    chunked = True
    for at, op in log.writers(meta):
        steps.append(op)
        if op.func in _FACTORIES or op.overwritten is not None:
            steps, chunked = [op], op.func in _FACTORIES or _in_chunks(op)
            discarded += [entry for entry in drawn if entry[0] >= start]
            drawn = []
        elif not _by_element(op, meta):
            chunked = False
        if op.opaque or op.func in _RANDOM:
            drawn.append((at, op))
    if not any(op.func not in (aten.empty.memory_format, aten.empty_like.default) for op in steps):
        return None
    draws = sum(op.func in _RANDOM or op.func in (aten.randn.default, aten.rand.default) for op in steps)
    first = drawn[0][0] if drawn else start
    return Program(
        meta, log, tuple(steps) if chunked and draws <= 1 else None, (first < start, first), tuple(discarded)
    )


def _discard(op: Op) -> None:
    """Draw what ``op`` drew, chunk by chunk where that is the same, and forget it."""
    written = op.args[0]
    counts = list(_counts(written.numel())) if op.func in _RANDOM else [tuple(written.shape)]
    for count in counts:
        op.func(torch.empty(count, dtype=written.dtype), *op.args[1:], **op.kwargs)


def _counts(total: int) -> Iterator[int]:
    """Chunks of ``total`` elements; fewer than 16 on their own are drawn differently, and join the last."""
    while total:
        count = CHUNK if total >= CHUNK + _BLOCK else total
        yield count
        total -= count


def _covers(tensor: torch.Tensor, meta: torch.Tensor) -> bool:
    return tensor.numel() == meta.numel() and tensor.is_contiguous() and tensor.storage_offset() == 0


def _in_chunks(op: Op) -> bool:
    return op.func in _RANDOM or op.func in _CONSTANT or _is_constant_copy(op)


def _is_constant_copy(op: Op) -> bool:
    return op.func is aten.copy_.default and op.args[1].device.type != "meta"


def _by_element(op: Op, meta: torch.Tensor) -> bool:
    written = op.args[0]
    if op.func in _CONSTANT and written.is_contiguous():
        return True  # a part, such as the row of a padding index
    scalars = all(
        not isinstance(a, torch.Tensor) or (a.device.type != "meta" and a.numel() == 1) for a in op.args[1:]
    )
    return op.func in _ELEMENTWISE and scalars and _covers(written, meta)


def _apply(op: Op, chunk: torch.Tensor, start: int) -> None:
    """One call on the elements ``[start, start + len(chunk))``."""
    if op.func in _FACTORIES:
        _FACTORIES[op.func](chunk)
        return
    written = op.args[0]
    if _is_constant_copy(op):
        source = op.args[1].expand(written.shape).reshape(-1)
        chunk.copy_(source[start : start + chunk.numel()])
        return
    low = max(0, written.storage_offset() - start)
    high = min(chunk.numel(), written.storage_offset() + written.numel() - start)
    if low < high:
        op.func(chunk[low:high], *op.args[1:], **op.kwargs)


def _keep(values: torch.Tensor, start: int, layout: Layout, storage: torch.Tensor) -> None:
    """Copy the part of ``values``, a run from element ``start`` on, that ``layout`` owns."""
    for first, count, to in layout.runs():
        low, high = max(first, start), min(first + count, start + values.numel())
        if low < high:
            storage[to + low - first : to + high - first].copy_(values[low - start : high - start])
