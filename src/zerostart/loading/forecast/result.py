"""Results of a forecast as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rich.filesize import decimal

from zerostart.distributed.machine import available_memory
from zerostart.distributed.world import default_device
from zerostart.engines.placements import RANKS_OF_A_MACHINE
from zerostart.engines.residence import Residence
from zerostart.errors import ConfigError
from zerostart.transfer.meter import device_bytes

#: Phases of the memory forecast: load, construction of engine and optimizer, first step.
PHASES = ("load", "initialize", "step")
PHASE_TITLES = {"load": "load", "initialize": "initialize", "step": "first step"}


@dataclass(frozen=True)
class PhaseMemory:
    """Highest memory of a rank in a phase, in bytes by component.

    ``host`` and ``device`` may be highest at different moments. ``device`` is empty if the device is the CPU.
    """

    host: Mapping[str, int]
    device: Mapping[str, int]

    @property
    def host_bytes(self) -> int:
        """Highest host memory in this phase, in bytes."""
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        """Highest accelerator memory in this phase, in bytes."""
        return sum(self.device.values())


@dataclass(frozen=True)
class RankForecast:
    """Reads, shards on the device and peak memory of one rank.

    If the device is the CPU, shards are part of the host peak, and the device peak is 0. ``read_seconds`` is
    the time to read and exchange. ``memory`` has each of ``PHASES``, without activations.
    """

    rank: int
    read_bytes: int
    read_ops: int
    device_bytes: int
    peak_host_bytes: int
    peak_device_bytes: int = 0
    read_seconds: float = 0.0
    memory: Mapping[str, PhaseMemory] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return plain data, with peaks ``{phase: {host, device}}`` in bytes for ``memory``."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "memory"}
        peaks = {p: {"host": m.host_bytes, "device": m.device_bytes} for p, m in self.memory.items()}
        return {**plain, "peaks": peaks}


@dataclass(frozen=True)
class WorldPlan:
    """Plans of all ranks.

    ``exchanged_bytes`` are received by each of ``ranks`` from others; empty if all read their own. Replicas
    that exchange reads read less than forecast. ``tier`` is the memory for parameters that every rank holds
    whole. ``rates`` are bytes a second of ``storage`` (to one machine), ``copy`` (from its page cache) and
    ``interconnect`` (of one rank); None if unlimited. ``optimizer`` names the counted states, and
    ``engine_reason`` the reason for the engine. ``accelerator``: the device has its own memory.
    ``fits`` compares the highest peaks with the available memory.
    """

    engine: str
    world_size: int
    ranks: tuple[RankForecast, ...]
    checkpoint_bytes: int
    parameters: int
    largest_tensor_bytes: int
    planning_seconds: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    computed_whole: tuple[str, ...] = ()
    exchanged_bytes: tuple[int, ...] = ()
    tier: Residence | None = None
    zero_stage: int = 3
    engine_reason: str = ""
    optimizer: str = ""
    accelerator: bool = False
    rates: Mapping[str, float | None] = field(default_factory=dict)
    fits: tuple[Fit, ...] = ()

    @property
    def fit(self) -> bool | None:
        """True if everything fits; None if the available memory is unknown."""
        return all(fit.fits for fit in self.fits) if self.fits else None

    @property
    def read_seconds(self) -> float:
        """Seconds of the slowest rank to read and exchange."""
        return max((rank.read_seconds for rank in self.ranks), default=0.0)

    @property
    def classes(self) -> list[tuple[RankForecast, tuple[RankForecast, ...]]]:
        """Groups of ranks with equal memory: the largest reader, and all ranks."""
        groups: dict[Any, list[RankForecast]] = {}
        for rank in self.ranks:
            # Not by reads, which differ a little between all ranks.
            peaks = tuple((m.host_bytes, m.device_bytes) for m in rank.memory.values())
            groups.setdefault((rank.device_bytes, rank.peak_host_bytes, peaks), []).append(rank)
        return [(max(alike, key=lambda r: r.read_bytes), tuple(alike)) for alike in groups.values()]

    def __str__(self) -> str:
        """Summarise the plan in a few lines."""
        read = [rank.read_bytes for rank in self.ranks]
        lines = [
            f"Plan for {self.engine} on {self.world_size} ranks: {self.parameters:,} parameters, "
            f"{decimal(self.checkpoint_bytes)} of weights",
            f"  a rank reads {decimal(min(read, default=0))} to {decimal(max(read, default=0))}",
        ]
        for phase in PHASES:
            peaks = [rank.memory[phase] for rank in self.ranks if phase in rank.memory]
            if peaks:
                host = max(peak.host_bytes for peak in peaks)
                device = max(peak.device_bytes for peak in peaks)
                on_device = f", {decimal(device)} on the device" if device else ""
                lines.append(f"  most memory of a rank in {phase}: {decimal(host)} on the host{on_device}")
        for kind in ("missing", "unexpected", "computed_whole"):
            if names := getattr(self, kind):
                more = ", ..." if len(names) > 3 else ""
                lines.append(f"  {kind.replace('_', ' ')}: {', '.join(names[:3])}{more}")
        if self.fit is not None:
            lines.append("  it fits" if self.fit else "  it does not fit")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON of ``zerostart plan --json``, with memory by group of ranks."""
        aside = ("ranks", "fits", "tier")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in aside}
        return {
            **plain,
            "ranks": [rank.as_dict() for rank in self.ranks],
            "tier": None if self.tier is None else asdict(self.tier),
            "read_seconds": self.read_seconds,
            "memory": [
                {"ranks": [r.rank for r in alike], **{p: asdict(m) for p, m in shown.memory.items()}}
                for shown, alike in self.classes
            ],
            "fits": [fit.as_dict() for fit in self.fits],
            "fit": self.fit,
        }


