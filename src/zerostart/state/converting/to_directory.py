"""A conversion to a directory: its files are written by all ranks, and get their names when all is there."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from zerostart.checkpoint.digest import DEFINITION, Digests
from zerostart.checkpoint.storage.direct import PAGE
from zerostart.checkpoint.write.images import Image
from zerostart.checkpoint.write.space import check_space
from zerostart.checkpoint.write.staging import write_errors
from zerostart.checkpoint.write.switching import clear_killed
from zerostart.distributed.machine import cores, local_ranks
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.state.converting.beside import copy_beside
from zerostart.state.converting.contents import Contents
from zerostart.state.converting.targets import Asked, Target
from zerostart.state.converting.units import (
    Checksums,
    Filler,
    Part,
    Span,
    Sums,
    bytes_of,
    put_literals,
    spans_of,
)
from zerostart.state.converting.work import Journal, Work, opened, read_back, write_at, written
from zerostart.state.saving.writing import publishing
from zerostart.transfer.execute import Crew

#: Bytes of a unit, which one thread reads, sums up and writes.
UNIT = 8 << 20
#: Threads of a process: they wait for the disk in turn, and more than these have no cores to copy with.
THREADS = 4
#: Bytes at the beginning of a part that tell nearly always whether it is zero.
_TELLING = 64
#: Some spans, of several files where these are small.
Unit = tuple[Span, ...]
_GOES_ON = "what was written stays: convert again, with the same arguments, to go on from there"


class ToDirectory:
    """Converts to the directory ``root``, which appears whole or not at all; collective."""

    def __init__(self, root: Path, asked: Asked, world: World) -> None:
        self._root, self._asked, self._world = root, asked, world
        #: Of the first rank.
        self._work: Work | None = None

    def write(self) -> tuple[Target, dict[str, str], int]:
        """What is written, the names that files get by those in the target, and bytes that were there.

        Raises ConfigError, ReadError and WriteError.
        """
        world = self._world
        try:
            contents, target, plan, done = world.broadcast_slow(self._begin, "looking at what is converted")
            units = list(units_of(target.images))
            digests = Digests(target.entries)
            kept = self._move(target, contents, plan, units, done, digests)
            names = self._name(target, contents, digests)
            if self._work is not None:
                with write_errors(self._root, "all is there"):
                    self._work.remove()
        finally:
            if self._work is not None:
                self._work.close()
        every = world.all_gather_object(kept, "what was kept")
        nbytes = sum(part.nbytes for of in every for number in of for part in _parts(units[number]))
        return target, names, nbytes

    def _begin(self) -> tuple[Contents, Target, str, dict[int, list[Sums]]]:
        """On the first rank: look at the source, make the files, and see which units are done.

        With what tells the conversion from others.
        """
        root, asked = self._root, self._asked
        contents = asked.contents()
        with write_errors(root, "nothing was converted"):
            if root.exists() and not root.is_dir():
                raise ConfigError(f"{root} is a file; name a directory")
            self._work = work = Work.led(root)
            try:
                target = asked.target(contents, work.place)
                work.plan = _digest(contents, target)
                asked.check_free(contents, target, str(root), functools.partial(self._taken, target))
                left = sum(image.size for image in target.images) - work.allocated()
                check_space(root, left, "what is converted")
                # What a killed one was giving its names has them all after this, or none.
                clear_killed(root)
                return contents, target, work.plan, work.begin(target.images)
            except BaseException:
                work.discard_empty()
                work.close()
                raise

    def _taken(self, target: Target, name: str) -> Callable[[], bytes] | None:
        path, work = self._root / name, self._work
        if not os.path.lexists(path):
            return None
        own = any(image.name == name for image in target.images)
        return None if own and work is not None and work.has_given(name) else path.read_bytes

    def _move(
        self,
        target: Target,
        contents: Contents,
        plan: str,
        units: Sequence[Unit],
        done: Mapping[int, list[Sums]],
        digests: Digests,
    ) -> list[int]:
        """Write all units, and the checksums of archives; gives those of this rank that were there."""
        world, work = self._world, self._work or Work(self._root, plan)
        filler = Filler(target, contents.catalogs, digests, _threads())
        mover = _Mover(filler, work, units)
        with world.phase("writing the files"), write_errors(self._root, _GOES_ON):
            mine = range(world.rank, len(units), world.size)
            kept = mover.checked({n: done[n] for n in mine if n in done})
            made = mover.moved([n for n in mine if n not in kept], done.keys())
            for number in mine:
                filler.add(_parts(units[number]), made[number])
        every = world.all_gather_object(made if target.checked else {}, "what was written")
        with world.phase("completing the files"), write_errors(self._root, _GOES_ON):
            if self._work is not None:
                sums = {number: of for part in every for number, of in part.items()}
                _write_checksums(target, work, units, sums)
        return sorted(kept)

    def _name(self, target: Target, contents: Contents, digests: Digests) -> dict[str, str]:
        """Give the files their names, in which readers find all or nothing."""
        world, work = self._world, self._work
        names = {image.name: image.name for image in target.images}
        if target.layout is not None:
            ended = world.broadcast_object(
                lambda: work is not None and work.is_published(target.images), "looking for what is converted"
            )
            if ended:  # by one that was killed over what it had to remove
                return names
            with publishing(self._root, world) as publication:
                if work is not None:
                    copy_beside(self._asked.beside(contents, target), publication.directory)
                    work.link_into(publication.directory, target.images)
                publication.add_digests(digests.summed(world))
            return names | publication.names
        with world.phase("giving the files their names"), write_errors(self._root, _GOES_ON):
            if work is not None:
                made = copy_beside(self._asked.beside(contents, target), work.files, self._root)
                beside = [Image(name, (work.files / name).stat().st_size) for name in made]
                work.publish([*beside, *target.images])
        return names


def _digest(contents: Contents, target: Target) -> str:
    """What tells one conversion from another: the files that are read, and what is written."""
    # A journal of other units, or of sums of another definition, says nothing here.
    found = hashlib.blake2b(repr((UNIT, DEFINITION)).encode(), digest_size=16)
    for catalog in contents.catalogs:
        storage = catalog.storage
        states = [storage.identity(number) for number in range(len(storage.files))]
        found.update(repr((storage.files, storage.sizes, states)).encode())
    for stored in target.sources:
        found.update(repr(stored).encode())
    for image in target.images:
        found.update(repr((image.name, image.size, image.rows, image.literals)).encode())
    return found.hexdigest()


def units_of(images: Sequence[Image]) -> Iterator[Unit]:
    """What is read into all files, in their order, in units of ``UNIT`` bytes at most."""
    unit: list[Span] = []
    room = UNIT
    for number, image in enumerate(images):
        for span in spans_of(number, image, UNIT):
            if not span.parts:
                continue
            if unit and _room(span) > room:
                yield tuple(unit)
                unit, room = [], UNIT
            unit.append(span)
            room -= _room(span)
    if unit:
        yield tuple(unit)


def _room(span: Span) -> int:
    return -(-(span.end - span.begin) // PAGE) * PAGE


class _Mover:
    """Does units of work of a conversion, several at once."""

    def __init__(self, filler: Filler, work: Work, units: Sequence[Unit]) -> None:
        self._filler, self._work, self._units = filler, work, units
        self._images = filler.target.images
        self._sums: dict[int, list[Sums]] = {}
        self._damaged: Collection[int] = ()

    def checked(self, known: Mapping[int, list[Sums]]) -> dict[int, list[Sums]]:
        """Those of the units that are in the files with the sums that a journal has. Raises OSError."""

        def work(numbers: Iterator[int]) -> None:
            room = _Room()
            for number in numbers:
                if self._is_there(number, room, known[number]):
                    self._sums[number] = known[number]

        Crew(known, work, None, "zerostart-converting").run(_threads())
        return dict(self._sums)

    def moved(self, numbers: Iterable[int], damaged: Collection[int] = ()) -> dict[int, list[Sums]]:
        """Do units, by their numbers; gives the sums of all. Raises ReadError and OSError.

        What is zero stays a hole of its file, but for units that are ``damaged``, whose files may have other
        bytes.
        """
        self._damaged = damaged
        journal = Journal(self._work.place)
        try:

            def work(taken: Iterator[int]) -> None:
                room = _Room()
                for number in taken:
                    self._sums[number] = self._move(number, room, journal)

            Crew(numbers, work, None, "zerostart-converting").run(_threads())
        finally:
            journal.close()
        return self._sums

    def _move(self, number: int, room: _Room, journal: Journal) -> list[Sums]:
        unit = self._units[number]
        rooms = room.of(unit)
        self._filler.fill(unit, rooms)
        for span, data in zip(unit, rooms, strict=True):
            image = self._images[span.image]
            for begin, end in self._runs(span, data, number in self._damaged):
                piece = data[begin - span.begin : end - span.begin]
                put_literals(image.literals, begin, end, piece)
                written(self._work.files / image.name, begin, piece.numpy().data)
        sums = self._sums_of(unit, rooms)
        # After the bytes: a journal says nothing that is not in the files.
        journal.note(number, sums)
        return sums

    def _runs(self, span: Span, data: torch.Tensor, damaged: bool) -> Iterator[tuple[int, int]]:
        """Where in the file bytes are written: from parts that are not zero to the last that follows them."""
        begin = end = -1
        for part in span.parts:
            if not damaged and _is_zero(bytes_of(part, span, data)):
                if begin >= 0:
                    yield begin, end
                begin = -1
                continue
            if begin < 0:
                begin = part.offset
            else:
                data[end - span.begin : part.offset - span.begin] = 0  # what an earlier unit has left there
            end = part.offset + part.nbytes
        if begin >= 0:
            yield begin, end

    def _sums_of(self, unit: Unit, rooms: Sequence[torch.Tensor]) -> list[Sums]:
        return [
            self._filler.sums(part, bytes_of(part, span, data))
            for span, data in zip(unit, rooms, strict=True)
            for part in span.parts
        ]

    def _is_there(self, number: int, room: _Room, sums: Sequence[Sums]) -> bool:
        unit = self._units[number]
        rooms = room.of(unit)
        for span, data in zip(unit, rooms, strict=True):
            name = self._images[span.image].name
            path = self._work.files / name
            if not path.exists():  # it has its name already
                path = self._work.root / name
            if not read_back(path, span.begin, data.numpy().data):
                return False
        return self._sums_of(unit, rooms) == sums


def _parts(unit: Unit) -> Iterator[Part]:
    return (part for span in unit for part in span.parts)


def _threads() -> int:
    return max(2, min(THREADS, 2 * int(cores()) // local_ranks()))


def _is_zero(data: torch.Tensor) -> bool:
    """Whether all bytes are zero, which the first ones tell nearly always."""
    return not data[:_TELLING].any() and not data.any()


class _Room:
    """The memory of one thread for a unit at a time, in pages as files have them."""

    def __init__(self) -> None:
        # A mapping of its own, which is given back whole: what threads free in turn the allocator keeps.
        self._data = torch.frombuffer(
            mmap.mmap(-1, UNIT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
        )

    def of(self, unit: Unit) -> list[torch.Tensor]:
        """Room for the bytes of each span, which lie in pages as they do in the file."""
        found, at = [], 0
        for span in unit:
            found.append(self._data[at : at + span.end - span.begin])
            at += _room(span)
        return found


def _write_checksums(
    target: Target, work: Work, units: Sequence[Unit], sums: Mapping[int, Sequence[Sums]]
) -> None:
    """Write the CRC-32 of each storage of the archives that have not got their names yet."""
    found = {n: Checksums(target, image) for n, image in enumerate(target.images) if image.checked}
    for number, of in sums.items():
        images = [span.image for span in units[number] for _ in span.parts]
        for image, part, one in zip(images, _parts(units[number]), of, strict=True):
            if image in found:
                found[image].add([part], [one])
    for number, checksums in found.items():
        if (path := work.files / target.images[number].name).exists():
            with opened(path, os.O_WRONLY) as handle:
                for place, value in checksums.literals():
                    write_at(handle, memoryview(value), place)
