"""Bytes of an image in messages of bounded size, which say themselves where their bytes belong.

What is written piece by piece is packed into messages, as bytes or as what has changed of them
(``changes.py``), and put into a spool on the other side. How a message gets there is a transport's matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from zerostart.checkpoint.memory import move_bytes
from zerostart.state.refitting.changes import Blocks, Numbers, Packed, pack, places_in, unit_of, unpack
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.transports.base import ImageWriter
from zerostart.state.refitting.transports.spool import Spool
from zerostart.transfer.planning.runs import Runs

MiB = 1 << 20
#: Most bytes of the rows of a message; of one of differences, to pack which takes memory beside them.
MESSAGE, DIFFERENCES = 32 * MiB, 8 * MiB
#: Least bytes of one run that are a message by themselves, from where they lie: a copy costs more than it.
ALONE = 1 * MiB


@dataclass(frozen=True)
class Message:
    """Some bytes of an image, or their differences from those of a version before."""

    #: Where they belong: ``Runs.rows`` in the order in which the bytes follow each other.
    rows: Numbers
    #: Bytes of the rows.
    nbytes: int
    #: How many bytes of the content are the gaps of packed differences; 0: the content is not packed.
    gaps: int
    content: torch.Tensor


class Packer:
    """Makes messages of what several threads put in."""

    def __init__(self, limit: int, differences: bool, deliver: Callable[[Message], None]) -> None:
        """``deliver`` is called with one after the other, of ``limit`` bytes at most; it must not keep it."""
        self._limit = min(limit, DIFFERENCES) if differences else limit
        self._differences, self._deliver = differences, deliver
        self._lock = threading.Lock()
        self._room: torch.Tensor | None = None
        self._rows: list[Numbers] = []
        self._filled = 0

    def put(self, met: Runs, source: torch.Tensor, place: int) -> None:
        """Those bytes of ``met``, where ``source`` begins at byte ``place`` of the image."""
        with self._lock:
            for part in met.batches(self._limit):
                if not self._differences and len(part.rows) == 1 and part.nbytes >= ALONE:
                    start, width, _, count = part.rows[0].tolist()
                    if count == 1:
                        self._deliver(Message(part.rows, width, 0, source[start - place :][:width]))
                        continue
                if self._filled + part.nbytes > self._limit:
                    self._send()
                if self._room is None:
                    self._room = torch.empty(self._limit, dtype=torch.uint8, device="cpu")
                for start, width, stride, count in part.rows.tolist():
                    nbytes = width * count
                    room = self._room[self._filled : self._filled + nbytes].view(count, width)
                    _copy(room, source.as_strided((count, width), (stride or width, 1), start - place))
                    self._filled += nbytes
                self._rows.append(part.rows)

    def end(self) -> None:
        """Deliver what is left."""
        with self._lock:
            if self._filled:
                self._send()
            self._room = None

    def _send(self) -> None:
        assert self._room is not None, "something was put in"
        rows = np.concatenate(self._rows)
        content, gaps = self._room[: self._filled], 0
        if self._differences and (packed := pack(content.numpy(), unit_of(rows))) is not None:
            gaps = len(packed.gaps)
            content = torch.from_numpy(np.concatenate(packed))
        if content.numel():  # of differences there may be none
            self._deliver(Message(rows, self._filled, gaps, content))
        self._filled, self._rows = 0, []


class Sender(ImageWriter):
    """What is written, or what of it has changed, into the messages of those who want it."""

    def __init__(
        self,
        image: Image,
        packers: list[tuple[Runs, Packer]],
        kept: Spool | None,
        differences: bool,
        changed: Callable[[int], None],
    ) -> None:
        """``packers`` with what each wants. ``kept`` has what was written before, and has this afterwards.

        With ``differences`` packers get what differs from it, and ``changed`` is told of how many bytes.
        """
        super().__init__(image.layout)
        self._packers, self._kept, self._changed = packers, kept, changed
        self._differences = differences

    def put(self, place: int, data: torch.Tensor, length: int, step: int, rows: int) -> None:
        """Put it into the messages; full ones are delivered meanwhile."""
        if self._kept is not None:
            now = data.as_strided((rows, length), (step, 1))
            before = self._kept.data.as_strided((rows, length), (step, 1), place)
            if self._differences:
                data = torch.empty(data.shape, dtype=torch.uint8, device="cpu")
                different = data.as_strided((rows, length), (step, 1))
                torch.bitwise_xor(now, before, out=different)
                changed = int(different.count_nonzero())
                if not changed:
                    return
                self._changed(changed)
            before.copy_(now)
        written = Runs.of([(place, length, step, rows)])
        for wants, packer in self._packers:
            met = written.intersect(wants)
            if met.nbytes:
                packer.put(met, data, place)


def take(
    message: Message, spool: Spool, blocks: Blocks, version: int, differences: bool, part: bool = False
) -> None:
    """Put a message of ``version`` into a spool that has what it differs from.

    With ``part`` the spool wants a part of it alone. Raises ValueError, RuntimeError or IndexError for a
    message that does not fit.
    """
    rows, memory = message.rows, spool.data
    if (rows < 0).any() or int((rows[:, 1] * rows[:, 3]).sum()) != message.nbytes:
        raise ValueError("a message whose rows have other bytes than it says")
    if message.gaps:
        unit = unit_of(rows)
        content = message.content.numpy()
        places, values = unpack(Packed(content[: message.gaps], content[message.gaps :]), unit)
        places = places_in(rows, places * unit)
        if part and unit > unit_of(spool.runs.rows):  # of a unit one byte alone may be wanted
            places, values, unit = np.stack([places, places + 1], 1).reshape(-1), values.view(np.uint8), 1
        if part:
            wanted = _wanted(places, spool.runs)
            places, values = places[wanted], values[wanted]
        blocks.note_places(places, version)
        # Units lie at even places, or are bytes.
        memory[: memory.numel() // unit * unit].numpy().view(f"u{unit}")[places // unit] ^= values
        return
    begin = int(message.content.storage_offset())
    for start, width, stride, count, at, apart in _rows(rows, spool.runs if part else None):
        there = memory.as_strided((count, width), (stride or width, 1), start)
        given = message.content.as_strided((count, width), (apart or width, 1), begin + at)
        if differences:
            torch.bitwise_xor(there, given, out=there)
        else:
            _copy(there, given)
        blocks.note(start, start + (count - 1) * stride + width, version)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Rows of bytes."""
    if to.is_contiguous() and source.is_contiguous():
        move_bytes(to.view(-1), source.view(-1))
    else:
        to.copy_(source)


def _wanted(places: Numbers, runs: Runs) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of ``places`` are in ``runs``."""
    spans = runs.spans
    before = np.searchsorted(spans[:, 0], places, "right") - 1
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (before >= 0) & (places < spans[before, 1])
    return found


def _rows(rows: Numbers, wants: Runs | None) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Rows, or what ``wants`` has of them; each with its begin in the content, and its stride there."""
    done = 0
    for start, width, stride, count in rows.tolist():
        if wants is None:
            yield start, width, stride, count, done, width
        else:
            for first, wide, apart, many in (
                Runs.of([(start, width, stride, count)]).intersect(wants).rows.tolist()
            ):
                if count == 1:
                    yield first, wide, apart, many, done + first - start, apart
                    continue
                regular = many == 1 or apart % stride == 0
                for number in range(1 if regular else many):
                    run, inside = divmod(first + number * apart - start, stride)
                    at = done + run * width + inside
                    if regular:
                        yield first, wide, apart, many, at, apart // stride * width
                    else:
                        yield first + number * apart, wide, 0, 1, at, 0
        done += width * count
