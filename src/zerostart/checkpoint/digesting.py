"""Digests of the tensors of checkpoint files, read once, in bounded memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from zerostart.checkpoint.catalog import DTYPE_BITS, Catalog, TensorEntry, contiguous_strides
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage import Reader
from zerostart.distributed.machine import cores

#: Bytes of one read, and most threads, of which each has a buffer of as many.
CHUNK, THREADS = 4 << 20, 8
#: Integers as wide as an element; a complex one of 16 bytes is in no file.
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def file_digests(catalog: Catalog, names: Collection[str] | None = None) -> dict[str, str]:
    """The digest of each tensor of ``catalog`` (of those in ``names``), as a live model has them.

    Raises ReadError and CheckpointNotFoundError.
    """
    entries = [entry for entry in catalog.tensors.values() if names is None or entry.name in names]
    digests = Digests((entry.name, entry.dtype, entry.shape) for entry in entries)
    own = threading.local()

    def buffer(count: int) -> memoryview:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(CHUNK)
        return memoryview(own.buffer)[:count]

    with catalog.storage.reader() as reader:

        def add(job: tuple[TensorEntry, int, int]) -> None:
            entry, start, count = job
            data = buffer(count)
            reader.read(entry.file, entry.offset + start, [data])
            digests.add(entry.name, start * 8 // DTYPE_BITS[entry.dtype], data)

        with ThreadPoolExecutor(max(1, min(THREADS, int(cores())))) as pool:
            # In batches, so that an error ends it soon, and no list of all reads is made.
            jobs = (job for entry in entries if not _is_strided(entry) for job in _reads(entry))
            while batch := list(itertools.islice(jobs, 64)):
                list(pool.map(add, batch))
        for entry in entries:
            if _is_strided(entry):
                _add_strided(digests, reader, entry)
    return digests.summed()


def _reads(entry: TensorEntry) -> Iterator[tuple[TensorEntry, int, int]]:
    for start in range(0, entry.nbytes, CHUNK):
        yield entry, start, min(CHUNK, entry.nbytes - start)


def _is_strided(entry: TensorEntry) -> bool:
    return entry.strides is not None and not contiguous_strides(entry.shape, entry.strides)


def _add_strided(digests: Digests, reader: Reader, entry: TensorEntry) -> None:
    """Add a tensor that a torch file has transposed, sliced or expanded, in the order of the file."""
    assert entry.strides is not None, "it is strided"
    bits = DTYPE_BITS[entry.dtype]
    width = bits // 8
    logical = [prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
    order = sorted(range(len(entry.shape)), key=lambda dim: -entry.strides[dim])  # type: ignore[index]
    *outer, last = order
    stride, step, size = entry.strides[last], logical[last], entry.shape[last]
    together = max(1, CHUNK // (width * max(stride, 1)))
    for index in itertools.product(*(range(entry.shape[dim]) for dim in outer)):
        place = sum(i * entry.strides[dim] for i, dim in zip(index, outer, strict=True))
        first = sum(i * logical[dim] for i, dim in zip(index, outer, strict=True))
        for begin in range(0, size, together):
            count = min(together, size - begin)
            data = bytearray(((count - 1) * stride + 1) * width)
            reader.read(entry.file, entry.offset + (place + begin * stride) * width, [memoryview(data)])
            elements = torch.frombuffer(data, dtype=_WORDS[bits])
            row = elements[::stride] if stride else elements.expand(count)
            digests.add_rows(entry.name, first + begin * step, step, row.reshape(count, 1))
