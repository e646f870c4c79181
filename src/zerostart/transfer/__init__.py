"""Run plans: threads, staging buffers and progress."""

from zerostart.checkpoint.storage import Rows
from zerostart.checkpoint.storage.reader import FileReader
from zerostart.transfer.buffers import Arena, page_locked
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.meter import PeakMeter
from zerostart.transfer.tuning import MIN_CHUNK, Tuning, tune

__all__ = [
    "MIN_CHUNK",
    "Arena",
    "FileReader",
    "PeakMeter",
    "Progress",
    "Rows",
    "Tuning",
    "execute",
    "page_locked",
    "tune",
]
