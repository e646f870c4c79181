"""Write a checkpoint in the background, from copies in host memory.

A thread of each rank writes. The threads use a separate process group, so that their messages do not mix
with those of training. At most one save runs; the next one, or the end of the program, waits for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
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
from zerostart.upstream.torch.process_group import BeforeDestroy

logger = logging.getLogger("zerostart")


@dataclass
class Saving:
    """A save that runs or has ended.

    ``seconds`` has ``blocked``, the duration of the call, and ``written``, the time from the call until the
    checkpoint was published.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"blocked": 0.0, "written": 0.0})
    _thread: threading.Thread | None = None
    _error: BaseException | None = None
    _place: Path | str | None = field(default=None, repr=False)  # a URL may have a password
    #: True while the destruction of the process group waits for it.
    _open: bool = False

    def done(self) -> bool:
        """Return True if the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is published; raise the error of a failed save, once."""
        if self._thread is not None:
            self._thread.join()
        if self._open:
            self._open = False
            _before_the_end.close()
        error, self._error = self._error, None
        if error is not None:
            raise error


_last: list[Saving] = []
#: The default process group, and the one for background saves.
_groups: list[tuple[object, Any]] = []


def finish_last(world: World, place: Path | str | None = None) -> None:
    """Wait for the running save, and raise its error on every rank; collective.

    With ``place``, wait only for a save to that path. The error is raised again on a rank whose ``wait`` has
    raised it.
    """
    # Not in a phase, which would mistake errors of the background group for its own.
    before: Exception | None = None
    try:
        if place is None or any(s._place is not None and is_same(s._place, place) for s in _last):
            _wait_for_last()
    except Exception as error:
        before = error
    world.raise_together(before, "the previous save")


def _wait_for_last() -> None:
    while _last:
        saving = _last.pop()
        if not saving.done():
            logger.info("waiting for the previous checkpoint, which is still being written")
        saving.wait()


_before_the_end = BeforeDestroy(_wait_for_last)


@atexit.register
def _exit_with_error() -> None:
    failed = [saving for saving in _last if saving.done() and saving._error is not None]
    if failed:
        logger.error("this process ends with exit code 1: %s", failed[0]._error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def begin(write: Callable[[World], None], place: Path | str, world: World, start: float) -> Saving:
    """Run ``write`` in a thread with a separate process group; collective.

    ``write`` publishes ``place``. The end of the program, readers of the place, and the destruction of the
    process group wait for it. Raises WriteError, on every rank, if one cannot start a thread.
    """
    # On the calling thread, since creating a process group is collective.
    background = _make_background_world(world)
    saving = Saving(_place=place)
    agreed = threading.Event()

    def run() -> None:
        # Otherwise ranks would wait in collectives for a rank that could not start its thread.
        agreed.wait()
        if saving._thread is None:
            return
        try:
            write(background)
        except BaseException as error:  # raised by ``wait``, or by the next save
            saving._error = error
            logger.error("the checkpoint that was being written was not saved: %s", error)
        finally:
            saving.seconds["written"] = time.perf_counter() - start

    # No daemon: the interpreter waits for it at its end.
    saving._thread = thread = threading.Thread(target=run, name="zerostart-saving")
    try:
        with world.phase("starting a thread that saves"):
            try:
                thread.start()
            except RuntimeError as error:
                raise WriteError(
                    f"cannot start a thread to save in the background ({error}): raise the limit of "
                    "processes (ulimit -u), or save with wait=True"
                ) from error
    except BaseException:
        saving._thread = None
        raise
    finally:
        agreed.set()
    _last.append(saving)
    # Readers of the place in this process join the thread.
    note_pending(place, thread)
    # From here on destroy_process_group waits for the save, which needs its group.
    _before_the_end.open()
    saving._open = True
    saving.seconds["blocked"] = time.perf_counter() - start
    return saving


def _make_background_world(world: World) -> World:
    if world.size == 1:
        return world
    default = dist.group.WORLD
    # Destroying the default group has destroyed the other one, too.
    if not _groups or _groups[0][0] is not default:
        with world.collectives("making a process group for saving"):
            _groups[:] = [(default, make_message_group())]
    return replace(world, group=_groups[0][1])


#: Memory of the last copies of each model, page-locked for an accelerator: fresh pages take much longer.
_buffers: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def copy_to_host(content: Content, world: World, budget: int | None) -> Content:
    """Return ``content`` with this rank's parts copied to host memory.

    No other save of the model may be running. Raises InsufficientMemoryError, on every rank, if the copies
    are more than ``budget`` bytes.
    """
    own = [_split_own_parts(outgoing) for outgoing in (content.model[1], content.state[1])]
    needed = sum(piece.storage.nbytes for part in own for piece in part)
    with world.phase("copying the state to host memory"):
        # The buffer of the last copies is reused, so it counts as free.
        reusable = _buffers[content.module].nbytes if content.module in _buffers else 0
        limit = available_memory() // max(1, local_ranks()) + reusable if budget is None else budget
        if needed > limit:
            raise InsufficientMemoryError(
                f"rank {world.rank} would copy {decimal(needed)} to host memory to save in the "
                f"background, and {decimal(limit)} are free for it; use wait=True"
            )
        devices = {piece.storage.device for part in own for piece in part} - {torch.device("cpu")}
        device = next(iter(devices), None)
        arena = Arena(torch.device("cpu"), partial(_get_buffer, content.module, device))
        # Reserve everything first: an arena allocates once.
        places = [[arena.reserve(p.storage.numel(), p.storage.dtype) for p in part] for part in own]
        model, state = (
            [piece.copied(arena, place) for piece, place in zip(part, at, strict=True)]
            for part, at in zip(own, places, strict=True)
        )
        if device is not None:
            # Copies from the device are asynchronous.
            torch.accelerator.synchronize(device)
    return replace(content, model=(content.model[0], model), state=(content.state[0], state))


def _get_buffer(module: nn.Module, device: torch.device | None, nbytes: int) -> torch.Tensor:
    if module not in _buffers or _buffers[module].nbytes < nbytes:
        _buffers.pop(module, None)  # before the new one is allocated
        _buffers[module] = (
            torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if device is None
            else page_locked(nbytes, device)
        )
    return _buffers[module]


class _OwnPart:
    """This rank's part of a share, and the range of its storage."""

    def __init__(self, item: Outgoing, part: Layout | None) -> None:
        self._item = item
        self._boxes: Sequence[LocalBox] = part.boxes if part is not None else ()
        # One copy from the first to the last element to write, including elements in between.
        self._low = min((placed.to for placed in self._boxes), default=0)
        high = max((placed.to + _span(placed) for placed in self._boxes), default=0)
        self.storage = item.shard.storage.detach()[self._low : high]

    def copied(self, arena: Arena, place: int) -> Outgoing:
        """Return the part in host memory, at ``place`` of ``arena``."""
        copy = arena.take(place, self.storage.numel(), self.storage.dtype)
        copy.copy_(self.storage, non_blocking=True)
        shard = self._item.shard
        boxes = tuple(replace(placed, to=placed.to - self._low) for placed in self._boxes)
        layout = Layout(shard.layout.shape, copy.numel(), copy.numel(), boxes)
        return replace(self._item, shard=Shard(shard.name, layout, copy, lambda _: layout))


def _split_own_parts(outgoing: Sequence[Outgoing]) -> list[_OwnPart]:
    parts = split_shares(share(item.shard) for item in outgoing)
    return [_OwnPart(item, part) for item, part in zip(outgoing, parts, strict=True)]


def _span(placed: LocalBox) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(placed.box.extent, placed.strides, strict=True))
