"""A save that goes on while training does: what was copied to host memory, a thread of each rank writes.

The ranks agree over a process group of their own, so that nothing of it meets what training exchanges. At
most one save is under way; the next one, or the end of the program, waits for it.

What the optimizer's step alone changes may be copied by that thread as well: the next step of any torch
optimizer, those of DeepSpeed's among them, waits until that is done.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.filesize import decimal
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerostart.checkpoint.paths import is_same, note_pending
from zerostart.checkpoint.storage.direct import PAGE
from zerostart.distributed.machine import available_memory, local_ranks
from zerostart.distributed.world import World, group_beside
from zerostart.engines import Shard
from zerostart.errors import EngineError, InsufficientMemoryError, WriteError
from zerostart.geometry.layout import Layout
from zerostart.geometry.layout.layout import LocalBox
from zerostart.state.resuming.training_state import Content
from zerostart.state.saving.writing import Outgoing, share
from zerostart.transfer.buffers import Arena, page_locked
from zerostart.transfer.planning.writes import own_parts
from zerostart.upstream.torch.process_group import BeforeTheEnd

logger = logging.getLogger("zerostart")


class Seconds(dict[str, float]):
    """Seconds by name, which can be asked for as attributes, too."""

    @property
    def blocked(self) -> float:
        """How long the call held the training up."""
        return self["blocked"]

    @property
    def written(self) -> float:
        """How long it took from the call until the checkpoint was in its place; 0.0 until then."""
        return self["written"]


@dataclass
class Saving:
    """A save under way or done, and how many ``seconds`` it took.

    Of ``seconds``, ``blocked`` is how long the call held the training up, and the step that waited for the
    copies, if any; ``written`` how long it took from the call until the checkpoint was in its place.
    """

    seconds: Seconds = field(default_factory=lambda: Seconds(blocked=0.0, written=0.0))
    _thread: threading.Thread | None = None
    _error: BaseException | None = None
    _place: Path | str | None = field(default=None, repr=False)  # a URL may have a password
    #: Whether the end of the process group waits for it.
    _open: bool = False
    #: Set when nothing is read any more of what training changes.
    _copied: threading.Event = field(default_factory=threading.Event)
    _hook: Any = None
    _at_end: Finalize[None] | None = None

    @classmethod
    def finished(cls, seconds: float) -> Saving:
        """One that was over when its call returned."""
        return cls(Seconds(blocked=seconds, written=seconds))

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def settle(self) -> None:
        """Return when training may change what is saved, which has held it up until then."""
        if not self._copied.is_set():
            begun = time.perf_counter()
            self._copied.wait()
            self.seconds["blocked"] += time.perf_counter() - begun

    def wait(self) -> None:
        """Return when the checkpoint is in its place; raises what the save failed with, once."""
        if self._thread is not None:
            self._thread.join()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._at_end is not None:
            self._at_end.cancel()
        if self._open:
            self._open = False
            _before_the_end.close()
        # Taken out, so that an error is raised once; what nobody has asked for is still there at the end of
        # the program.
        error, self._error = self._error, None
        if error is not None:
            raise error


_last: list[Saving] = []
#: The default process group, and the one beside it.
_groups: list[tuple[object, Any]] = []


def finish_last(world: World, place: Path | str | None = None) -> None:
    """Wait for the save that is under way, if any, and raise, on every rank, what it failed with; collective.

    With ``place``, only where it goes there; another goes on, once it has its copies. A rank that was told
    by ``wait`` knows no error any more, and hears of it again with the others.
    """
    # Not in a phase: it would take an error on which the background's group agrees meanwhile for its own.
    before: Exception | None = None
    try:
        if place is None or any(s._place is not None and is_same(s._place, place) for s in _last):
            _finish()
        settle_last()
    except Exception as error:
        before = error
    world.raise_together(before, "the save before this one")


def _finish() -> None:
    """Wait for the save that is under way, if any, and raise what it failed with, if nobody was told here."""
    while _last:
        saving = _last.pop()
        if not saving.done():
            logger.info("waiting for the previous checkpoint, which is still being written")
        saving.wait()


_before_the_end = BeforeTheEnd(_finish)


@atexit.register
def _end() -> None:
    """End the process with an error where a save has failed and nobody was told; threads are over."""
    if _has_failed():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_child() -> None:
    """The same in a process of multiprocessing, of which those that were forked do not come to ``atexit``."""
    for saving in _last:
        if saving._thread is not None:
            saving._thread.join()
    if isinstance(sys.exc_info()[1], (SystemExit, type(None))) and _has_failed():
        raise SystemExit(1)


def _has_failed() -> bool:
    failed = [saving for saving in _last if saving.done() and saving._error is not None]
    if failed:
        logger.error("this process ends with exit code 1: %s", failed[0]._error)
    return bool(failed)


def settle_last() -> None:
    """Wait until the save that is under way, if any, has its copies."""
    for saving in _last:
        saving.settle()


def begin(
    write: Callable[[World], None],
    place: Path | str,
    world: World,
    begun: float,
    copy: Callable[[], None] | None = None,
) -> Saving:
    """Run ``write``, which publishes ``place``, in a thread, over a process group of its own; collective.

    The program waits for it at its end, and so does whoever reads the place, or ends the process group.

    ``copy``, if any, runs before, in the same thread; the next step of an optimizer waits for it. Raises
    WriteError, on every rank, where one can start no thread.
    """
    # Made on the calling thread: creating a process group is collective, and must not meet what training
    # exchanges.
    aside = _aside(world)
    saving = Saving(_place=place)
    agreed = threading.Event()

    def run() -> None:
        # No thread begins before all ranks have one: else some would wait in collectives for ranks that never
        # come.
        agreed.wait()
        if saving._thread is None:  # some rank has none
            return
        try:
            if copy is not None:
                with aside.phase("copying the state while training goes on"):
                    try:
                        copy()
                    finally:
                        saving._copied.set()
            write(aside)
        except BaseException as error:  # told by ``wait``, or by the next save
            saving._error = error
            logger.error("the checkpoint that was being written was not saved: %s", error)
        finally:
            saving._copied.set()  # also where no copy was begun: a step must not wait for it for ever
            saving.seconds["written"] = time.perf_counter() - begun

    # No daemon: the interpreter waits for it at its end.
    saving._thread = thread = threading.Thread(target=run, name="zerostart-saving")
    if copy is None:
        saving._copied.set()
    else:
        saving._hook = register_optimizer_step_pre_hook(lambda *_: saving.settle())
    try:
        with world.phase("starting a thread that saves"):
            _start(thread)
    except BaseException:
        saving._thread = None
        saving.wait()
        raise
    finally:
        agreed.set()
    _last.append(saving)
    if multiprocessing.parent_process() is not None:  # after what others do at its end
        saving._at_end = Finalize(None, _end_child, exitpriority=-1000)
    # Whoever reads the place in this process finds the thread there, and joins it.
    note_pending(place, thread)
    # destroy_process_group waits for the save from here on, which still needs the group beside it.
    _before_the_end.open()
    saving._open = True
    saving.seconds["blocked"] = time.perf_counter() - begun
    return saving


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise WriteError(
            f"cannot start a thread to save in the background ({error}): raise the limit of "
            "processes (ulimit -u), or save with wait=True"
        ) from error


def _aside(world: World) -> World:
    """The same ranks over a group that only saves in the background use, made once."""
    if world.size == 1:
        return world
    default = dist.group.WORLD
    # A default group that was destroyed and made again has taken the one beside it along.
    if not _groups or _groups[0][0] is not default:
        with world.collectives("making a process group for saving"):
            _groups[:] = [(default, group_beside())]
    return replace(world, group=_groups[0][1])


# Copies in host memory of what a rank is to write. The memory stays for as long as the model lives: the next
# copies go into pages that are there, which takes a fraction of the time that fresh ones do. Copies off an
# accelerator are page-locked. What lies in host memory and only a step of the optimizer changes may be
# copied later, until that step.

#: Bytes of a tensor from which on it may be copied later; and integers as wide as its elements.
LATER = 16 * PAGE
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: For each model the memory of its last copies. At most one save is under way, so nobody reads from it still.
#: By whether it is page-locked.
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[bool, torch.Tensor]] = weakref.WeakKeyDictionary()


def copied_to_host(
    content: Content, world: World, budget: int | None, later: bool = False
) -> tuple[Content, Callable[[], None] | None]:
    """``content`` with copies in host memory of what this rank is to write, as it is at this moment.

    With ``later``, what is ``content.stepped`` and on the host is copied by the function that is also given,
    which has to be called once, and to return, before the optimizer makes a step; it raises EngineError if
    anything else has changed it. No save of the same model may be under way. Raises InsufficientMemoryError,
    on every rank, if the copies are more than ``budget`` bytes.
    """
    left: list[Callable[[], None]] = []
    own = [_own(outgoing) for outgoing in (content.model[1], content.state[1])]
    needed = sum(piece.nbytes for part in own for piece in part)
    with world.phase("copying the state to host memory"):
        # Memory of the last copies is used again, so it counts as free.
        there = sum(buffer.nbytes for buffer in _buffers.get(content.module, {}).values())
        limit = available_memory() // max(1, local_ranks()) + there if budget is None else budget
        if needed > limit:
            raise InsufficientMemoryError(
                f"rank {world.rank} would copy {decimal(needed)} to host memory to save in the "
                f"background, and {decimal(limit)} are free for it; use wait=True"
            )
        devices = {piece.device for part in own for piece in part if piece.locked}
        of = next(iter(devices), None)
        arenas = {
            locked: Arena(torch.device("cpu"), partial(_buffer, content.module, locked, of))
            for locked in (False, True)
        }
        # First all room is reserved and then anything taken: an arena allocates once, in the size of all.
        places = [[piece.reserved(arenas) for piece in part] for part in own]
        model, state = (
            [
                piece.copied(arenas, place, left if later and piece.name in content.stepped else None)
                for piece, place in zip(part, at, strict=True)
            ]
            for part, at in zip(own, places, strict=True)
        )
        for device in devices:
            # Copies off the device were only started: training may change what they read once they are done.
            torch.accelerator.synchronize(device)  # not the current one, which may be another
    found = replace(content, model=(content.model[0], model), state=(content.state[0], state))
    return found, partial(_all, left) if later else None


def _all(copies: Sequence[Callable[[], None]]) -> None:
    for copy in copies:
        copy()


def _buffer(module: nn.Module, locked: bool, device: torch.device | None, nbytes: int) -> torch.Tensor:
    """The model's memory for copies, page-locked for ``device`` or not, made anew where it is too small."""
    own = _buffers.setdefault(module, {})
    if locked not in own or own[locked].nbytes < nbytes:
        own.pop(locked, None)  # Before the new one is made.
        own[locked] = (
            page_locked(nbytes, device) if locked else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        )
    return own[locked]


