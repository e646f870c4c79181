"""A copy of a part of an image that this process keeps: a file without a name, in memory or on a disk."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile

import numpy as np
import torch

from zerostart.errors import WriteError
from zerostart.transfer.planning.runs import Runs

#: Where the file is made; ``/dev/shm`` if it is not set.
FOLDER_VARIABLE = "ZEROSTART_REFIT_SPOOL"


class Spool:
    """Room for ``runs`` of an image of ``nbytes``, each byte where it is in the image.

    It goes with this process, however that ends. Raises WriteError where there is no room.
    """

    def __init__(self, nbytes: int, runs: Runs, purpose: str) -> None:
        """``purpose`` says in messages what the room is for."""
        folder = os.environ.get(FOLDER_VARIABLE) or "/dev/shm"
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.ftruncate(file.fileno(), nbytes)
                # Its own pages alone, and at once: one that is missing later would end the process.
                for begin, end in _pages(runs, nbytes):
                    os.posix_fallocate(file.fileno(), begin, end - begin)
                self._memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise WriteError(
                f"{folder}: {runs.nbytes} bytes for {purpose} cannot be had there ({error.strerror}); name "
                f"another directory in {FOLDER_VARIABLE}"
            ) from error
        #: All bytes of the image, of which those of ``runs`` may be touched.
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.runs = runs

    def is_for(self, nbytes: int, runs: Runs) -> bool:
        """Whether it is the same room as that."""
        return self.data.numel() == nbytes and np.array_equal(self.runs.rows, runs.rows)

    def close(self) -> None:
        """Give it back."""
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(BufferError):  # somebody still reads: it goes with the last reference
            self._memory.close()


def _pages(runs: Runs, nbytes: int) -> list[tuple[int, int]]:
    """Begin and end of the pages with any of the bytes, in a file of ``nbytes``; those that touch are one."""
    low = runs.spans[:, 0] // mmap.PAGESIZE * mmap.PAGESIZE
    high = -(-runs.spans[:, 1] // mmap.PAGESIZE) * mmap.PAGESIZE
    rows = np.stack([low, high - low, np.zeros_like(low), np.ones_like(low)], 1)
    return [(begin, min(end, nbytes)) for begin, end in Runs.of(rows).spans.tolist()]
