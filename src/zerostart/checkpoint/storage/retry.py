"""Positioned reads that outlast a passing fault of the storage."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

#: Errors that a later attempt may not meet: an interrupted or busy call, a device or server that stumbled.
PASSING = frozenset(
    {errno.EINTR, errno.EAGAIN, errno.EIO, errno.EBUSY, errno.ETIMEDOUT, errno.ENOBUFS, errno.EREMOTEIO}
)
#: Seconds to wait before each further attempt.
DELAYS = (0.05, 0.1, 0.2, 0.4)


def patient(call: Callable[[], T], missed: Callable[[], None]) -> T:
    """What ``call`` gives, tried again after each of `DELAYS` while it fails with one of `PASSING`.

    ``missed`` is called before each further attempt. The last attempt's OSError is raised.
    """
    for delay in DELAYS:
        try:
            return call()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        missed()
        time.sleep(delay)
    return call()


def read_some(
    descriptor: int, buffers: Sequence[memoryview], offset: int, size: int, missed: Callable[[], None]
) -> int:
    """One ``preadv``, tried again on passing faults; bytes read, 0 at the end of the file.

    A file system over a network may tell of an end where there is none while its server comes back: an end
    before ``size`` bytes is believed only if the file has that length, or when it stays.
    """
    for delay in DELAYS:
        count = patient(lambda: os.preadv(descriptor, buffers, offset), missed)
        if count or offset >= size or os.fstat(descriptor).st_size != size:
            return count
        missed()
        time.sleep(delay)
    return os.preadv(descriptor, buffers, offset)
