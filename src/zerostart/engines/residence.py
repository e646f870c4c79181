"""Find room for whole parameters: on the device, or in host memory at first.

The free memory is taken from torch's allocator and the driver, or from the kernel and its control groups. All
ranks agree before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.filesize import decimal

from zerostart.distributed.machine import machine_name
from zerostart.distributed.world import World
from zerostart.errors import InsufficientMemoryError
from zerostart.transfer.meter import device_bytes, free_bytes
from zerostart.transfer.rearrange import SCRATCH

IN_PLACE, HOST, NOWHERE = "in place", "host", "does not fit"


@dataclass(frozen=True)
class MemoryFit:
    """The machine and the device of a rank, and the free bytes of both."""

    machine: str
    device: str
    #: Free bytes of the device; None if unknown.
    free: int | None
    #: Bytes of the device; None if unknown.
    most: int | None
    #: Free bytes of the host; None if unknown.
    host: int | None

    @classmethod
    def here(cls, device: torch.device) -> MemoryFit:
        """Measure the free memory of this machine and of ``device``."""
        free, host = free_bytes(device), free_bytes(torch.device("cpu"))
        return cls(machine_name(), str(device), free, device_bytes(device), host)

    @property
    def on_host(self) -> bool:
        """True if the device is the host."""
        return self.device.startswith("cpu")


@dataclass(frozen=True)
class Residence:
    """The place of the parameters until the engine starts, equal on all ranks."""

    #: ``in place`` (on the device, once: the optimizer takes the buffer as its own), ``host`` (moved to the
    #: device when the engine starts), or ``does not fit``.
    name: str
    #: Bytes of the buffers of one rank.
    buffer_bytes: int
    #: The tightest device of all.
    device: str
    #: Ranks on that device.
    sharers: int
    #: Bytes that were free there before; None if unknown.
    free_bytes: int | None
    #: Bytes of each of two segments that reorder the buffer for an optimizer; 0 without reordering.
    segment_bytes: int = SCRATCH

    def __str__(self) -> str:
        per_rank = f" for each of {self.sharers} ranks" if self.sharers > 1 else ""
        free = "" if self.free_bytes is None else f", where {decimal(self.free_bytes)} are free"
        text = f"{self.name}: {decimal(self.buffer_bytes)} in flat buffers{per_rank} on {self.device}{free}"
        if self.name == IN_PLACE and self.segment_bytes:
            return f"{text}; another order is made in segments of {decimal(self.segment_bytes)}"
        if self.name == HOST:
            return f"{text}; until the engine starts they lie in host memory"
        return text


def agree_on_residence(nbytes: int, world: World, device: torch.device, stage: int, host: bool) -> Residence:
    """The residence of buffers of ``nbytes`` on every rank; collective, the same everywhere.

    ``host`` says whether they may lie in host memory until the engine starts. Raises InsufficientMemoryError
    on every rank where there is room on no residence.
    """
    rooms = world.all_gather_object(MemoryFit.here(device), "finding room for the parameters")
    residence = residence_of(nbytes, rooms, host, stage > 0)
    if residence.name == NOWHERE:
        raise InsufficientMemoryError(
            f"ZeRO stage {stage} keeps the whole model on every rank, and it {residence}; use "
            "zero_stage=3, which shards it, or free memory"
        )
    return residence


def residence_of(nbytes: int, rooms: Sequence[MemoryFit], host: bool, reordered: bool = True) -> Residence:
    """Return the residence for ranks with these ``rooms``.

    Ranks on one device of a machine share its memory. ``host`` is as in ``agree_on_residence``; ``reordered``
    says whether an optimizer may want another order.
    """
    # Number of ranks on each rank's device, and on its machine.
    sharers = [sum((r.machine, r.device) == (o.machine, o.device) for o in rooms) for r in rooms]
    neighbours = [sum(r.machine == o.machine for o in rooms) for r in rooms]
    tightest = min(range(len(rooms)), key=lambda n: _share(rooms[n].free, sharers[n]))
    fits = all(nbytes <= _share(r.free, n) for r, n in zip(rooms, sharers, strict=True))
    # ``fits`` uses the free memory now, ``ever`` an empty device: only if that is enough, the host may wait.
    ever = all(nbytes <= _share(r.most, n) for r, n in zip(rooms, sharers, strict=True))
    waits = all(
        not r.on_host and r.free is not None and nbytes <= _share(r.host, n)
        for r, n in zip(rooms, neighbours, strict=True)
    )
    name = IN_PLACE if fits else HOST if host and ever and waits else NOWHERE
    room = rooms[tightest]
    return Residence(name, nbytes, room.device, sharers[tightest], room.free, SCRATCH if reordered else 0)


def _share(free: int | None, ranks: int) -> float:
    # Unknown memory counts as enough.
    return float("inf") if free is None else free / ranks
