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
    """Local storage that the plan fills."""

    name: str
    #: Its elements, padding included.
    numel: int
    #: How many of them, from the first on, are real.
    owned: int
    dtype: torch.dtype
    #: Whether a read may land in it: host memory, and not memory behind a staging buffer.
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, padding included."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes of some of the bytes of a read."""

    #: Bytes from the start of the read to the first element.
    at: int
    #: Of the elements as they are stored.
    dtype: torch.dtype
    #: Number of the destination.
    target: int
    #: Its element that the first one goes to.
    to: int
    #: (size, source stride, destination stride), in elements.
    loops: tuple[tuple[int, int, int], ...]
    #: Whether it is one unbroken run on both sides with no cast, and can be read into place.
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last source element of the part, both included."""
        return (1 + sum((size - 1) * stride for size, stride, _ in self.loops)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Read:
    """One positioned read."""

    #: Number of the file.
    file: int
    #: Of its first byte in the file.
    offset: int
    #: Bytes that are taken: with rows those of the runs alone, one after the other.
    nbytes: int
    #: Where they go; with rows there is one part.
    parts: tuple[Part, ...]
    #: Scatters into the final places of its parts, which then tile the read without gaps; else it goes
    #: through a staging buffer.
    direct: bool
    #: Runs of equal length; what lies between them is left out.
    rows: int = 1
    #: Bytes from the start of one row to that of the next; 0 for one row.
    stride: int = 0

    @property
    def end(self) -> int:
        """One past the last byte that is read, in bytes from the begin of the file."""
        return self.offset + (self.rows - 1) * self.stride + self.nbytes // self.rows


@dataclass(frozen=True, slots=True)
class Step:
    """Evaluate a box of a computed tensor, and deliver parts of the result, which is row-major."""

    source: Computed
    #: By which the shape of ``source`` is split.
    factors: tuple[tuple[int, ...], ...]
    #: Of the split shape.
    box: Box
    #: (register, shape, strides) of the regions that they hold.
    operands: tuple[OperandView, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Computation:
    """What one box of a computed tensor is made from, step by step."""

    #: Rows of elements in memory of its own.
    registers: tuple[Destination, ...]
    #: They fill registers.
    reads: tuple[Read, ...]
    #: All but the last fill registers, too; that one delivers to a destination of the plan.
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """Memory that it takes while it runs: the registers, and the largest result of a step."""
        largest = max(step.box.numel * step.source.dtype.itemsize for step in self.steps)
        return largest + sum(register.nbytes for register in self.registers)


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Reads that all ``ranks`` want, each of which makes a share of them for the others."""

    ranks: tuple[int, ...]
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that one rank wants, from which files of which storage, into which destinations."""

    storage: Storage
    destinations: tuple[Destination, ...]
    reads: Sequence[Read]
    chunk_size: int
    computations: Sequence[Computation] = ()
    shared: Sequence[SharedReads] = ()

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
        """Bytes that the rank wants, merged gaps included."""
        return sum(read.nbytes for read in self.all_reads())

    def all_reads(self) -> Iterator[Read]:
        """Every read: the rank's own in the order in which one thread makes them, then shared ones."""
        yield from self.reads
        for computation in self.computations:
            yield from computation.reads
        for shared in self.shared:
            yield from shared.reads

    @property
    def device_bytes(self) -> int:
        """Bytes of the destinations together."""
        return sum(destination.nbytes for destination in self.destinations)

    @property
    def staged(self) -> bool:
        """Whether any read needs a staging buffer."""
        return any(not read.direct for read in self.all_reads())
