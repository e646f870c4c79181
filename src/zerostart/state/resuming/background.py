"""Write a checkpoint in a thread of each rank, out of copies in host memory, while training goes on.

The ranks agree over a process group of their own, so that nothing of it meets what training exchanges. At
most one save is under way; the next one, or the end of the program, waits for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.filesize import decimal
from torch import nn

from zerostart.checkpoint.paths import is_same, note_pending
from zerostart.distributed.machine import available_memory, local_ranks
from zerostart.distributed.world import World, make_message_group
from zerostart.engines import Shard
from zerostart.errors import InsufficientMemoryError, WriteError
from zerostart.geometry.layout import Layout
from zerostart.geometry.layout.layout import LocalBox
from zerostart.state.resuming.training_state import Content
from zerostart.state.saving.writing import Outgoing, share
from zerostart.transfer.buffers import Arena, page_locked
from zerostart.transfer.planning.writes import split_shares
from zerostart.upstream.torch.process_group import BeforeTheEnd

logger = logging.getLogger("zerostart")


@dataclass
class Saving:
    """A save that is under way or done.

    ``seconds`` has ``blocked``, for which the call held the training up, and ``written``, from the call until
    the checkpoint was in its place.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"blocked": 0.0, "written": 0.0})
    _thread: threading.Thread | None = None
    _error: BaseException | None = None
    _place: Path | str | None = field(default=None, repr=False)  # a URL may have a password
    #: True while the end of the process group waits for it.
    _open: bool = False

    @classmethod
    def finished(cls, seconds: float) -> Saving:
        """Return a save that was over when its call returned."""
        return cls({"blocked": seconds, "written": seconds})

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is in its place; raises what the save failed with, once."""
        if self._thread is not None:
            self._thread.join()
        if self._open:
            self._open = False
            _before_the_end.close()
        error, self._error = self._error, None
        if error is not None:
            raise error


_last: list[Saving] = []
#: The default process group, and the one beside it.
_groups: list[tuple[object, Any]] = []


def finish_last(world: World, place: Path | str | None = None) -> None:
    """Wait for the save that is under way, and raise on every rank what it failed with; collective.

    With ``place``, only a save that goes there. A rank that was told by ``wait`` hears of it again with the
    others.
    """
    # Not in a phase: it would take an error on which the background's group agrees meanwhile for its own.
    before: Exception | None = None
    try:
        if place is None or any(s._place is not None and is_same(s._place, place) for s in _last):
            _finish()
    except Exception as error:
        before = error
    world.raise_together(before, "the save before this one")


def _finish() -> None:
    while _last:
        saving = _last.pop()
        if not saving.done():
            logger.info("waiting for the previous checkpoint, which is still being written")
        saving.wait()


_before_the_end = BeforeTheEnd(_finish)


@atexit.register
def _end() -> None:
    failed = [saving for saving in _last if saving.done() and saving._error is not None]
    if failed:
        logger.error("this process ends with exit code 1: %s", failed[0]._error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def begin(write: Callable[[World], None], place: Path | str, world: World, begun: float) -> Saving:
    """Run ``write``, which publishes ``place``, in a thread, over a process group of its own; collective.

    The program waits for it at its end, and so does whoever reads the place, or ends the process group.
    Raises WriteError, on every rank, where one can start no thread.
    """
    # Made on the calling thread: creating a process group is collective.
    aside = _aside(world)
    saving = Saving(_place=place)
    agreed = threading.Event()

    def run() -> None:
        # Some ranks would otherwise wait in collectives for a rank that can start no thread.
        agreed.wait()
        if saving._thread is None:
            return
        try:
            write(aside)
        except BaseException as error:  # told by ``wait``, or by the next save
            saving._error = error
            logger.error("the checkpoint that was being written was not saved: %s", error)
        finally:
            saving.seconds["written"] = time.perf_counter() - begun

    # No daemon: the interpreter waits for it at its end.
    saving._thread = thread = threading.Thread(target=run, name="zerostart-saving")
    try:
        with world.phase("starting a thread that saves"):
            _start(thread)
    except BaseException:
        saving._thread = None
        raise
    finally:
        agreed.set()
    _last.append(saving)
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
    if world.size == 1:
        return world
    default = dist.group.WORLD
    # A default group that was destroyed and made again has taken the one beside it along.
    if not _groups or _groups[0][0] is not default:
        with world.collectives("making a process group for saving"):
            _groups[:] = [(default, make_message_group())]
    return replace(world, group=_groups[0][1])


#: Memory of the last copies of each model, by whether it is page-locked: fresh pages take much longer.
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[bool, torch.Tensor]] = weakref.WeakKeyDictionary()


def copied_to_host(content: Content, world: World, budget: int | None) -> Content:
    """Return ``content`` with copies in host memory of what this rank is to write.

    No save of the same model may be under way. Raises InsufficientMemoryError, on every rank, if the copies
    are more than ``budget`` bytes.
    """
    own = [_own(outgoing) for outgoing in (content.model[1], content.state[1])]
    needed = sum(piece.storage.nbytes for part in own for piece in part)
    with world.phase("copying the state to host memory"):
        # Memory of the last copies is used again, so it counts as free.
        there = sum(buffer.nbytes for buffer in _buffers.get(content.module, {}).values())
        limit = available_memory() // max(1, local_ranks()) + there if budget is None else budget
        if needed > limit:
            raise InsufficientMemoryError(
                f"rank {world.rank} would copy {decimal(needed)} to host memory to save in the "
                f"background, and {decimal(limit)} are free for it; use wait=True"
            )
        devices = {piece.storage.device for part in own for piece in part if piece.locked}
        of = next(iter(devices), None)
        arenas = {
            locked: Arena(torch.device("cpu"), partial(_buffer, content.module, locked, of))
            for locked in (False, True)
        }
        # First all room is reserved and then anything taken: an arena allocates once, in the size of all.
        places = [
            [arenas[p.locked].reserve(p.storage.numel(), p.storage.dtype) for p in part] for part in own
        ]
        model, state = (
            [piece.copied(arenas, place) for piece, place in zip(part, at, strict=True)]
            for part, at in zip(own, places, strict=True)
        )
        for device in devices:
            # Copies off the device were only started.
            torch.accelerator.synchronize(device)
    return replace(content, model=(content.model[0], model), state=(content.state[0], state))


def _buffer(module: nn.Module, locked: bool, device: torch.device | None, nbytes: int) -> torch.Tensor:
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
        # One copy from the first to the last element that this rank writes, others' between them included.
        self._low = min((placed.to for placed in self._boxes), default=0)
        high = max((placed.to + _span(placed) for placed in self._boxes), default=0)
        self.storage = item.shard.storage.detach()[self._low : high]
        #: True if its copy is page-locked: what comes from an accelerator.
        self.locked = self.storage.device.type != "cpu"

    def copied(self, arenas: Mapping[bool, Arena], place: int) -> Outgoing:
        """Return the part in host memory, at ``place`` of its arena."""
        kept = arenas[self.locked].take(place, self.storage.numel(), self.storage.dtype)
        kept.copy_(self.storage, non_blocking=self.locked)
        shard = self._item.shard
        boxes = tuple(replace(placed, to=placed.to - self._low) for placed in self._boxes)
        layout = Layout(shard.layout.shape, kept.numel(), kept.numel(), boxes)
        return replace(self._item, shard=Shard(shard.name, layout, kept, lambda _: layout))


def _own(outgoing: Sequence[Outgoing]) -> list[_Own]:
    parts = split_shares(share(item.shard) for item in outgoing)
    return [_Own(item, part) for item, part in zip(outgoing, parts, strict=True)]


def _span(placed: LocalBox) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(placed.box.extent, placed.strides, strict=True))
