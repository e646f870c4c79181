"""Files that are uploaded part by part, several at once, out of a few buffers."""

from __future__ import annotations

import functools
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import BinaryIO

from zerostart.checkpoint.storage.obstore_uploads import Pieces
from zerostart.checkpoint.storage.uploads import Uploads
from zerostart.checkpoint.write.workers import Workers
from zerostart.errors import WriteError

#: By number of the file and of its part what the store has answered.
Receipts = dict[tuple[int, int], str]


@dataclass(frozen=True)
class Uploading:
    """A file of a layout that is being uploaded: its name there, and what its upload is called.

    Where a store takes no parts of several processes, ``upload`` is the mark that the object gets. One
    without is made whole, by its only part, where nothing has its name.
    """

    name: str
    upload: str


class PartUploader:
    """Uploads parts of ``files``, ``depth`` at once; one process has it, and one thread fills its buffers."""

    def __init__(self, uploads: Uploads, files: Sequence[Uploading], part: int, depth: int) -> None:
        self._uploads, self._files = uploads, files
        self._room = [part] * depth
        self._free: queue.Queue[bytearray] = queue.Queue()
        self._pool = Workers(depth, "zerostart-upload")
        self._under_way: list[Future[None]] = []
        self._part = part
        self._streams: dict[int, Pieces] = {}
        self._staged: dict[int, BinaryIO] = {}
        self._receipts: Receipts = {}
        self._failed: list[BaseException] = []
        self._over = threading.Event()

    def buffer(self) -> bytearray:
        """Room for a part, as soon as an earlier one has been uploaded; raises what an upload failed with."""
        self._check()
        if self._free.empty() and self._room:
            return bytearray(self._room.pop())  # made when it is needed: a small share needs one
        while True:
            try:
                found = self._free.get(timeout=0.5)
            except queue.Empty:
                self._check()
                continue
            self._check()
            return found

    def put(self, file: int, number: int, buffer: bytearray, length: int) -> None:
        """Upload the first ``length`` bytes of a buffer as a part of a file; the buffer is given back."""
        data = buffer if length == len(buffer) else bytes(memoryview(buffer)[:length])
        if self._uploads.shared or not self._files[file].upload:
            self._start(lambda: self._upload(file, number, data), buffer)
            return
        # In the order of the parts, which all are this process's own.
        if self._uploads.staged:
            self._stage(file, number * self._part, data)
            self._free.put(buffer)
            return
        if file not in self._streams:
            self._streams[file] = pieces = Pieces(1)
            self._start(lambda: self._stream(file, pieces))
        self._streams[file].give(bytes(data))
        self._free.put(buffer)

    def end(self, file: int) -> None:
        """Of a store that takes streams: there are no more parts of a file."""
        if file in self._streams:
            self._streams[file].give(None)

    def close(self) -> Receipts:
        """Wait until all is uploaded, and give the receipts; raises what an upload failed with.

        What is put together on a disk is uploaded now.
        """
        for file in list(self._staged):
            self._start(functools.partial(self._put_file, file))
        for future in self._under_way:
            future.result()
        self._check()
        self._pool.end()
        return self._receipts

    def abandon(self) -> None:
        """Wait for the requests under way, and make no others; may be called after ``close``."""
        self._over.set()
        for pieces in self._streams.values():
            pieces.fail(WriteError("the save was given up"))
        self._pool.end(cancel=True)
        for staged in self._staged.values():
            staged.close()

    def _check(self) -> None:
        if self._failed:
            raise self._failed[0]

    def _start(self, work: Callable[[], None], buffer: bytearray | None = None) -> None:
        def run() -> None:
            try:
                if not self._over.is_set():
                    work()
            except BaseException as error:
                self._failed.append(error)
            finally:
                if buffer is not None:
                    self._free.put(buffer)

        self._under_way = [future for future in self._under_way if not future.done()]
        self._under_way.append(self._pool.submit(run))

    def _upload(self, file: int, number: int, data: bytes | bytearray) -> None:
        of = self._files[file]
        if not of.upload:
            self._uploads.put(of.name, bytes(data), None)
            return
        self._receipts[file, number] = self._uploads.part(of.name, of.upload, number, data)

    def _stage(self, file: int, offset: int, data: bytes | bytearray) -> None:
        try:
            if file not in self._staged:
                # Without a name: it goes with this process, however that ends.
                self._staged[file] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            left = memoryview(data)
            while left:
                done = os.pwrite(self._staged[file].fileno(), left, offset)
                left, offset = left[done:], offset + done
        except OSError as error:
            raise WriteError(
                f"{self._uploads.url}/{self._files[file].name}: the store takes files whole, and this one "
                f"cannot be put together in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a "
                "directory with room"
            ) from error

    def _put_file(self, file: int) -> None:
        self._uploads.put_file(self._files[file].name, self._staged[file])
        self._staged.pop(file).close()  # its disk is free again

    def _stream(self, file: int, pieces: Pieces) -> None:
        try:
            of = self._files[file]
            self._uploads.stream(of.name, pieces, of.upload)
        finally:
            pieces.end()
