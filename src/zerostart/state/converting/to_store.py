"""A conversion to a store: what is read is uploaded, and has its names when all is there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage.uploads import Uploads, part_bytes
from zerostart.checkpoint.write.images import Image
from zerostart.checkpoint.write.new_objects import NewObjects, cleared
from zerostart.checkpoint.write.notes import store_errors
from zerostart.checkpoint.write.objects import part_length
from zerostart.checkpoint.write.parts import PartUploader, Receipts, Uploading
from zerostart.distributed.world import World
from zerostart.state.converting.beside import copy_beside
from zerostart.state.converting.contents import Contents
from zerostart.state.converting.targets import Asked, Target
from zerostart.state.converting.units import Checksums, Filler, Span, bytes_of, put_literals, spans_of
from zerostart.state.saving.output import DEPTH, Objects
from zerostart.state.saving.writing import publishing
from zerostart.transfer.uploading import check_disk, uploaded

#: What is uploaded by, as the save that has begun has it, and the files.
Begun = tuple[Uploads, list[Uploading]]


class ToStore:
    """Converts to ``url``, the directory ``uploads`` of a store, where all appears or nothing; collective.

    Each rank reads and uploads some of the files from their beginning to their end. A conversion that was
    killed begins anew.
    """

    def __init__(self, url: str, uploads: Uploads, asked: Asked, world: World) -> None:
        self._url, self._uploads, self._asked, self._world = url, uploads, asked, world

    def write(self) -> tuple[Target, dict[str, str], int]:
        """What is written, the names that files get by those in the target, and no bytes that were there.

        Raises ConfigError, ReadError and WriteError.
        """
        contents, target = self._world.broadcast_slow(self._begin, "looking at what is converted")
        names = {image.name: image.name for image in target.images}
        if target.layout is None:
            self._upload_new(contents, target)
            return target, names, 0
        digests = Digests(target.entries)
        with publishing(self._url, self._world) as publication:
            place = publication.place
            assert isinstance(place, Objects), "what is published at a URL is objects"
            layout = target.layout

            def begin() -> Begun:
                assert place.staging is not None, "the first rank has it"
                copy_beside(self._asked.beside(contents, target), publication.directory)
                return place.staging.uploads, place.staging.begin_files(".", layout)

            def end() -> None:
                assert place.staging is not None, "the first rank has it"
                place.staging.end_files(".", layout, receipts)

            begun = self._world.broadcast_object(begin, "beginning to upload")
            receipts = self._upload(contents, target, begun, part_length(layout), digests)
            self._world.broadcast_object(end, "completing the files")
            publication.add_digests(digests.summed(self._world))
        return target, names | publication.names, 0

    def _begin(self) -> tuple[Contents, Target]:
        contents = self._asked.contents()
        # Names that a killed conversion has given are free again.
        there = cleared(self._uploads)
        with tempfile.TemporaryDirectory(prefix="zerostart-") as scratch:
            target = self._asked.target(contents, Path(scratch))

        def taken(name: str) -> Callable[[], bytes] | None:
            return (lambda: (self._uploads.read(name) or (b"",))[0]) if name in there else None

        self._asked.check_free(contents, target, self._uploads.url, taken)
        if target.layout is None:
            # Before the last one, by which readers go.
            target.images[-1:-1] = [
                Image(name, len(data), ((0, data),))
                for name, item in self._asked.beside(contents, target)
                for data in [item if isinstance(item, bytes) else item.read_bytes()]
                if name not in there
            ]
        return contents, target

    def _upload_new(self, contents: Contents, target: Target) -> None:
        *images, last = target.images
        part = part_bytes(max((image.size for image in images), default=0))
        sizes = {image.name: image.size for image in images}
        new: NewObjects | None = None

        def begin() -> Begun:
            nonlocal new
            new = NewObjects(self._uploads)
            return new.uploads, new.begin(sizes, part)

        def end() -> None:
            assert new is not None, "the first rank has it"
            new.complete(receipts, last.name, b"".join(data for _, data in last.literals))

        try:
            begun = self._world.broadcast_object(begin, "beginning to upload")
            receipts = self._upload(contents, target, begun, part, Digests(()))
            self._world.broadcast_object(end, "completing the files")
        finally:
            if new is not None:
                new.discard()

    def _upload(
        self,
        contents: Contents,
        target: Target,
        begun: Begun,
        part: int,
        digests: Digests,
    ) -> Receipts:
        """Upload this rank's files, and give the receipts of all ranks."""
        world = self._world
        uploads, files = begun
        filler = Filler(target, contents.catalogs, digests, 1)
        with world.phase("uploading the files"), store_errors(uploads.url):
            own = range(world.rank, len(files), world.size)
            if uploads.staged:
                check_disk(sum(target.images[n].size for n in own if files[n].upload), uploads, world)
            uploader = PartUploader(uploads, files, part, DEPTH)
            try:
                for number in own:
                    self._upload_one(number, target.images[number], filler, uploader, part)
                receipts = uploaded(uploader, uploads, world)
            finally:
                uploader.abandon()
        every = world.all_gather_object(receipts, "telling what was uploaded")
        return {place: one for told in every for place, one in told.items()}

    def _upload_one(
        self, number: int, image: Image, filler: Filler, uploader: PartUploader, part: int
    ) -> None:
        checksums = Checksums(filler.target, image)
        for turn, span in enumerate(spans_of(number, image, part)):
            buffer = uploader.buffer()
            data = torch.frombuffer(buffer, dtype=torch.uint8)[: span.end - span.begin]
            _fill(span, data, image, filler, checksums)
            uploader.put(number, turn, buffer, span.end - span.begin)
        if not image.size:
            uploader.put(number, 0, uploader.buffer(), 0)
        uploader.end(number)


def _fill(span: Span, data: torch.Tensor, image: Image, filler: Filler, checksums: Checksums) -> None:
    """Put all bytes of a span into ``data``, those of checksums included whose bytes have been there."""
    at = span.begin
    for part in sorted(span.parts, key=lambda one: one.offset):
        data[at - span.begin : part.offset - span.begin] = 0
        at = part.offset + part.nbytes
    data[at - span.begin :] = 0
    put_literals(image.literals, span.begin, span.end, data)
    filler.fill([span], [data])
    sums = [filler.sums(part, bytes_of(part, span, data)) for part in span.parts]
    filler.add(span.parts, sums)
    checksums.add(span.parts, sums)
    put_literals(checksums.literals(span.begin, span.end), span.begin, span.end, data)
