"""Executing a plan: storage, reads by a small thread pool, staging where a read cannot land in place."""

from zerostart.checkpoint.memory import MemoryReader
from zerostart.checkpoint.storage import Reader, Rows
from zerostart.checkpoint.storage.reader import FileReader
from zerostart.transfer.execute import execute
from zerostart.transfer.memory import Arena, PeakMeter
from zerostart.transfer.page_locked import page_locked
from zerostart.transfer.progress import Progress
from zerostart.transfer.staging import bytes_view
from zerostart.transfer.tuning import MIN_CHUNK, Tuning, tune

__all__ = [
    "MIN_CHUNK",
    "Arena",
    "FileReader",
    "MemoryReader",
    "PeakMeter",
    "Progress",
    "Reader",
    "Rows",
    "Tuning",
    "bytes_view",
    "execute",
    "page_locked",
    "tune",
]
