"""A save that goes on while training does: shares copied to host memory, written by a thread of each rank.

The ranks agree over a process group of their own, so that nothing of it meets what training exchanges. At
most one save is under way; the next one, or the end of the program, waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from zerostart.distributed.machine import available_memory, local_ranks
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.errors import InsufficientMemoryError
from zerostart.layout import Layout
from zerostart.layout.layout import Placed
from zerostart.planning.writes import GRAIN, own_part
from zerostart.state.training_state import Content
from zerostart.state.writing import Outgoing

__all__ = ["Saving", "begin", "finish_last", "kept_on_host"]

logger = logging.getLogger("zerostart")


@dataclass
class Saving:
    """A save under way or done.

    Of ``seconds``, ``blocked`` is how long the call held the training up, ``written`` how long it took from
    the call until the checkpoint was in its place; 0.0 until then.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"blocked": 0.0, "written": 0.0})
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    @classmethod
    def finished(cls, seconds: float) -> Saving:
        """One that was over when its call returned."""
        return cls({"blocked": seconds, "written": seconds})

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is in its place; raises what the save failed with, once."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


_last: list[Saving] = []
#: The default process group, and the one beside it.
_groups: list[tuple[Any, Any]] = []


def finish_last() -> None:
    """Wait for the save that is under way, if any, and raise what it failed with, if nobody was told."""
    while _last:
        saving = _last.pop()
        if not saving.done():
            logger.info("waiting for the checkpoint before this one, which is still being written")
        saving.wait()


def begin(write: Callable[[World], None], world: World, begun: float) -> Saving:
    """Run ``write`` in a thread, over a process group of its own; collective. The program waits for it."""
    aside = _aside(world)
    saving = Saving()

    def run() -> None:
        try:
            write(aside)
        except BaseException as error:  # told by ``wait``, or by the next save
            saving._error = error
            logger.error("the checkpoint that was being written was not saved: %s", error)
        finally:
            saving.seconds["written"] = time.perf_counter() - begun

    # No daemon: the interpreter waits for it at its end.
    saving._thread = threading.Thread(target=run, name="zerostart-saving")
    _last.append(saving)
    saving.seconds["blocked"] = time.perf_counter() - begun
    saving._thread.start()
    return saving


def _aside(world: World) -> World:
    """The same ranks over a group that only saves in the background use, made once."""
    if world.size == 1:
        return world
    default = dist.group.WORLD
    if not _groups or _groups[0][0] is not default:
        with world.collectives("making a process group for saving"):
            _groups[:] = [(default, dist.new_group(backend="gloo"))]
    return replace(world, group=_groups[0][1])


def kept_on_host(content: Content, world: World, budget: int | None) -> Content:
    """``content`` with copies in host memory of what this rank is to write, as it is at this moment.

    Raises InsufficientMemoryError, on every rank, if they are more than ``budget`` bytes.
    """
    own = [_own(outgoing) for outgoing in (content.model[1], content.state[1])]
    needed = sum((high - low) * item.shard.storage.itemsize for part in own for item, _, low, high in part)
    with world.phase("copying the state to host memory"):
        limit = available_memory() // max(1, local_ranks()) if budget is None else budget
        if needed > limit:
            raise InsufficientMemoryError(
                f"rank {world.rank} would copy {needed / 2**20:.1f} MiB to host memory to save in the "
                f"background, and {limit / 2**20:.1f} MiB are free for it; use wait=True"
            )
        model, state = ([_copied(*item) for item in part] for part in own)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    return replace(content, model=(content.model[0], model), state=(content.state[0], state))


_Own = tuple[Outgoing, Layout | None, int, int]


def _own(outgoing: list[Outgoing]) -> list[_Own]:
    """Of each share the part that this rank writes, and the range of its storage in which that lies."""
    found: list[_Own] = []
    turn = 0
    for item in outgoing:
        shard = item.shard
        size = shard.storage.itemsize
        part = own_part(shard.layout, shard.held, shard.layout.owned * size, turn)
        turn += 1 + prod(shard.layout.shape) * size // GRAIN
        boxes = part.boxes if part is not None else ()
        low = min((placed.to for placed in boxes), default=0)
        high = max((placed.to + _span(placed) for placed in boxes), default=0)
        found.append((item, part, low, high))
    return found


def _span(placed: Placed) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(placed.box.extent, placed.strides, strict=True))


def _copied(item: Outgoing, part: Layout | None, low: int, high: int) -> Outgoing:
    shape = item.shard.layout.shape
    boxes = tuple(replace(p, to=p.to - low) for p in part.boxes) if part is not None else ()
    layout = Layout(shape, high - low, high - low, boxes)
    storage = item.shard.storage.detach()[low:high].to("cpu", copy=True, non_blocking=True)
    return replace(item, shard=Shard(item.shard.name, layout, storage, lambda _: layout))
