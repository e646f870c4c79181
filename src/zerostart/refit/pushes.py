"""The common part of pushes, wherever they go: settings, what a rank writes, the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.filesize import decimal
from torch import nn

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.live.model import LiveModel
from zerostart.refit.image import Image, Runs
from zerostart.state.saving.save import contents_to_serve
from zerostart.state.saving.writing import planned
from zerostart.transfer.planning.writes import WritePlan
from zerostart.transfer.writing import Source

#: Bytes of a write of a push. Its windows are counted from the tensor, and not from a page as in files: each
#: begins with a row of the digest's sums.
CHUNK, PAGE = 8 << 20, 1


@dataclass(frozen=True)
class RefitSettings:
    """The arguments of ``zerostart.refit``, which documents them."""

    workers: int | None = None
    dtype: torch.dtype | None = None
    merge_adapters: bool = True
    timeout: float = 300.0
    strict: bool = True

    def check(self) -> None:
        """Raise ConfigError for values that no refit can serve."""
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
    #: Bytes of the image that it takes.
    wanted_bytes: int
    #: Digest of all that it has read back, which is the trainer's.
    digest: str


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """The result of a push; the same on every rank."""

    version: int
    transport: str
    #: Seconds of the slowest rank, by phase: ``plan``, ``move``, ``fill``, ``total``.
    phases: Mapping[str, float]
    #: Bytes of the model as the engine's loader gets it.
    owned_bytes: int
    #: Bytes that all trainer ranks have sent.
    moved_bytes: int
    #: Bytes that all workers take.
    wanted_bytes: int
    #: Peak memory of a rank in addition to what it had before; the largest of all ranks. An image in shared
    #: memory is not anonymous, and is not in it.
    peak_host_bytes: int
    peak_device_bytes: int
    workers: tuple[WorkerReport, ...]
    #: Tensors of the model of which no worker takes anything.
    untaken: tuple[str, ...]

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        lines = [
            f"version {self.version}: {decimal(self.owned_bytes)} by {self.transport}, "
            f"{decimal(self.moved_bytes)} moved; {phases}; peak {decimal(self.peak_host_bytes)}",
            *(f"  {each.name}: {decimal(each.wanted_bytes)}, digest {each.digest}" for each in self.workers),
        ]
        if self.untaken:
            lines.append(f"  taken by nobody: {', '.join(self.untaken)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ModelWrites:
    """The model's part of a push: what this rank writes where."""

    image: Image
    plan: WritePlan
    storages: list[Source]


@dataclass(frozen=True)
class PushTargets:
    """The workers of a push; the same on all ranks."""

    #: By rank or worker its name, None if there is none, and the bytes that it takes.
    names: Sequence[str | None]
    wants: Sequence[Runs]
    #: The sets of elements that are summed up, each once, and by worker the number of its set.
    sets: Sequence[Runs]
    numbers: Sequence[int]
    #: Tensors that none of them takes anything of.
    untaken: tuple[str, ...]

    @classmethod
    def of(cls, image: Image, names: Sequence[str | None], wants: Sequence[Runs]) -> PushTargets:
        """Put together the wants of the workers."""
        # Replicas want the same, which is summed up once.
        sets = {runs.rows.tobytes(): runs for runs in wants}
        numbers = [[*sets].index(runs.rows.tobytes()) for runs in wants]
        taken = {name for runs in sets.values() for name, *_ in image.entries_in(runs)}
        tensors = image.layout.tensors
        untaken = tuple(name for name, *_ in image.entries if name not in taken and tensors[name].numel)
        return cls(names, wants, [*sets.values()], numbers, untaken)


def prepare_model(
    model: nn.Module,
    settings: RefitSettings,
    world: World,
    before: Image | None = None,
) -> ModelWrites:
    """Find the image, and what this rank writes of it, of the model as it is now; collective.

    The image is ``before`` if that is the same. Raises ConfigError.
    """
    with world.phase("looking at the model"):
        live = LiveModel(model, world)
        contents = contents_to_serve(live, settings.dtype, settings.merge_adapters)
        entries = tuple((name, dtype, tuple(shape)) for name, dtype, shape in contents.entries)
        image = before if before is not None and before.entries == entries else Image.of(entries)
        plan, storages = planned(image.layout, contents.outgoing, CHUNK, PAGE)
    return ModelWrites(image, plan, storages)
