"""Write the files of a safetensors checkpoint from one process or many.

Files are created at full size, and bytes are written at their final offsets in any order. On a local file
system whole pages bypass the page cache, whose new pages cost more CPU time than a fast disk needs for their
bytes.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import threading
from pathlib import Path
from types import TracebackType

from zerostart.checkpoint.storage.direct import PAGE, open_direct, whole_pages
from zerostart.checkpoint.storage.page_cache import direct_suits, file_system
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.errors import CheckpointError, WriteError

#: Minimum size of a direct write in bytes: each one waits for the disk.
DIRECT = 256 << 10


class CheckpointWriter:
    """Writer of the files of ``layout``.

    All methods raise WriteError with the file. The directory is the staging folder of a save, which
    publishes or deletes the files. One process uses the writer as a context manager. Of several, the
    first calls :meth:`create`, then each :meth:`write` and :meth:`close`, then the first :meth:`commit`,
    with barriers between. ``durable`` syncs the files.
    """

    def __init__(self, directory: str | os.PathLike[str], layout: SaveLayout, durable: bool = True) -> None:
        self.directory = Path(directory)
        self.layout = layout
        self._durable = durable
        #: Handles by file number, and whether they bypass the page cache.
        self._handles: dict[tuple[int, bool], int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> CheckpointWriter:
        self.create()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def create(self) -> None:
        """Make all files at full size, and write their headers."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(
                f"{self.directory}: the directory cannot be created: {error.strerror}"
            ) from error
        for position, file in enumerate(self.layout.files):
            # Full size at once: ranks write their parts in any order, and a full disk is found early.
            handle = self._open(position, os.O_CREAT | os.O_TRUNC)
            try:
                os.ftruncate(handle, file.size)
            except OSError as error:
                raise self._failure(position, error) from error
            self._pwrite(memoryview(file.header), 0, position)

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Write contiguous ``data`` into a tensor; thread-safe.

        Raises CheckpointError if the layout has no such tensor, or if the bytes do not fit into it.
        """
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self.write_rows(name, view, offset, view.nbytes, 1, 1)

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """Write ``rows`` of ``length`` bytes, ``step`` bytes apart.

        The first goes to byte ``offset``; bytes between rows are unchanged. Raises as :meth:`write`
        does.
        """
        entry = self.layout.tensors.get(name)
        span = (rows - 1) * step + length
        if entry is None or offset < 0 or offset + span > entry.nbytes:
            size = "is not in the layout" if entry is None else f"has {entry.nbytes} bytes"
            raise CheckpointError(
                f"cannot write {span} bytes at offset {offset} of tensor {name!r}: it {size}; this is a "
                "bug in zerostart"
            )
        for begin in (row * step for row in range(rows)):
            self._write_pages(data[begin : begin + length], entry.offset + offset + begin, entry.file)

    def goes_round(self, nbytes: int) -> bool:
        """Return True if the write bypasses the page cache.

        The memory must have the offset of :meth:`lead`.
        """
        return self._direct and nbytes >= DIRECT

    def lead(self, name: str, offset: int) -> int:
        """Return the memory page offset for direct writes."""
        return (self.layout.tensors[name].offset + offset) % PAGE

    def close(self) -> None:
        """Sync (if durable) and close the files of this process."""
        synced: set[int] = set()
        while self._handles:
            (position, _), handle = self._handles.popitem()
            try:
                if self._durable and position not in synced:
                    os.fsync(handle)
                    synced.add(position)
            except OSError as error:
                raise self._failure(position, error) from error
            finally:
                os.close(handle)

    def commit(self) -> None:
        """Close the files, and write their index."""
        self.close()
        if self.layout.index is not None:
            text = json.dumps(self.layout.index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            try:
                (self.directory / self.layout.index_name).write_text(text, encoding="utf-8")
            except OSError as error:
                raise WriteError(f"{self.directory}: writing the index failed: {error}") from error

    def discard(self) -> None:
        """Close the files without a sync."""
        self._durable = False
        self.close()

    def _failure(self, position: int, error: OSError) -> WriteError:
        file = self.directory / self.layout.files[position].name
        return WriteError(
            f"{file}: writing failed: {error.strerror}; nothing was saved, free space and save again"
        )

    @functools.cached_property
    def _direct(self) -> bool:
        return self._durable and direct_suits(file_system(self.directory))

    def _open(self, position: int, flags: int = 0, direct: bool = False) -> int:
        handle_in_use = self._handles.get((position, direct and self._direct))
        if handle_in_use is not None:
            return handle_in_use
        path, flags = self.directory / self.layout.files[position].name, os.O_WRONLY | flags
        try:
            handle = open_direct(path, flags) if direct else os.open(path, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._failure(position, error) from error
        if handle is None:
            self._direct = False
            return self._open(position)
        # Two threads may open the same file: the first handle stays.
        handle_in_use = self._handles.setdefault((position, direct), handle)
        if handle_in_use != handle:
            os.close(handle)
        return handle_in_use

    def _write_pages(self, view: memoryview, offset: int, position: int) -> None:
        begin, end = whole_pages(view, offset) if self.goes_round(view.nbytes) else (0, 0)
        self._pwrite(view[begin:end], offset + begin, position, True)
        # The page cache joins the parts of shared pages.
        self._pwrite(view[:begin], offset, position)
        self._pwrite(view[end:], offset + end, position)

    def _pwrite(self, view: memoryview, offset: int, position: int, direct: bool = False) -> None:
        while view.nbytes:
            handle = self._open(position, direct=direct)
            try:
                # One call writes at most 2 GiB, and less on some file systems.
                count = os.pwrite(handle, view, offset)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # the device needs larger blocks
                    self._direct = direct = False
                    continue
                raise self._failure(position, error) from error
            view, offset = view[count:], offset + count
