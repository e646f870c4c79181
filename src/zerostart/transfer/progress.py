"""Progress of a load, for a person: bytes, rate and time left, where a terminal is attached."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """Counts bytes; draws a bar if ``shown`` and standard error is a terminal."""

    def __init__(self, total: int, shown: bool) -> None:
        self.done = 0
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        if shown and sys.stderr.isatty():
            self._bar = _drawn()
            self._task = self._bar.add_task("Reading the shard of rank 0", total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """Note that ``nbytes`` more have been read; called by the reading threads."""
        with self._lock:
            self.done += nbytes
        if self._bar is not None:
            self._bar.advance(self._task, nbytes)


def _drawn() -> Bar:
    # Imported here: most ranks of most loads draw nothing, and the import takes as long as their planning.
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
