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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerostart.checkpoint.paths import is_same, note_pending
from zerostart.distributed.world import World, group_beside
from zerostart.errors import WriteError
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
    _place: Path | None = None
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
        error, self._error = self._error, None
        if error is not None:
            raise error


_last: list[Saving] = []
#: The default process group, and the one beside it.
_groups: list[tuple[Any, Any]] = []


def finish_last(world: World, place: Path | None = None) -> None:
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
            logger.info("waiting for the checkpoint before this one, which is still being written")
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
    place: Path,
    world: World,
    begun: float,
    copy: Callable[[], None] | None = None,
) -> Saving:
    """Run ``write``, which publishes ``place``, in a thread, over a process group of its own; collective.

    The program waits for it at its end, and so does whoever reads the place, or ends the process group.

    ``copy``, if any, runs before, in the same thread; the next step of an optimizer waits for it. Raises
    WriteError, on every rank, where one can start no thread.
    """
    aside = _aside(world)
    saving = Saving(_place=place)
    agreed = threading.Event()

    def run() -> None:
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
    note_pending(place, thread)
    _before_the_end.open()
    saving._open = True
    saving.seconds["blocked"] = time.perf_counter() - begun
    return saving


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise WriteError(
            f"no thread can be started to save in the background ({error}): raise the limit of processes "
            "(ulimit -u), or save with wait=True"
        ) from error


def _aside(world: World) -> World:
    """The same ranks over a group that only saves in the background use, made once."""
    if world.size == 1:
        return world
    default = dist.group.WORLD
    if not _groups or _groups[0][0] is not default:
        with world.collectives("making a process group for saving"):
            _groups[:] = [(default, group_beside())]
    return replace(world, group=_groups[0][1])
