"""Future layouts and memory of shards, without an engine or a process group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import nn

from zerostart.engines.residence import Residence
from zerostart.geometry.layout import Layout

#: Homes of a shard: the device that computes, host memory, or a file.
DEVICE, HOST, STORAGE = "device", "host", "storage"

#: Number of ranks on one machine that a plan assumes.
RANKS_OF_A_MACHINE = 8

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Placements:
    """Layout and memory of each shard of a model before it is made."""

    #: Layout of a parameter on a rank, by name.
    layout: Callable[[str, int], Layout]
    #: Parameters of one shape with equal answers have equal layouts.
    alike: Callable[[str], Hashable]
    #: The first rank that holds the same as the given one: replicas have one twin.
    twin: Callable[[int], int]
    #: The home of each parameter.
    homes: Mapping[str, str]
    #: Bytes of all parameters on each rank's device, if that is more than it reads; otherwise None.
    resident_bytes: int | None = None
    #: Bytes that each rank receives from the others after reading.
    gathered: int = 0
    #: Residence of whole parameters if all machines were like this one.
    residence: Residence | None = None
