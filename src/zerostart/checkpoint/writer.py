"""Writing a safetensors checkpoint tensor by tensor, or slice by slice, from one process or many.

Files are made at full size under a temporary name, bytes are written at their final offsets in any
order, and the files take their names at the end: a directory never holds something that looks like a
whole checkpoint and is not.
"""

from __future__ import annotations

import json
import os
import re
import threading
import uuid
from pathlib import Path
from types import TracebackType

from zerostart.checkpoint.durable import begin_writeback, sync_directory, write_whole
from zerostart.checkpoint.shards import SaveLayout
from zerostart.errors import CheckpointError, WriteError

__all__ = ["CheckpointWriter"]

#: Bytes of a file after which the disk begins with them, while what follows is written to memory.
AHEAD = 16 << 20


class CheckpointWriter:
    """Writes the files of ``layout`` into ``directory``, which is made if need be.

    One process::

        with CheckpointWriter(directory, layout) as writer:
            for name, tensor in ...:
                writer.write(name, memoryview)

    Leaving the block commits, an exception in it removes the temporary files. Many processes: all pass
    one ``token``; one calls :meth:`create`, then (barrier) each calls :meth:`write` for its bytes and
    :meth:`close`, then (barrier) the first calls :meth:`commit`, or :meth:`discard` after an error.

    ``durable`` waits for the disk before the files take their names, so that not even a power cut can
    leave a file whose name says more than its content. All methods raise WriteError, naming the file.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layout: SaveLayout,
        token: str | None = None,
        durable: bool = True,
    ) -> None:
        self.directory = Path(directory)
        self.layout = layout
        self.written = 0
        self._token = uuid.uuid4().hex[:12] if token is None else token
        self._durable = durable
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        #: For each file where what was written lately begins and ends, and how much it is.
        self._lately: dict[int, tuple[int, int, int]] = {}

    def __enter__(self) -> CheckpointWriter:
        self.create()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.commit()
        except BaseException:
            self.discard()
            raise

    def create(self) -> None:
        """Make all files under their temporary names: full size, header written, the rest holes.

        Raises WriteError where they cannot be made.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"{self.directory}: cannot be made a directory: {error.strerror}") from error
        try:
            for position, file in enumerate(self.layout.files):
                handle = self._open(position, os.O_CREAT | os.O_EXCL)
                self._truncate(handle, position, file.size)
                self._pwrite(handle, memoryview(file.header), 0, position)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Write ``data`` (contiguous) at byte ``offset`` of tensor ``name``; safe from several threads.

        Raises CheckpointError if the layout has no such tensor, or if the bytes do not fit into it, and
        WriteError where writing fails.
        """
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self.write_rows(name, view, offset, view.nbytes, 1, 1)

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """Write ``rows`` of ``length`` bytes, ``step`` bytes apart in ``data`` and in tensor ``name``.

        The first goes to byte ``offset``; what lies between them is left alone. Raises as :meth:`write` does.
        """
        entry = self.layout.tensors.get(name)
        span = (rows - 1) * step + length
        if entry is None or offset < 0 or offset + span > entry.nbytes:
            size = "is not in the layout" if entry is None else f"has {entry.nbytes} bytes"
            raise CheckpointError(
                f"cannot write {span} bytes at offset {offset} of tensor {name!r}: it {size}"
            )
        handle = self._handles.get(entry.file)
        if handle is None:
            handle = self._open(entry.file, 0)
        place = entry.offset + offset
        for row in range(rows):
            begin = row * step
            self._pwrite(handle, data[begin : begin + length], place + begin, entry.file)
        self._follow(handle, entry.file, place, span, rows * length)

    def close(self) -> None:
        """Close the files that this process has open, after bringing their bytes to disk if durable.

        Raises WriteError where that fails.
        """
        while self._handles:
            position, handle = self._handles.popitem()
            try:
                if self._durable:
                    os.fsync(handle)
            except OSError as error:
                raise self._failure(position, error) from error
            finally:
                os.close(handle)

    def commit(self) -> None:
        """Give the files their names, and remove what an earlier save left under the same stem.

        While several files take their names the directory holds no index and no single file, so that
        a crash in between cannot leave a mixture of two checkpoints that looks whole. Raises WriteError.
        """
        self.close()
        index = self.directory / self.layout.index_name
        try:
            if self.layout.index is not None:
                index.unlink(missing_ok=True)
                (self.directory / f"{self.layout.stem}.safetensors").unlink(missing_ok=True)
            for position, file in enumerate(self.layout.files):
                self._temporary(position).rename(self.directory / file.name)
            self._sync_directory()
            if self.layout.index is not None:
                self._write_index(index)
            else:
                index.unlink(missing_ok=True)
            self._remove_stale()
            self._sync_directory()
        except OSError as error:
            raise WriteError(f"{self.directory}: saving could not be completed: {error}") from error

    def discard(self) -> None:
        """Close and remove the temporary files; what was there before this save stays."""
        self._durable = False
        self.close()
        for position in range(len(self.layout.files)):
            self._temporary(position).unlink(missing_ok=True)

    def _temporary(self, position: int) -> Path:
        return self.directory / f".{self.layout.files[position].name}.{self._token}.part"

    def _failure(self, position: int, error: OSError) -> WriteError:
        file = self.directory / self.layout.files[position].name
        return WriteError(
            f"{file}: writing failed: {error.strerror}; nothing was saved, free space and save again"
        )

    def _open(self, position: int, flags: int) -> int:
        try:
            handle = os.open(self._temporary(position), os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
        except OSError as error:
            raise self._failure(position, error) from error
        # Two threads may open the same file at once; the first one's handle stays.
        kept = self._handles.setdefault(position, handle)
        if kept != handle:
            os.close(handle)
        return kept

    def _truncate(self, handle: int, position: int, size: int) -> None:
        try:
            os.ftruncate(handle, size)
        except OSError as error:
            raise self._failure(position, error) from error

    def _pwrite(self, handle: int, view: memoryview, offset: int, position: int) -> None:
        try:
            while (done := os.pwrite(handle, view, offset)) < view.nbytes:
                # One call writes 2 GiB at most, and less on some file systems.
                view, offset = view[done:], offset + done
        except OSError as error:
            raise self._failure(position, error) from error

    def _follow(self, handle: int, position: int, offset: int, span: int, count: int) -> None:
        """Note that ``count`` bytes within a ``span`` were written, and let the disk follow now and then."""
        with self._lock:
            self.written += count
            low, high, size = self._lately.pop(position, (offset, offset, 0))
            low, high, size = min(low, offset), max(high, offset + span), size + count
            if size < AHEAD:
                self._lately[position] = low, high, size
                return
        if self._durable:
            begin_writeback(handle, low, high)

    def _write_index(self, index: Path) -> None:
        text = json.dumps(self.layout.index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        part = index.with_name(f".{index.name}.{self._token}.part")
        write_whole(index, text.encode(), part, self._durable)

    def _remove_stale(self) -> None:
        """Shards of an earlier save of another size: nothing lists them any more."""
        shard = re.compile(re.escape(self.layout.stem) + r"-\d{5}-of-\d{5}\.safetensors")
        names = {file.name for file in self.layout.files}
        for path in self.directory.iterdir():
            if shard.fullmatch(path.name) and path.name not in names:
                path.unlink()

    def _sync_directory(self) -> None:
        if self._durable:
            sync_directory(self.directory)
