"""How the run looks from outside: a live line on a terminal, plain lines elsewhere, and metrics.jsonl."""

from __future__ import annotations

import json
import logging
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from zerostart.checkpoint.strict_json import dump_json
from zerostart.errors import WriteError
from zerostart.training.loop.terminal import duration, say
from zerostart.transfer.meter import peak_bytes

logger = logging.getLogger("zerostart")
_SMOOTHING = 0.2  # weight of the newest step in the displayed rate


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has held: on its accelerator where that counts it, else on the host."""
    if peak := peak_bytes(device):
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux, see getrusage(2)


@dataclass(frozen=True)
class Metrics:
    """One optimizer step, over all ranks: mean loss, learning rate, what was seen, peak bytes of rank 0.

    ``loss`` is the mean by weight (over predicted tokens, or items), None where nothing had any;
    ``gradient_norm`` is that before clipping, None where the engine does not tell.
    """

    step: int
    loss: float | None
    gradient_norm: float | None
    learning_rate: float
    seen: int
    peak_bytes: int


def shown_loss(loss: float | None) -> str:
    """For a person; a dash where nothing was predicted, so that there is no loss."""
    return "-" if loss is None else f"{loss:.4f}"


class Display:
    """What rank 0 shows and writes down of a run of ``steps`` steps; on other ranks it is silent.

    ``path`` receives one JSON object a line: ``step, loss, gradient_norm, learning_rate, tokens, seconds``
    and ``peak_bytes`` for a step and ``step, held_out_loss`` for an evaluation; a number that is not finite
    is null. A plain line is printed every ``every`` steps. ``counted`` has the key that replaces ``tokens``
    and the unit of its rate. With ``skip_unwritable`` a step's figures that cannot be written are skipped.
    """

    def __init__(
        self,
        steps: int,
        path: Path,
        every: int,
        counted: tuple[str, str] = ("tokens", "tok/s"),
        *,
        active: bool,
        skip_unwritable: bool = False,
    ) -> None:
        self._steps = steps
        self._skips, self._told = skip_unwritable, False
        self._key, self._unit = counted
        self._before = 0
        self._path = path
        self._every = every
        self._active = active
        self._console = Console(quiet=not active, highlight=False)
        with _writing(path):
            # Opened at once, so that a directory that cannot be written to is told before the first step; for
            # appending, since what an earlier run has written may only go once this one is sure to begin.
            self._file = path.open("a") if active else None
        self._live: Progress | None = None
        self._last = time.monotonic()
        # Seconds of all steps of this run so far, and the smoothed rate in what is counted a second.
        self._stepping = self._rate = 0.0

    def __enter__(self) -> Display:
        if self._active and self._console.is_terminal:
            bar = BarColumn(bar_width=None)  # what the figures leave, which is little in 80 columns
            columns = (TextColumn("{task.completed}/{task.total}"), bar, TextColumn("{task.description}"))
            self._live = Progress(*columns, console=self._console, refresh_per_second=4, expand=True)
            self._live.add_task("", total=self._steps)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._file is not None:
            with self._noting():
                self._file.close()

    def begin(self, before: int) -> None:
        """Call before everything else of a run that resumes after ``before`` steps, 0 for a new one.

        What was written down of later steps goes: they are done again. Raises WriteError.
        """
        self._before = before
        kept: list[str] = []
        if self._file is not None:
            with _writing(self._path):
                if before:
                    lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
                    kept = [line for line in lines if _step_of(line) <= before]
                if self._path.is_file():  # a pipe or a device has nothing of an earlier run
                    # Through the file that is open: after this appending begins at its new end.
                    self._file.truncate(0)
                self._file.writelines(kept)
                self._file.flush()

    def say(self, text: str) -> None:
        """Print ``text`` (above the live line, where there is one)."""
        say(self._console, text)

    def step(self, metrics: Metrics) -> None:
        """Show one optimizer step. Raises WriteError."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._stepping += seconds
        rate = metrics.seen / max(seconds, 1e-9)
        self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)
        self._write(
            step=metrics.step,
            loss=metrics.loss,
            gradient_norm=metrics.gradient_norm,
            learning_rate=metrics.learning_rate,
            **{self._key: metrics.seen},
            seconds=round(seconds, 6),
            peak_bytes=metrics.peak_bytes,
        )
        figures = self._figures(metrics)
        if self._live is not None:
            text = _fitting(figures, self._console.width - 2 * len(str(self._steps)) - len("/ ━━━━ "))
            self._live.update(self._live.task_ids[0], completed=metrics.step, description=text)
        elif metrics.step % self._every == 0 or metrics.step in (self._before + 1, self._steps):
            self.say("  ".join([f"step {metrics.step}/{self._steps}", *figures]))

    def start(self) -> None:
        """Call before the first step, and after whatever was done between two: it is no part of either."""
        self._last = time.monotonic()

    def evaluation(self, step: int, loss: float) -> None:
        """Show the mean loss on what is held out after ``step`` steps. Raises WriteError."""
        self._write(step=step, held_out_loss=loss)
        self.say(f"held-out loss after step {step}: {loss:.4f}")

    def _figures(self, metrics: Metrics) -> list[str]:
        """The figures of a step, the most important first."""
        # By the mean of all steps, and not the smoothed rate: it is to be steady.
        left = (self._steps - metrics.step) * self._stepping / (metrics.step - self._before)
        return [
            f"loss {shown_loss(metrics.loss)}",
            f"lr {metrics.learning_rate:.1e}",
            f"{self._rate:,.{0 if self._rate >= 10 else 2}f} {self._unit}",
            f"{duration(left)} left",
            decimal(metrics.peak_bytes),
        ]

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            with _writing(self._path):
                yield
        except WriteError as error:
            if not self._skips:
                raise
            if not self._told:
                logger.warning("%s; the run goes on, and tries again", error)
            self._told = True

    def _write(self, **values: float | None) -> None:
        if self._file is not None:
            with self._noting():  # what is not written yet is tried again with the next
                self._file.write(dump_json(values) + "\n")
                self._file.flush()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: the metrics of the run cannot be written: {error.strerror}") from error


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        # Beyond every step, so that ``begin`` drops the line.
        return math.inf


def _fitting(figures: list[str], room: int) -> str:
    """As many of them as there is room for, so that none is cut."""
    while len(figures) > 1 and len("  ".join(figures)) > room:
        figures = figures[:-1]
    return "  ".join(figures)