@dataclass(frozen=True)
class Limits:
    """Bytes of one accelerator (``device``) and of one machine (``host``); None if unknown.

    ``found``: measured on this machine. ``accelerator``: ranks compute on one.
    """

    device: int | None
    host: int | None
    accelerator: bool
    found: bool = False

    @classmethod
    def of(cls, device: int | None, host: int | None, world_size: int) -> Limits:
        """Return the user's limits, or those of this machine if it could run all ranks.

        With ``device`` ranks compute on accelerators, even if this machine has none. Raises ConfigError.
        """
        for name, value in (("device_memory", device), ("host_memory", host)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a number of bytes")
        own = default_device()
        accelerator = device is not None or own.type != "cpu"
        # One limit of the user excludes the others of this machine.
        if device is not None or host is not None:
            return cls(device, host, accelerator)
        if world_size > RANKS_OF_A_MACHINE:  # The job runs on other machines.
            return cls(None, None, accelerator)
        if accelerator:
            device = device_bytes(own)
        return cls(device, available_memory(), accelerator, found=True)


@dataclass(frozen=True)
class Fit:
    """Comparison of the ``needed`` memory with the ``limit``, in bytes; ``where``: device or host.

    An accelerator serves one rank: the one that needs most. A host serves ``ranks`` ranks. ``phase`` is the
    phase of the highest need. ``found``: the limit was measured on this machine.
    """

    where: str
    limit: int
    needed: int
    phase: str
    ranks: int = 1
    found: bool = False

    @property
    def fits(self) -> bool:
        """True if the limit suffices."""
        return self.needed <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with ``fits``."""
        return asdict(self) | {"fits": self.fits}


def number_ranges(numbers: Iterable[int], limit: int = 4) -> str:
    """Format ascending numbers as ``0 to 5, 7``, with at most ``limit`` ranges."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    words = [str(a) if a == b else f"{a} to {b}" for a, b in ranges[:limit]]
    return ", ".join(words) + (", ..." if len(ranges) > limit else "")
