"""Executing a plan: storage, reads by a small thread pool, staging where a read cannot land in place."""

from zerostart.transfer.execute import execute, reader_threads
from zerostart.transfer.memory import Arena, PeakMeter
from zerostart.transfer.progress import Progress
from zerostart.transfer.reader import FileReader

__all__ = ["Arena", "FileReader", "PeakMeter", "Progress", "execute", "reader_threads"]
