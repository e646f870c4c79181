"""Initialise parameters that a checkpoint lacks, in shards.

The model's own initialiser has run on meta under an ``OperatorLog``. The logged calls that wrote a parameter
are its program. A program of element-wise calls with at most one random call runs chunk by chunk in row-major
order, with the same result: torch's CPU generator consumes its stream in element order, ``normal_`` in blocks
of 16 (ATen, ``normal_fill``). Every rank draws the whole stream and keeps its share, so all world sizes agree
without messages.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zerostart.geometry.layout import Layout
from zerostart.models.operator_log import Op, OperatorLog

aten = torch.ops.aten
#: States of torch's generator by position in the log.
States = Mapping[int, torch.Tensor]
#: Elements of a chunk; a multiple of the generator's block of 16.
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
#: Calls that write every element and run chunk by chunk.
_WHOLE = {*_FACTORIES, *_RANDOM, *_CONSTANT}


@dataclass(frozen=True)
class Program:
    """The calls that give a missing tensor its values."""

    #: Parameter or buffer, whose dtype the values have.
    meta: torch.Tensor
    #: View of the tensor as built: an engine may cut the parameter to a slice later.
    as_built: torch.Tensor
    log: OperatorLog
    #: Element-wise calls that write it; None if the whole tensor has to be made at once.
    steps: tuple[Op, ...] | None
    #: Positions of its random calls in the log.
    draws: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """True if every rank has to make the full tensor."""
        return self.steps is None

    def fill(self, layout: Layout, storage: torch.Tensor, states: States | None = None) -> None:
        """Write this rank's share into 1-D ``storage``, and zero its padding.

        ``states`` of the generator before each of ``draws``; None if it is in the state of the first one.
        """
        assert prod(layout.shape) == self.as_built.numel(), "a share of the whole tensor"
        if layout.owned < layout.numel:
            storage[layout.owned :].zero_()
        for start, values in self._make_chunks(states):
            _copy_owned(values, start, layout, storage)

    def _make_chunks(self, states: States | None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield row-major runs as ``(first element, values on the CPU)``."""
        if self.steps is None or states is not None:
            # All calls that lead to it; with states, each draw starts as in the unsharded model.
            (value,) = self.log.values([self.as_built], torch.device("cpu"), states)
            yield 0, value.detach().contiguous().reshape(-1)
            return
        total = self.as_built.numel()
        # All chunks share one buffer.
        buffer = torch.empty(min(total, CHUNK + _BLOCK), dtype=self.meta.dtype, device="cpu")
        start = 0
        for count in _split_counts(total):
            chunk = buffer[:count]
            for op in self.steps:
                _apply(op, chunk, start)
            yield start, chunk
            start += count


def fill_missing(missing: Sequence[tuple[Program, Layout, torch.Tensor]], start: int | None) -> None:
    """Run programs for this rank's shares, in the initialiser's order.

    ``start`` is the initialiser's first call in the log, None without an initialiser. All its draws are made,
    also those for other tensors, since they move the generator. Draws of constructors happen on meta and do
    not move it, so their programs run last.

    Programs with several draws, and programs that share a draw, run after all draws, from the recorded states
    of the generator.
    """
    # One generator, one stream: a value is right only if all that the unsharded initialiser drew before it
    # has been drawn. ``calls`` maps a place in the log to what moves the generator past that draw. With a
    # missing parameter at d1, one at d3 and d4 (two draws), and one that only its constructor drew (d0):
    #
    #     log:    d0     d1 = start   d2        d3     d4
    #     called  last   first: fill  discard   note   note    and then: the program of d3 and d4
    if not missing:
        return
    # Programs with several or shared draws cannot run while the stream passes.
    count = Counter(at for program, _, _ in missing for at in program.draws)
    postponed = {
        id(program)
        for program, _, _ in missing
        if len(program.draws) > 1 or any(count[at] > 1 for at in program.draws)
    }
    later = [entry for entry in missing if id(entry[0]) in postponed]
    # Record the generator's state before each of their draws, then draw and discard.
    recorded = {at for program, _, _ in later for at in program.draws}
    states: dict[int, torch.Tensor] = {}
    log = missing[0][0].log
    calls: dict[int, Callable[[], None]] = {
        at: functools.partial(_record_state, log, at, states) for at in recorded
    }
    if start is not None:
        # Draws for tensors of the checkpoint move the generator too.
        discarded = (at for at, op in enumerate(log.ops[start:], start) if op.random and at not in recorded)
        calls |= {at: functools.partial(_discard, log.ops[at]) for at in discarded}
    for program, layout, storage in missing:
        if id(program) not in postponed:
            fill = functools.partial(program.fill, layout, storage)
            if program.draws:
                calls[program.draws[0]] = fill  # replaces the discarded draw
            else:
                fill()  # constants need no generator
    # Draws of constructors come last: they never moved the generator.
    for at in sorted(calls, key=lambda at: (at < (start or 0), at)):
        calls[at]()
    # Restore the end of the stream after these programs.
    end = torch.get_rng_state()
    for program, layout, storage in later:
        program.fill(layout, storage, states)
    torch.set_rng_state(end)


