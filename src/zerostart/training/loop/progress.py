"""How the run looks from outside: a progress bar at a terminal, plain lines elsewhere, and metrics.jsonl."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from rich.filesize import decimal
from tqdm import tqdm

from zerostart.checkpoint.strict_json import dump_json
from zerostart.errors import WriteError, printable
from zerostart.transfer.meter import peak_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has held: on its accelerator where that counts it, else on the host."""
    if peak := peak_bytes(device):
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux, see getrusage(2)


class Display:
    """What rank 0 shows and writes down of a run of ``steps`` steps; on other ranks it is silent.

    ``path`` receives one JSON object a line: ``step, loss, gradient_norm, learning_rate, items, seconds`` and
    ``peak_bytes`` for a step and ``step, held_out_loss`` for an evaluation; a number that is not finite is
    null. A plain line is printed every ``every`` steps, and for the first and the last one.
    """

    def __init__(self, steps: int, path: Path, every: int, *, active: bool) -> None:
        self._steps = steps
        self._path = path
        self._every = every
        self._before = 0
        self._active = active
        with _writing(path):
            # Opened at once, so that a directory that cannot be written to is told before the first step; for
            # appending, since what an earlier run has written may only go once this one is sure to begin.
            self._file = path.open("a") if active else None
        self._bar: tqdm | None = None

    def __enter__(self) -> Display:
        if self._active and sys.stderr.isatty():
            self._bar = tqdm(total=self._steps, unit="step", dynamic_ncols=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            with _writing(self._path):
                self._file.close()

    def begin(self, before: int) -> None:
        """Call before everything else of a run that resumes after ``before`` steps, 0 for a new one.

        What was written down of later steps goes: they are done again. Raises WriteError.
        """
        self._before = before
        if self._bar is not None:
            self._bar.update(before)
        if self._file is None or not self._path.is_file():  # a pipe or a device has nothing of an earlier run
            return
        with _writing(self._path):
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if before else []
            # Through the file that is open: after this appending begins at its new end.
            self._file.truncate(0)
            self._file.writelines(line for line in lines if _step_of(line) <= before)
            self._file.flush()

    def say(self, text: str) -> None:
        """Print ``text`` (above the bar, where there is one)."""
        told = "\n".join(printable(line) for line in text.splitlines())
        if self._bar is not None:
            tqdm.write(told)
        elif self._active:
            print(told, flush=True)

    def step(self, step: int, figures: dict[str, float | None]) -> None:
        """Show the ``figures`` of one optimizer step. Raises WriteError."""
        if self._file is None:
            return
        self._write(step=step, **figures)
        rate = (figures["items"] or 0) / max(figures["seconds"] or 0, 1e-9)
        told = [
            f"loss {figures['loss']:.4f}",
            f"lr {figures['learning_rate']:.1e}",
            f"{rate:,.2f} items/s",
            decimal(int(figures["peak_bytes"] or 0)),
        ]
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(told), refresh=False)
            self._bar.update()
        elif step % self._every == 0 or step in (self._before + 1, self._steps):
            self.say("  ".join([f"step {step}/{self._steps}", *told]))

    def evaluation(self, step: int, loss: float) -> None:
        """Show the mean loss on what is held out after ``step`` steps. Raises WriteError."""
        self._write(step=step, held_out_loss=loss)
        self.say(f"held-out loss after step {step}: {loss:.4f}")

    def _write(self, **values: float | None) -> None:
        if self._file is not None:
            with _writing(self._path):
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
