"""Executing a plan: storage, reads by a small thread pool, staging where a read cannot land in place."""

from zerostart.transfer.execute import bytes_view, execute, reader_threads
from zerostart.transfer.memory import Arena, PeakMeter
from zerostart.transfer.progress import Progress
from zerostart.transfer.reader import FileReader, MemoryReader, Reader
from zerostart.transfer.rows import Rows

__all__ = [
    "Arena",
    "FileReader",
    "MemoryReader",
    "PeakMeter",
    "Progress",
    "Reader",
    "Rows",
    "bytes_view",
    "execute",
    "reader_threads",
]