def _record_state(log: OperatorLog, at: int, states: dict[int, torch.Tensor]) -> None:
    states[at] = torch.get_rng_state()
    _discard(log.ops[at])


def find_program(meta: torch.Tensor, log: OperatorLog) -> Program | None:
    """Return a meta tensor's program; None without a value."""
    steps: list[tuple[int, Op]] = []
    chunked = True
    for at, op in log.writers(meta):
        steps.append((at, op))
        # A call that writes every element makes earlier steps void; their draws still count.
        if op.func in _FACTORIES or op.overwritten is not None:
            steps, chunked = [(at, op)], op.func in _WHOLE or _is_constant_copy(op)
        elif not _is_elementwise(op, meta):
            chunked = False
    if not any(op.func not in (aten.empty.memory_format, aten.empty_like.default) for _, op in steps):
        return None
    # The second draw starts after the first has drawn the whole tensor.
    draws = tuple(at for at, op in steps if op.random)
    if chunked and len(draws) <= 1:
        return Program(meta, meta.detach(), log, tuple(op for _, op in steps), draws)
    return Program(meta, meta.detach(), log, None, tuple(log.draws(meta)))


def _discard(op: Op) -> None:
    if op.func in _RANDOM and op.args[0].is_contiguous():
        for count in _split_counts(op.args[0].numel()):
            op.func(torch.empty(count, dtype=op.args[0].dtype, device="cpu"), *op.args[1:], **op.kwargs)
        return
    args, kwargs = tree_map(_make_stand_in, (op.args, op.kwargs))
    op.func(*args, **kwargs)


def _make_stand_in(value: object) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        # torch draws other numbers for elements that are not contiguous.
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _split_counts(total: int) -> Iterator[int]:
    while total:
        count = CHUNK if total >= CHUNK + _BLOCK else total
        yield count
        total -= count


def _is_constant_copy(op: Op) -> bool:
    return op.func is aten.copy_.default and op.args[1].device.type != "meta"


def _is_elementwise(op: Op, meta: torch.Tensor) -> bool:
    written = op.args[0]
    if op.func in _CONSTANT and written.is_contiguous():
        return True  # a part, such as the row of a padding index
    if op.func not in _ELEMENTWISE:
        return False
    covers = written.numel() == meta.numel() and written.is_contiguous() and written.storage_offset() == 0
    return covers and all(
        not isinstance(a, torch.Tensor) or (a.device.type != "meta" and a.numel() == 1) for a in op.args[1:]
    )


def _apply(op: Op, chunk: torch.Tensor, start: int) -> None:
    if op.func in _FACTORIES:
        _FACTORIES[op.func](chunk)
        return
    written = op.args[0]
    if _is_constant_copy(op):
        # A constant from the CPU.
        source = op.args[1].expand(written.shape).reshape(-1)
        chunk.copy_(source[start : start + chunk.numel()])
        return
    # A call on a part (a padding row) affects only its overlap with the chunk.
    low = max(0, written.storage_offset() - start)
    high = min(chunk.numel(), written.storage_offset() + written.numel() - start)
    if low < high:
        op.func(chunk[low:high], *op.args[1:], **op.kwargs)


def _copy_owned(values: torch.Tensor, start: int, layout: Layout, storage: torch.Tensor) -> None:
    """Copy the part of a run that ``layout`` owns."""
    for first, count, to in layout.runs():
        low, high = max(first, start), min(first + count, start + values.numel())
        if low < high:
            storage[to + low - first : to + high - first].copy_(values[low - start : high - start])
