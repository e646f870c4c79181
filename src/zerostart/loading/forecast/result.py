"""The forecast as plain data: of every rank, and of the whole job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from rich.filesize import decimal

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage import RequestCost
from zerostart.distributed.machine import available_memory
from zerostart.distributed.world import default_device
from zerostart.engines.placements import RANKS_OF_A_MACHINE
from zerostart.engines.residence import Residence
from zerostart.errors import ConfigError
from zerostart.recipe import Coverage, Recipes
from zerostart.transfer.meter import device_bytes
from zerostart.transfer.planning import Extents, ReadStrategy, extents_of

#: What memory is told of: the load, the engine's and the optimizer's construction, and the first step.
PHASES = ("load", "initialize", "step")


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
    ``read_seconds`` is how long it reads and exchanges at the rates of the plan; ``get_requests`` and
    ``get_bytes`` are the requests for ranges of a store and the bytes that they give (0 where the checkpoint
    lies in no store), the few of rank 0 for headers aside; ``memory`` has each of
    ``PHASES``, without the activations of the step, and is empty if no memory was asked for. ``extents`` are
    rows ``file, begin, end, bytes, reads``: what is read of each file, by its number.
    """

    rank: int
    read_bytes: int
    read_ops: int
    device_bytes: int
    peak_host_bytes: int
    peak_device_bytes: int = 0
    read_seconds: float = 0.0
    get_requests: int = 0
    get_bytes: int = 0
    memory: Mapping[str, Memory] = field(default_factory=dict)
    extents: Extents = field(default_factory=lambda: extents_of([]), compare=False, repr=False)

    def as_dict(self) -> dict[str, object]:
        """Plain data: ``memory`` as the peaks alone, ``{phase: {host, device}}`` in bytes."""
        aside = ("memory", "extents")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in aside}
        peaks = {p: {"host": m.host_bytes, "device": m.device_bytes} for p, m in self.memory.items()}
        return {**plain, "peaks": peaks}


@dataclass(frozen=True)
class Prices:
    """What a store takes for 1000 requests, and for 1e9 bytes of answers."""

    requests: float = 0.0
    gigabyte: float = 0.0

    @classmethod
    def of(cls, requests: float | None, gigabyte: float | None) -> Prices | None:
        """None where neither is known. Raises ConfigError for what is no price."""
        for name, value in (("request_price", requests), ("gigabyte_price", gigabyte)):
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r} must be a number, 0 or more")
        return None if requests is None and gigabyte is None else cls(requests or 0.0, gigabyte or 0.0)


@dataclass(frozen=True)
class FileForecast:
    """One file: its length ``nbytes``, and the bytes and number of reads of it by how many ``ranks``."""

    name: str
    nbytes: int
    read_bytes: int
    read_ops: int
    ranks: int