class _Own:
    """The part of a share that this rank writes, and the range of its storage in which that lies."""

    def __init__(self, item: Outgoing, part: Layout | None) -> None:
        self._item = item
        self._boxes: Sequence[LocalBox] = part.boxes if part is not None else ()
        # From the first to the last element that this rank writes: one copy of a range, though others'
        # elements may lie in between.
        self._low = min((placed.to for placed in self._boxes), default=0)
        high = max((placed.to + _span(placed) for placed in self._boxes), default=0)
        self._storage = item.shard.storage.detach()[self._low : high]

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def locked(self) -> bool:
        """Whether its copy is page-locked: what comes from an accelerator."""
        return self.device.type != "cpu"

    def reserved(self, arenas: Mapping[bool, Arena]) -> int:
        """Its place among the copies of its kind."""
        return arenas[self.locked].reserve(self._storage.numel(), self._storage.dtype)

    @property
    def name(self) -> str:
        return self._item.shard.name

    def copied(
        self, arenas: Mapping[bool, Arena], place: int, later: list[Callable[[], None]] | None
    ) -> Outgoing:
        """The part in host memory; copied by what is added to ``later``, where it is given and serves."""
        storage, low = self._storage, self._low
        kept = arenas[self.locked].take(place, storage.numel(), storage.dtype)
        if self.locked or later is None or storage.nbytes < LATER or storage.itemsize not in _BITS:
            kept.copy_(storage, non_blocking=self.locked)
        else:
            later.append(partial(self._copy_later, kept, _samples(storage).clone()))
        shard = self._item.shard
        boxes = tuple(replace(placed, to=placed.to - low) for placed in self._boxes)
        layout = Layout(shard.layout.shape, kept.numel(), kept.numel(), boxes)
        return replace(self._item, shard=Shard(shard.name, layout, kept, lambda _: layout))

    def _copy_later(self, kept: torch.Tensor, samples: torch.Tensor) -> None:
        kept.copy_(self._storage)
        if not torch.equal(_samples(kept), samples):
            raise EngineError(
                f"{self.name} was changed before it was copied for the checkpoint, and not by an "
                "optimizer step; before the change, call settle() on what save_state returned, or "
                "save without copy_later (in zerostart train: checkpoint.background: false)"
            )


def _samples(storage: torch.Tensor) -> torch.Tensor:
    """The bits of one element of each page of memory."""
    return storage.view(_BITS[storage.itemsize])[:: PAGE // storage.itemsize]


def _own(outgoing: Sequence[Outgoing]) -> list[_Own]:
    parts = own_parts(share(item.shard) for item in outgoing)
    return [_Own(item, part) for item, part in zip(outgoing, parts, strict=True)]


def _span(placed: LocalBox) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(placed.box.extent, placed.strides, strict=True))
