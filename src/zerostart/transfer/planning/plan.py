"""A plan as plain data: it can be printed, summed, compared and run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerostart.checkpoint.storage import Storage
from zerostart.geometry import Box
from zerostart.recipe import Computed

#: Register of an operand, its shape, and its strides there in elements (None for row-major).
OperandView = tuple[int, tuple[int, ...], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Destination:
    """Local storage that the plan fills: ``numel`` elements of ``dtype``, the first ``owned`` of them real.

    ``direct`` tells storage that a read may land in (host memory) from storage behind a staging buffer.
    """

    name: str
    numel: int
    owned: int
    dtype: torch.dtype
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, padding included."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes of the bytes at ``at`` of a read.

    They are elements of ``dtype`` and go to destination number ``target`` from element ``to`` on, by
    ``loops`` of (size, source stride, destination stride). ``direct`` parts are one unbroken run on both
    sides with no cast, and can be read into place.
    """

    at: int
    dtype: torch.dtype
    target: int
    to: int
    loops: tuple[tuple[int, int, int], ...]
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last source element of the part, both included."""
        return (1 + sum((size - 1) * stride for size, stride, _ in self.loops)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Read:
    """One positioned read of ``nbytes`` at ``offset`` of file number ``file``.

    ``direct`` reads scatter into their parts' final places, which then tile the read without gaps;
    the others go through a staging buffer. A read of several ``rows`` takes that many runs of equal length,
    ``stride`` bytes from start to start, and leaves out what lies between them: its bytes are those of the
    runs, one after the other, and it has one part.
    """

    file: int
    offset: int
    nbytes: int
    parts: tuple[Part, ...]
    direct: bool
    rows: int = 1
    stride: int = 0

    @property
    def end(self) -> int:
        """One past the last byte that is read, in bytes from the begin of the file."""
        return self.offset + (self.rows - 1) * self.stride + self.nbytes // self.rows


@dataclass(frozen=True, slots=True)
class Step:
    """Evaluate ``box`` of ``source`` (of its shape split by ``factors``), and deliver ``parts`` of its bytes.

    ``operands`` are (register, shape, strides) of the regions that they hold. The result is row-major.
    """

    source: Computed
    factors: tuple[tuple[int, ...], ...]
    box: Box
    operands: tuple[OperandView, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Computation:
    """What one box of a computed tensor is made from, step by step.

    ``reads`` fill ``registers``, rows of elements in memory of its own; so do all ``steps`` but the last,
    which delivers to a destination of the plan.
    """

    registers: tuple[Destination, ...]
    reads: tuple[Read, ...]
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """Memory that it takes while it runs: the registers, and the largest result of a step."""
        largest = max(step.box.numel * step.source.dtype.itemsize for step in self.steps)
        return largest + sum(register.nbytes for register in self.registers)


@dataclass(frozen=True)
class Plan:
    """Everything that one rank reads, from which files of which storage, into which destinations."""

    storage: Storage
    destinations: tuple[Destination, ...]
    reads: Sequence[Read]
    chunk_size: int
    computations: Sequence[Computation] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files."""
        return self.storage.files

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the files in bytes."""
        return self.storage.sizes

    @property
    def read_bytes(self) -> int:
        """Bytes that the rank reads, merged gaps included."""
        return sum(read.nbytes for read in self.all_reads())

    def all_reads(self) -> Iterator[Read]:
        """Every read, in the order in which one thread makes them."""
        yield from self.reads
        for computation in self.computations:
            yield from computation.reads

    @property
    def device_bytes(self) -> int:
        """Bytes of the destinations together."""
        return sum(destination.nbytes for destination in self.destinations)

    @property
    def staged(self) -> bool:
        """Whether any read needs a staging buffer."""
        return any(not read.direct for read in self.all_reads())
