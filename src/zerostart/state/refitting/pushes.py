"""What pushes have in common, wherever they go: settings, what a rank writes, the report, the handle."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.filesize import decimal
from torch import nn

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.live.model import LiveModel
from zerostart.state.refitting.image import Entry, Image
from zerostart.state.refitting.sums import Tensors
from zerostart.state.saving.save import contents_to_serve
from zerostart.state.saving.writing import planned
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.planning.writes import WritePlan
from zerostart.transfer.writing import Source

MiB = 1 << 20
#: Bytes of a write of a push. Its windows are counted from the tensor, and not from a page as in files: each
#: begins with a row of the digest's sums.
CHUNK, PAGE = 8 * MiB, 1


@dataclass(frozen=True)
class RefitSettings:
    """The arguments of ``zerostart.refit``, which documents them."""

    transport: str | None = None
    workers: int | None = None
    dtype: torch.dtype | None = None
    merge_adapters: bool = True
    secret: str | None = None
    timeout: float = 300.0
    full_every: int = 1
    strict: bool = True

    def check(self) -> None:
        """Raise ConfigError for what no refit can serve."""
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype={self.dtype!r} must be a floating torch.dtype")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers={self.workers} must be at least 1")
        if self.full_every < 1:
            raise ConfigError(f"full_every={self.full_every} must be at least 1: every push sends all then")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout={self.timeout} must be a finite number of seconds above 0")


@dataclass(frozen=True)
class WorkerReport:
    """What a worker has done in a push."""

    name: str
    version: int
    #: Bytes of the image that it takes.
    wanted_bytes: int
    #: From the decision until it served the version.
    seconds: float
    #: Over the sums of all that it has read back, which are those of the trainer.
    digest: str


@dataclass(frozen=True)
class PushReport:
    """What a push has done; the same on every rank."""

    version: int
    #: The version that all workers had, so that what has changed since was enough; None: all was sent.
    base: int | None
    transport: str
    #: Seconds of the slowest rank, by phase: ``plan``, ``write``, ``agree``, ``fill``, ``total``.
    phases: Mapping[str, float]
    #: Bytes of the model as the engine's loader gets it.
    owned_bytes: int
    #: Of these, the bytes that differ from ``base``; all of them where there is none.
    changed_bytes: int
    #: Bytes that all trainer ranks have put into the transport.
    moved_bytes: int
    #: Bytes that all workers take.
    wanted_bytes: int
    #: Bytes that a rank keeps of what it has sent, to find out what changes; the most of all ranks. They are
    #: in a file without a name, and not in the peaks.
    kept_bytes: int
    #: What a rank took at most beside what it had before, as in the report of a load; the largest of all
    #: ranks. An image in shared memory is not anonymous, and is not in it.
    peak_host_bytes: int
    peak_device_bytes: int
    workers: tuple[WorkerReport, ...]
    #: Tensors of the model of which no worker takes anything; none with a directory, which waits for nobody.
    untaken: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = max(self.phases["total"], 1e-9)
        lines = [
            f"version {self.version}: {decimal(self.owned_bytes)} by {self.transport} to {len(self.workers)} "
            f"workers in {total:.2f} s ({decimal(int(self.owned_bytes / total))}/s); moved "
            f"{decimal(self.moved_bytes)}, taken {decimal(self.wanted_bytes)}"
        ]
        if self.base is not None:
            lines[0] += f"; {decimal(self.changed_bytes)} have changed since version {self.base}"
        phases = ", ".join(
            f"{name} {seconds:.2f} s" for name, seconds in self.phases.items() if name != "total"
        )
        lines.append(f"  {phases}; peak {decimal(self.peak_host_bytes)} beside the shards")
        lines += [
            f"  {worker.name} serves version {worker.version}: {decimal(worker.wanted_bytes)}, digest "
            f"{worker.digest}"
            for worker in self.workers
        ]
        if self.untaken:
            more = f" and {len(self.untaken) - 4} more" if len(self.untaken) > 4 else ""
            lines.append(f"  taken by nobody: {', '.join(self.untaken[:4])}{more}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Prepared:
    """The model's part of a push: what this rank writes where."""

    image: Image
    plan: WritePlan
    storages: list[Source]


class Pushing:
    """A push whose bytes have left the model, and that workers may still be taking."""

    def __init__(
        self,
        world: World,
        work: Callable[[], PushReport],
        end: Callable[[bool], None] = lambda failed: None,
    ) -> None:
        """Rank 0 does the ``work``; then every rank has its own ``end``, told whether the push has failed."""
        self._world = world
        self._work = work
        self._end = end
        self._made: PushReport | None = None
        self._error: BaseException | None = None
        self._settled = False
        self._thread: threading.Thread | None = None
        if world.rank == 0:
            self._thread = threading.Thread(target=self._run, name="zerostart-refit-push", daemon=True)
            self._thread.start()

    def wait(self) -> PushReport:
        """Return when all workers serve the version; collective. Raises what ``Refitter.push`` raises."""
        if not self._settled:
            self._settled = True
            failed = True
            try:
                # Workers may take longer than the ranks wait for each other.
                self._made = self._world.broadcast_slow(self._joined, "waiting for a push")
                failed = False
            except BaseException as error:
                self._error = error
            try:
                self._end(failed)
            except BaseException as error:
                self._error = self._error or error
        if self._error is not None:
            raise self._error
        assert self._made is not None, "it has ended, and without an error"
        return self._made

    @property
    def settled(self) -> bool:
        """Whether ``wait`` has been called, and all ranks know the result."""
        return self._settled

    def done(self) -> bool:
        """Whether ``wait`` would return at once; collective."""
        thread = self._thread
        return self._settled or self._world.broadcast_object(
            lambda: thread is not None and not thread.is_alive(), "asking for a push"
        )

    def _run(self) -> None:
        try:
            self._made = self._work()
        except BaseException as error:  # raised by wait(), on all ranks
            self._error = error

    def _joined(self) -> PushReport:
        assert self._thread is not None, "rank 0 has it"
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._made is not None, "it has ended without an error"
        return self._made


def prepared(
    model: nn.Module,
    settings: RefitSettings,
    world: World,
    before: Image | None,
    wanted: Callable[[Sequence[Entry]], Sequence[Entry]] = lambda entries: entries,
) -> Prepared:
    """The image, and what this rank writes of it, of the model as it is now; collective.

    The image is that of ``before`` where it is the same; its tensors are as ``wanted`` makes of those of a
    save. Raises ConfigError, and what ``wanted`` raises.
    """
    with world.phase("looking at the model"):
        live = LiveModel(model, world)
        contents = contents_to_serve(model, live, settings.dtype, settings.merge_adapters)
        entries = tuple((name, dtype, tuple(shape)) for name, dtype, shape in wanted(contents.entries))
        image = before if before is not None and before.entries == entries else Image.of(entries)
        plan, storages = planned(image.layout, contents.outgoing, CHUNK, PAGE)
    return Prepared(image, plan, storages)


def untaken(image: Image, wants: Iterable[Runs]) -> tuple[str, ...]:
    """The tensors of which nobody wants anything, in the order of the image."""
    tensors = Tensors(image)
    each = {runs.to_bytes(): runs for runs in wants}  # replicas want the same
    taken = {name for runs in each.values() for name in tensors.names(runs)}
    return tuple(
        name for name, _, _ in image.entries if name not in taken and image.layout.tensors[name].numel
    )


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of a body under its name."""
    begun = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - begun
