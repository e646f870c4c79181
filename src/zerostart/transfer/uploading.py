"""Writes of several ranks as parts of objects: each part is put together on one rank, and uploaded by it.

A store takes an object in parts of some length, while a rank's bytes lie wherever the layout has put them.
So each part goes to a rank that has some of it: the one that holds the byte at a place which is drawn for
each part, alike on all ranks. Who has most of a part is likely to get it, and every rank gets as many as it
has bytes. What other ranks have of it they send, in rounds: in each every rank puts together the next of its
own parts. Nothing is sent in rounds whose parts are whole where they are.

Where a store takes a file from one process, a rank gets all parts of it; where it takes it whole, the rank
puts these together on its disk first.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.filesize import decimal

from zerostart.checkpoint.storage.uploads import Uploads, parts_of
from zerostart.checkpoint.write.parts import PartUploader, Receipts, Uploading
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.space import free_space
from zerostart.distributed.machine import machine_name
from zerostart.distributed.world import World
from zerostart.errors import CheckpointError, WriteError
from zerostart.transfer.planning.writes import Write, WritePlan
from zerostart.transfer.writing import Noted, Source, write_out

logger = logging.getLogger(__name__)
Integers = npt.NDArray[np.int64]
#: The fractional part of the golden ratio: its multiples lie evenly between 0 and 1, however many there are.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Parts:
    """The parts of all files of a layout, one after the other."""

    layout: SaveLayout
    #: Bytes of each but the last of a file.
    length: int
    #: Of each the file, its number there, and how many bytes it has.
    files: Integers
    numbers: Integers
    lengths: Integers
    #: Number of the first part of each file.
    first: Integers

    @classmethod
    def of(cls, layout: SaveLayout, length: int) -> Parts:
        """The parts of files that are cut every ``length`` bytes."""
        table = [
            (file, number, count)
            for file, described in enumerate(layout.files)
            for number, (_, count) in enumerate(parts_of(described.size, length))
        ]
        files, numbers, lengths = np.array(table, np.int64).T
        return cls(layout, length, files, numbers, lengths, np.flatnonzero(numbers == 0))

    def __len__(self) -> int:
        return len(self.files)

    def begin_of(self, write: Write) -> tuple[int, int]:
        """The part that a write lies in, and its first byte there."""
        entry = self.layout.tensors[write.name]
        return self.place(write.name, write.first * write.dtype.itemsize, entry.file)

    def place(self, name: str, offset: int, file: int) -> tuple[int, int]:
        """The part with byte ``offset`` of a tensor, and where it is there."""
        number, at = divmod(self.layout.tensors[name].offset + offset, self.length)
        return int(self.first[file]) + number, at


def upload_together(
    plan: WritePlan,
    storages: Sequence[Source],
    uploads: Uploads,
    files: Sequence[Uploading],
    world: World,
    *,
    part: int,
    depth: int,
    threads: int,
    noted: Noted | None = None,
) -> Receipts:
    """Upload what ``storages`` hold of the files of ``plan``, and give this rank's receipts; collective.

    No write of the plan crosses a multiple of ``part`` bytes of its file. Beside the storages and a staging
    buffer for each thread this takes ``depth`` parts, and for what is sent and received four more. Raises
    WriteError, and CheckpointError where an element is on no rank, or on two; inside a phase, as a rank may
    fail by itself.
    """
    sizes = [file.size for file in plan.layout.files]
    if uploads.staged:
        check_disk(sum(sizes[world.rank :: world.size]), uploads, world)
    parts = Parts.of(plan.layout, part)
    mine = _Schedule.of(plan, parts, uploads.shared, world)
    uploader = PartUploader(uploads, files, part, depth)
    try:
        for number in range(mine.rounds):
            _round(plan, storages, parts, mine, number, uploader, world, threads, noted)
        return uploaded(uploader, uploads, world)
    finally:
        uploader.abandon()


def check_disk(nbytes: int, uploads: Uploads, world: World) -> None:
    """Look whether each rank has room for ``nbytes`` of its own, which it stages; collective.

    Ranks of one machine stage on one disk. Raises WriteError, on all ranks alike.
    """
    place = tempfile.gettempdir()
    own = (machine_name(), Path(place).stat().st_dev, nbytes, free_space(place), place)
    every = world.all_gather_object(own, "looking at what is free for staging")
    if world.rank == 0:
        total = sum(of for *_, of, _, _ in every)
        logger.info("%s takes files whole: %s are staged on disk (%s)", uploads.url, decimal(total), place)
    for machine, device in dict.fromkeys(one[:2] for one in every):
        sharing = [one for one in every if one[:2] == (machine, device)]
        wanted, free = sum(one[2] for one in sharing), min((one[3] or 0 for one in sharing), default=0)
        if wanted > free and all(one[3] is not None for one in sharing):
            ranks = [rank for rank, one in enumerate(every) if one[:2] == (machine, device)]
            raise WriteError(
                f"{uploads.url}: the store takes files whole, and to put them together first takes "
                f"{decimal(wanted)} in {sharing[0][4]} on the machine of rank {ranks[0]}, where "
                f"{decimal(free)} are free; no weights were sent. Set TMPDIR to a directory with room, "
                "or save from more machines"
            )


def uploaded(uploader: PartUploader, uploads: Uploads, world: World) -> Receipts:
    """End an upload, and give this rank's receipts; collective.

    Where files are staged, all of the upload is now, and takes as long as it takes. Raises WriteError.
    """
    if not uploads.staged:
        return uploader.close()
    receipts: Receipts = {}
    world.while_working(lambda: receipts.update(uploader.close()), "uploading what is staged")
    return receipts


@dataclass(frozen=True)
class _Schedule:
    """Who uploads which part, in which round; and this rank's writes of each round."""

    owner: Integers
    rounds: int
    #: This rank's part in each round of those in which it has one.
    own: Integers
    #: This rank's writes into its own part, and into those of others, by round.
    kept: dict[int, list[Write]]
    sent: dict[int, list[Write]]
    #: How many messages each round takes.
    steps: Integers

    @classmethod
    def of(cls, plan: WritePlan, parts: Parts, shared: bool, world: World) -> _Schedule:
        """Agree on it; collective."""
        count = len(parts)
        own, holds = np.zeros(count, np.int64), np.zeros(count, np.int64)
        # The byte whose holder gets the part; of a header, which all have, they are dealt round.
        drawn = (np.arange(count) * _GOLDEN % 1.0 * parts.lengths).astype(np.int64)
        for write in plan.writes:
            number, begin = parts.begin_of(write)
            own[number] += write.nbytes
            if _has(write, int(drawn[number]) - begin):
                holds[number] = world.rank + 1
        for number in np.flatnonzero(parts.numbers * parts.length + drawn < _headers(parts)).tolist():
            holds[number] = world.rank + 1 if number % world.size == world.rank else 0
        if world.rank == 0:
            own += np.clip(_headers(parts) - parts.numbers * parts.length, 0, parts.lengths)
        told = world.all_reduce_sum(
            torch.from_numpy(np.concatenate([own, holds])), "agreeing who uploads which part"
        ).numpy()
        total, owner = told[:count], told[count:] - 1
        wrong = np.flatnonzero((total != parts.lengths) | (owner < 0) | (owner >= world.size))
        if len(wrong):
            file = plan.layout.files[int(parts.files[wrong[0]])].name
            raise CheckpointError(
                f"{file}: the ranks have {int(total[wrong[0]])} of the {int(parts.lengths[wrong[0]])} bytes "
                f"of its part {int(parts.numbers[wrong[0]])} in all; this is a bug in zerostart"
            )
        if not shared:
            owner = parts.files % world.size
        rounds = np.zeros(count, np.int64)
        for rank in range(world.size):
            at = np.flatnonzero(owner == rank)
            rounds[at] = np.arange(len(at))
        most = int(rounds.max()) + 1
        kept: dict[int, list[Write]] = {}
        sent: dict[int, list[Write]] = {}
        bytes_sent = np.zeros(most, np.int64)
        for write in plan.writes:
            number, _ = parts.begin_of(write)
            turn = int(rounds[number])
            (kept if owner[number] == world.rank else sent).setdefault(turn, []).append(write)
            bytes_sent[turn] += write.nbytes if owner[number] != world.rank else 0
        every = world.all_gather_object(bytes_sent, "agreeing how much is sent")
        steps = -(-np.max(np.stack(every), axis=0) // parts.length)
        return cls(owner, most, np.flatnonzero(owner == world.rank), kept, sent, steps)

    def messages(self, number: int, limit: int) -> Iterator[list[Write]]:
        """What this rank sends in each message of a round: ``limit`` bytes, and one write more, at most."""
        left = list(reversed(self.sent.get(number, [])))
        steps = int(self.steps[number])
        for step in range(steps):
            batch: list[Write] = []
            size = 0
            # Counted from the round's beginning, so that the last message has what is left.
            while left and (size < limit or step == steps - 1):
                batch.append(left.pop())
                size += batch[-1].nbytes
            yield batch


def _headers(parts: Parts) -> Integers:
    """Of each part how long the header of its file is."""
    return np.array([len(file.header) for file in parts.layout.files], np.int64)[parts.files]


def _has(write: Write, at: int) -> bool:
    """Whether byte ``at`` of the window of a write is among what is written."""
    width = write.dtype.itemsize
    if not 0 <= at < write.span * width:
        return False
    if write.count == write.span:
        return True
    starts, lengths = write.runs()
    run = int(np.searchsorted(starts, at // width, side="right")) - 1
    return run >= 0 and at // width < int(starts[run] + lengths[run])


def _round(
    plan: WritePlan,
    storages: Sequence[Source],
    parts: Parts,
    schedule: _Schedule,
    number: int,
    uploader: PartUploader,
    world: World,
    threads: int,
    noted: Noted | None,
) -> None:
    """Put the next part of each rank together, and begin to upload it."""
    own = int(schedule.own[number]) if number < len(schedule.own) else None
    buffer = bytearray()
    if own is not None:
        buffer = uploader.buffer()
        header = parts.layout.files[int(parts.files[own])].header
        piece = header[int(parts.numbers[own]) * parts.length :][: parts.length]
        buffer[: len(piece)] = piece
        kept = replace(plan, writes=tuple(schedule.kept.get(number, ())))
        write_out(kept, storages, _Into(parts, own, buffer), threads, noted)
    for writes in schedule.messages(number, parts.length):
        outbox = _Outbox(parts, schedule.owner, world.size)
        write_out(replace(plan, writes=tuple(writes)), storages, outbox, threads, noted)
        for message in world.exchange(outbox.messages(), "sending what others upload"):
            _unpack(message, buffer)
    if own is not None:
        file = int(parts.files[own])
        uploader.put(file, int(parts.numbers[own]), buffer, int(parts.lengths[own]))
        if own + 1 == len(parts) or parts.files[own + 1] != file:
            uploader.end(file)


class _Rows:
    """A writer (see ``transfer.writing``) that takes rows into memory."""

    def lead(self, name: str, offset: int) -> int:
        return 0

    def goes_round(self, nbytes: int) -> bool:
        return False


class _Into(_Rows):
    """Puts rows where they belong in one part."""

    def __init__(self, parts: Parts, number: int, buffer: bytearray) -> None:
        self._parts, self._number = parts, number
        self._buffer = np.frombuffer(buffer, np.uint8)

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        file = self._parts.layout.tensors[name].file
        number, at = self._parts.place(name, offset, file)
        assert number == self._number, "writes are cut where parts are"
        source = np.frombuffer(data, np.uint8)
        _rows(self._buffer[at:], length, step, rows)[...] = _rows(source, length, step, rows)


class _Outbox(_Rows):
    """Packs rows into a message for each rank: how many entries, the entries, and their bytes.

    An entry is the first byte in the part, and length, distance and number of rows, 64 bits each.
    """

    def __init__(self, parts: Parts, owner: Integers, size: int) -> None:
        self._parts, self._owner = parts, owner
        self._entries: list[list[tuple[int, int, int, int]]] = [[] for _ in range(size)]
        self._data: list[list[npt.NDArray[np.uint8]]] = [[] for _ in range(size)]
        self._lock = threading.Lock()

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        number, at = self._parts.place(name, offset, self._parts.layout.tensors[name].file)
        to = int(self._owner[number])
        packed = _rows(np.frombuffer(data, np.uint8), length, step, rows).reshape(-1).copy()
        with self._lock:
            self._entries[to].append((at, length, step, rows))
            self._data[to].append(packed)

    def messages(self) -> list[torch.Tensor]:
        """The message for each rank; empty for those that get nothing."""
        found = []
        for entries, data in zip(self._entries, self._data, strict=True):
            head = np.array([len(entries), *(n for entry in entries for n in entry)], np.int64)
            whole = np.concatenate([head.view(np.uint8), *data]) if entries else np.empty(0, np.uint8)
            data.clear()
            found.append(torch.from_numpy(whole))
        return found


def _unpack(message: torch.Tensor, buffer: bytearray) -> None:
    data = message.numpy()
    if not data.size:
        return
    target = np.frombuffer(buffer, np.uint8)
    count = int(data[:8].copy().view(np.int64)[0])
    entries = data[8 : 8 + 32 * count].copy().view(np.int64).reshape(count, 4)
    at = 8 + 32 * count
    for begin, length, step, rows in entries.tolist():
        packed = data[at : at + length * rows].reshape(rows, length)
        _rows(target[begin:], length, step, rows)[...] = packed
        at += length * rows


def _rows(data: npt.NDArray[np.uint8], length: int, step: int, rows: int) -> npt.NDArray[np.uint8]:
    """Rows of ``length`` bytes, ``step`` bytes apart, as a view; checked against the memory's end."""
    if (rows - 1) * step + length > data.size:
        raise CheckpointError("rows of a part end behind it; this is a bug in zerostart")
    return np.lib.stride_tricks.as_strided(data, (rows, length), (step if rows > 1 else length, 1))