@dataclass(frozen=True)
class WorldPlan:
    """The plans of all ranks, summed up.

    ``sharing`` is there if the ranks have a choice between own slices and reading once; ``exchanged_bytes``
    are those that each of ``ranks`` gets from others, empty where all read their own. ``tier`` says where
    parameters that are whole on every rank would lie on machines like this one. ``rates`` are bytes a
    second of ``storage`` (to one machine), of ``copy`` (out of its page cache), of one rank's
    ``interconnect`` and, where there are several machines, of the ``network`` between one and the others;
    None for what does not limit. ``optimizer`` is the one whose states are counted,
    and ``engine_reason`` says in a few words why it is this engine.
    ``accelerator``: whether the device has memory of its own; else device memory is host memory.
    ``fits`` tells how the highest peaks compare with the memory there is; where they do not fit,
    ``alternatives`` are other settings, and ``advice`` says in words which is the first that does.
    ``store`` is what a request takes where the checkpoint lies in a store: seconds of latency, and bytes a
    second of one connection, which were measured or are assumed. ``stored`` are names and lengths of the
    files, and ``messages`` the bytes (from rank, to rank, bytes) that ranks send each other where bytes are
    read once. ``prices`` are those that were given.
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
    sharing: ReadStrategy | None = None
    exchanged_bytes: tuple[int, ...] = ()
    tier: Residence | None = None
    zero_stage: int = 3
    engine_reason: str = ""
    optimizer: str = ""
    accelerator: bool = False
    rates: Mapping[str, float | None] = field(default_factory=dict)
    fits: tuple[Fit, ...] = ()
    advice: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    stored: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    messages: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    store: RequestCost | None = None
    prices: Prices | None = None

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        recipes: Recipes,
        coverage: Coverage,
        engine: str,
        world_size: int,
        ranks: Sequence[RankForecast],
        seconds: float,
    ) -> WorldPlan:
        """Sum up a catalog and the ranks' forecasts."""
        return cls(
            engine=engine,
            world_size=world_size,
            ranks=tuple(ranks),
            checkpoint_bytes=catalog.nbytes,
            parameters=sum(entry.numel for entry in catalog.weights.values()),
            largest_tensor_bytes=max((e.nbytes for e in catalog.weights.values()), default=0),
            planning_seconds=seconds,
            missing=coverage.missing,
            unexpected=coverage.unexpected,
            computed=recipes.computed,
            computed_whole=recipes.computed_whole,
            stored=tuple(zip(catalog.files, catalog.sizes, strict=True)),
            store=catalog.storage.cost,
        )

    @property
    def fit(self) -> bool | None:
        """Whether everything fits; None where nothing says how much memory there is."""
        return all(fit.fits for fit in self.fits) if self.fits else None

    @property
    def read_seconds(self) -> float:
        """Seconds until the last rank has what it wants, at the plan's rates."""
        return max((rank.read_seconds for rank in self.ranks), default=0.0)

    @property
    def storage_bytes(self) -> int:
        """Bytes that storage gives to all of ``ranks`` together: of a store, to their requests."""
        return sum(rank.get_bytes or rank.read_bytes for rank in self.ranks)

    @property
    def cost(self) -> float | None:
        """What the store takes for ``ranks``, in the currency of ``prices``; None where nobody gave these."""
        if self.prices is None:
            return None
        requests = sum(rank.get_requests for rank in self.ranks)
        nbytes = sum(rank.get_bytes for rank in self.ranks)
        return requests / 1000 * self.prices.requests + nbytes / 1e9 * self.prices.gigabyte

    @property
    def between_machines_bytes(self) -> int:
        """Bytes of ``messages`` between ranks of different machines, of ``RANKS_OF_A_MACHINE`` each."""
        return sum(
            nbytes
            for sender, to, nbytes in self.messages
            if sender // RANKS_OF_A_MACHINE != to // RANKS_OF_A_MACHINE
        )

    @property
    def most_crossing_bytes(self) -> int:
        """Bytes of ``messages`` that one machine sends to others, or gets from them, at most."""
        passed: Counter[tuple[str, int]] = Counter()
        for sender, to, nbytes in self.messages:
            if sender // RANKS_OF_A_MACHINE != to // RANKS_OF_A_MACHINE:
                passed["out", sender // RANKS_OF_A_MACHINE] += nbytes
                passed["in", to // RANKS_OF_A_MACHINE] += nbytes
        return max(passed.values(), default=0)

    @property
    def within_machines_bytes(self) -> int:
        """Bytes of ``messages`` between ranks of one machine."""
        return sum(nbytes for _, _, nbytes in self.messages) - self.between_machines_bytes

    @property
    def files(self) -> tuple[FileForecast, ...]:
        """What ``ranks`` read of each file."""
        # Columns: bytes, reads, ranks. A rank has at most one row of extents for a file.
        read = np.zeros((len(self.stored), 3), np.int64)
        for rank in self.ranks:
            read[rank.extents[:, 0], :2] += rank.extents[:, 3:]
            read[rank.extents[:, 0], 2] += 1
        rows = zip(self.stored, read.tolist(), strict=True)
        return tuple(FileForecast(name, nbytes, *of_file) for (name, nbytes), of_file in rows)

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
        return "\n".join([*lines, *(f"  {line}" for line in self.advice)])

    def as_dict(self) -> dict[str, object]:
        """The form of ``zerostart plan --json``; ``memory`` has the parts for each group of ranks."""
        aside = ("ranks", "sharing", "fits", "tier", "alternatives", "stored", "messages", "store", "prices")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in aside}
        return {
            **plain,
            "ranks": [rank.as_dict() for rank in self.ranks],
            "sharing": None if self.sharing is None else asdict(self.sharing),
            "tier": None if self.tier is None else asdict(self.tier),
            "store": None if self.store is None else asdict(self.store),
            "read_seconds": self.read_seconds,
            "storage_bytes": self.storage_bytes,
            "cost": self.cost,
            "between_machines_bytes": self.between_machines_bytes,
            "within_machines_bytes": self.within_machines_bytes,
            "memory": [
                {"ranks": [r.rank for r in alike], **{p: asdict(m) for p, m in shown.memory.items()}}
                for shown, alike in self.classes
            ],
            "files": [asdict(file) for file in self.files],
            "fits": [fit.as_dict() for fit in self.fits],
            "fit": self.fit,
            "alternatives": [
                {"change": other.change, "fits": [fit.as_dict() for fit in other.fits], "fit": other.fit}
                for other in self.alternatives
            ],
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
            if value is not None and value < 1:
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


@dataclass(frozen=True)
class Alternative:
    """The same job with another setting, which is told by ``change``, and how its peaks compare."""

    change: str
    fits: tuple[Fit, ...]

    @property
    def fit(self) -> bool:
        """Whether everything fits."""
        return all(fit.fits for fit in self.fits)
