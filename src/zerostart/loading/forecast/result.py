"""The forecast as plain data: of every rank, and of the whole job."""

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

#: What memory is told of: the load, the engine's and the optimizer's construction, and the first step.
PHASES = ("load", "initialize", "step")
PHASE_TITLES = {"load": "load", "initialize": "initialize", "step": "first step"}


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds at the highest moment of a phase, by what takes them.

    The highest moments of the ``host`` and of the ``device`` may differ. Where the device is the CPU, all is
    on the host and ``device`` is empty.
    """

    host: Mapping[str, int]
    device: Mapping[str, int]

    @property
    def host_bytes(self) -> int:
        """Most host memory in this phase, in bytes."""
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        """Most memory of the accelerator in this phase, in bytes."""
        return sum(self.device.values())


@dataclass(frozen=True)
class RankForecast:
    """One rank: bytes and number of its reads, bytes of its shards on the device, and peaks of the load.

    Where the device is the CPU the shards are part of the host peak, and the device peak is 0.
    ``read_seconds`` is the time to read and exchange at the rates of the plan; ``memory`` has each of
    ``PHASES``, without the activations of the step.
    """

    rank: int
    read_bytes: int
    read_ops: int
    device_bytes: int
    peak_host_bytes: int
    peak_device_bytes: int = 0
    read_seconds: float = 0.0
    memory: Mapping[str, Memory] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Plain data: ``memory`` as the peaks alone, ``{phase: {host, device}}`` in bytes."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "memory"}
        peaks = {p: {"host": m.host_bytes, "device": m.device_bytes} for p, m in self.memory.items()}
        return {**plain, "peaks": peaks}


@dataclass(frozen=True)
class WorldPlan:
    """The plans of all ranks, summed up.

    ``exchanged_bytes`` are those that each of ``ranks`` gets from others, empty where all read their own.
    Where replicas exchange what they read, a load reads less. ``tier`` says where parameters that are whole
    on every rank would be on machines like this one. ``rates`` are bytes a second of ``storage`` (to one
    machine), of ``copy`` (out of its page cache) and of one rank's ``interconnect``; None for no limit.
    ``optimizer`` is the one whose states are counted, and ``engine_reason`` the reason for the engine.
    ``accelerator``: the device has memory of its own; otherwise device memory is host memory.
    ``fits`` compares the highest peaks with the memory that there is.
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
        """Whether everything fits; None where nothing says how much memory there is."""
        return all(fit.fits for fit in self.fits) if self.fits else None

    @property
    def read_seconds(self) -> float:
        """Seconds until the last rank has what it wants, at the plan's rates."""
        return max((rank.read_seconds for rank in self.ranks), default=0.0)

    @property
    def classes(self) -> list[tuple[RankForecast, tuple[RankForecast, ...]]]:
        """Groups of ranks that hold equally much: of each the rank that reads most, and all its ranks."""
        found: dict[Any, list[RankForecast]] = {}
        for rank in self.ranks:
            # By what they hold, and not by what they read, of which each rank has a little more or less.
            shown = tuple((m.host_bytes, m.device_bytes) for m in rank.memory.values())
            held = (rank.device_bytes, rank.peak_host_bytes, shown)
            found.setdefault(held, []).append(rank)
        return [(max(alike, key=lambda r: r.read_bytes), tuple(alike)) for alike in found.values()]

    def __str__(self) -> str:
        """A summary of some lines; ``zerostart plan`` shows all of it."""
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
        """The form of ``zerostart plan --json``; ``memory`` has the parts for each group of ranks."""
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
    """Bytes of one accelerator (``device``) and of one machine for all its ranks (``host``); None: unknown.

    ``found``: nobody gave them, they are this machine's. ``accelerator``: whether ranks compute on one.
    """

    device: int | None
    host: int | None
    accelerator: bool
    found: bool = False

    @classmethod
    def of(cls, device: int | None, host: int | None, world_size: int) -> Limits:
        """The limits that are given; where none is, those of this machine, if it could run all ranks.

        A given ``device`` means that ranks compute on accelerators, wherever the plan is made. Raises
        ConfigError for a limit that is not a number of bytes.
        """
        for name, value in (("device_memory", device), ("host_memory", host)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a number of bytes")
        here = default_device()
        accelerator = device is not None or here.type != "cpu"
        # A limit that is given stands alone: none of this machine's is put beside it.
        if device is not None or host is not None:
            return cls(device, host, accelerator)
        if world_size > RANKS_OF_A_MACHINE:  # not the machines that it will run on
            return cls(None, None, accelerator)
        if accelerator:
            device = device_bytes(here)
        return cls(device, available_memory(), accelerator, found=True)


@dataclass(frozen=True)
class Fit:
    """Memory of one kind: ``where`` it is, the ``limit``, and the most that is ``needed``, in bytes.

    Of an accelerator the need is that of the rank that needs most; of a ``host`` that of all ``ranks`` on it.
    ``phase`` is the one in which it is needed. ``found``: the limit is this machine's, nobody gave it.
    """

    where: str
    limit: int
    needed: int
    phase: str
    ranks: int = 1
    found: bool = False

    @property
    def fits(self) -> bool:
        """Whether the bytes that are needed are within the limit."""
        return self.needed <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Plain data, and whether it ``fits``."""
        return asdict(self) | {"fits": self.fits}


def number_ranges(numbers: Iterable[int], limit: int = 4) -> str:
    """Write ascending numbers as ``0 to 5, 7``, at most ``limit`` ranges of them."""
    found: list[tuple[int, int]] = []
    for one in numbers:
        if found and found[-1][1] == one - 1:
            found[-1] = (found[-1][0], one)
        else:
            found.append((one, one))
    words = [str(a) if a == b else f"{a} to {b}" for a, b in found[:limit]]
    return ", ".join(words) + (", ..." if len(found) > limit else "")
