"""Settings, plan and report of a push, for every transport."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.filesize import decimal
from torch import nn

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.live.model import LiveModel
from zerostart.refit.image import ByteSet, Image
from zerostart.state.saving.save import collect_served_contents
from zerostart.state.saving.writing import plan_own_writes
from zerostart.transfer.planning.writes import WritePlan
from zerostart.transfer.writing import Source

#: Size of one write, in bytes, and of a page. With a page of 1, windows begin at the tensor, where the first
#: row of its digest begins.
CHUNK, PAGE = 8 << 20, 1


@dataclass(frozen=True)
class RefitSettings:
    """Arguments of ``zerostart.refit``; see there."""

    workers: int | None = None
    dtype: torch.dtype | None = None
    merge_adapters: bool = True
    timeout: float = 300.0
    strict: bool = True

    def check(self) -> None:
        """Raise ConfigError for invalid values."""
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype={self.dtype!r} must be a floating torch.dtype")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers={self.workers} must be at least 1")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout={self.timeout} must be a finite number of seconds above 0")


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part in a push."""

    name: str
    version: int
    #: Bytes of the image that the worker reads.
    wanted_bytes: int
    #: Digest of the worker's values, equal to the trainer's.
    digest: str


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """Result of a push; the same on every rank."""

    version: int
    transport: str
    #: Seconds of the slowest rank, by phase: ``plan``, ``move``, ``fill``, ``total``.
    phases: Mapping[str, float]
    #: Size of the image's tensors, in bytes.
    owned_bytes: int
    #: Bytes sent by all trainer ranks.
    moved_bytes: int
    #: Bytes read by all workers.
    wanted_bytes: int
    #: Largest increase of memory on any rank, in bytes, without the shared memory.
    peak_host_bytes: int
    peak_device_bytes: int
    workers: tuple[WorkerReport, ...]
    #: Tensors of the model that no worker reads.
    untaken: tuple[str, ...]

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        lines = [
            f"version {self.version}: {decimal(self.owned_bytes)} by {self.transport}, "
            f"{decimal(self.moved_bytes)} moved; {phases}; peak {decimal(self.peak_host_bytes)}",
            *(f"  {each.name}: {decimal(each.wanted_bytes)}, digest {each.digest}" for each in self.workers),
        ]
        if self.untaken:
            lines.append(f"  read by no worker: {', '.join(self.untaken)}")
        return "\n".join(lines)


class ModelWrites(NamedTuple):
    """Bytes of the image that this rank writes in a push."""

    image: Image
    plan: WritePlan
    storages: list[Source]


class PushTargets(NamedTuple):
    """Workers of a push; the same on all ranks."""

    #: For each rank or worker: its name, or None without a target, and the bytes that it needs.
    names: Sequence[str | None]
    wants: Sequence[ByteSet]
    #: Distinct sets of needed bytes, and for each worker the index of its set.
    sets: Sequence[ByteSet]
    numbers: Sequence[int]
    #: Tensors that no worker reads.
    untaken: tuple[str, ...]

    @classmethod
    def of(cls, image: Image, names: Sequence[str | None], wants: Sequence[ByteSet]) -> PushTargets:
        """Combine the needs of the workers."""
        # Replicas need equal sets, which are summed once.
        sets = {runs.rows.tobytes(): runs for runs in wants}
        numbers = [[*sets].index(runs.rows.tobytes()) for runs in wants]
        used = {name for runs in sets.values() for name, *_ in image.entries_in(runs)}
        tensors = image.layout.tensors
        untaken = tuple(name for name, *_ in image.entries if name not in used and tensors[name].numel)
        return cls(names, wants, [*sets.values()], numbers, untaken)


def prepare_model(
    model: nn.Module,
    settings: RefitSettings,
    world: World,
    before: Image | None = None,
) -> ModelWrites:
    """Plan which bytes of the image this rank writes now; collective.

    Returns the image ``before`` again if its entries are equal. Raises ConfigError.
    """
    with world.phase("looking at the model"):
        live = LiveModel(model, world)
        contents = collect_served_contents(live, settings.dtype, settings.merge_adapters)
        entries = tuple((name, dtype, tuple(shape)) for name, dtype, shape in contents.entries)
        image = before if before is not None and before.entries == entries else Image.of(entries)
        plan, storages = plan_own_writes(image.layout, contents.outgoing, CHUNK, PAGE)
    return ModelWrites(image, plan, storages)
