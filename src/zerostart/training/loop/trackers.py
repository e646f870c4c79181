"""Trackers of a run: accelerate's by name, a table of our own, and pictures for those that take them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerostart.errors import ConfigError, WriteError

#: The name of our own tracker, and of the file that it writes in the output directory.
OWN, TABLE = "csv", "metrics.csv"
_COLUMNS = ("step", "key", "value")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown or not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {OWN, *(str(tracker) for tracker in get_available_trackers())}
    for name in names:
        if name not in installed:
            known = ", ".join(sorted([OWN, *LOGGER_TYPE_TO_CLASS]))
            absent = f"is not installed: pip install {name}, or leave it out"
            what = absent if name in LOGGER_TYPE_TO_CLASS else f"is unknown; known are {known}"
            raise ConfigError(f"tracking.trackers: {name} {what}")


def made_trackers(names: Sequence[str], directory: Path, writes: bool) -> list[Any]:
    """What accelerate takes as ``log_with``; ``writes``: whether this rank is the one that writes tables."""
    return [_table(directory / TABLE, writes) if name == OWN else name for name in names]


def log_images(trackers: Iterable[Any], images: Mapping[str, Any], step: int) -> list[str]:
    """Hand pictures to the trackers that take some; on one rank. Gives the names of those trackers.

    ``images`` has by name an array of bytes (uint8), [pictures, height, width, 3].
    """
    told = []
    for tracker in trackers:
        if hasattr(tracker, "log_images"):
            # TensorBoard has to be told which axis is which; the others take a list of pictures.
            if tracker.name == "tensorboard":
                tracker.log_images(dict(images), step=step, dataformats="NHWC")
            else:
                tracker.log_images({name: list(found) for name, found in images.items()}, step=step)
            told.append(str(tracker.name))
    return told


def _table(path: Path, writes: bool) -> Any:
    """A tracker that writes a row for each value; accelerate, which has its base class, is imported late."""
    from accelerate.tracking import GeneralTracker

    class TableTracker(GeneralTracker):  # type: ignore[misc]  # accelerate is not typed
        """Rows of a step, a key and a value: what is logged in one run need not have the same keys."""

        name = OWN
        requires_logging_directory = False

        def __init__(self) -> None:
            self.tracker = Table(path) if writes else None  # which the base class looks for
            super().__init__()

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            """Write a row for each value. Raises WriteError."""
            if self.tracker is not None:
                self.tracker.add(0 if step is None else step, values)

        def finish(self) -> None:
            """Nothing is open between two logs."""

    return TableTracker()


class Table:
    """The file at ``path``. A run that goes on writes anew what is there of the steps that it does again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = False

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the values of a step. Raises WriteError."""
        try:
            if not self._begun:
                self._begin(step)
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([step, *item] for item in values.items())
        except OSError as error:
            raise WriteError(f"{self._path}: the table cannot be written: {error.strerror}") from error

    def _begin(self, step: int) -> None:
        """Keep what is there of earlier steps; of a run that begins anew (step 0 or 1) there are none."""
        kept = []
        if self._path.is_file():
            with self._path.open(encoding="utf-8", newline="") as file:
                kept = [row for row in csv.reader(file) if _is_before(row, step)]
        with self._path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *kept])
        self._begun = True


def _is_before(row: Sequence[str], step: int) -> bool:
    return len(row) == len(_COLUMNS) and row[0].isdigit() and int(row[0]) < step
