"""Show the progress of a run, and write metrics.jsonl."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.filesize import decimal
from tqdm import tqdm

from zerostart.checkpoint.strict_json import dump_json
from zerostart.errors import WriteError, printable
from zerostart.transfer.meter import peak_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory, on its accelerator or otherwise on the host."""
    if peak := peak_bytes(device):
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux, see getrusage(2)


class Display:
    """Shows and writes the figures of a run of ``steps`` steps; silent unless ``active``.

    ``path`` receives one JSON object a line: ``step, loss, gradient_norm, learning_rate, items, seconds`` and
    ``peak_bytes`` for a step and ``step, held_out_loss`` for an evaluation, with null for a number that is
    not finite. A plain line is printed every ``every`` steps, and for the first and the last one.
    """

    def __init__(self, steps: int, path: Path, every: int, *, active: bool) -> None:
        self._steps = steps
        self._path = path
        self._every = every
        self._before = 0
        self._active = active
        with _writing(path):
            # Opened before the first step, to fail early; appending, as lines of an earlier run are deleted
            # only once this one begins.
            self._file = path.open("a") if active else None
        self._bar: tqdm | None = None

    def __enter__(self) -> Display:
        if self._active and sys.stderr.isatty():
            self._bar = tqdm(total=self._steps, unit="step", dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            with _writing(self._path):
                self._file.close()

    def begin(self, before: int) -> None:
        """Begin after ``before`` steps (0: a new run), and delete later lines.

        Raises WriteError.
        """
        self._before = before
        if self._bar is not None:
            self._bar.update(before)
        if self._file is None or not self._path.is_file():  # a pipe or a device has no earlier lines
            return
        with _writing(self._path):
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if before else []
            self._file.truncate(0)
            self._file.writelines(line for line in lines if _step_of(line) <= before)
            self._file.flush()

    def say(self, text: str) -> None:
        """Print ``text``, above the bar if there is one."""
        shown = "\n".join(printable(line) for line in text.splitlines())
        if self._bar is not None:
            tqdm.write(shown)
        elif self._active:
            print(shown, flush=True)

    def step(self, step: int, figures: dict[str, float | None]) -> None:
        """Show the ``figures`` of one optimizer step. Raises WriteError."""
        if self._file is None:
            return
        self._write(step=step, **figures)
        rate = (figures["items"] or 0) / max(figures["seconds"] or 0, 1e-9)
        shown = [
            f"loss {figures['loss']:.4f}",
            f"lr {figures['learning_rate']:.1e}",
            f"{rate:,.2f} items/s",
            decimal(int(figures["peak_bytes"] or 0)),
        ]
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(shown), refresh=False)
            self._bar.update()
        elif step % self._every == 0 or step in (self._before + 1, self._steps):
            self.say("  ".join([f"step {step}/{self._steps}", *shown]))

    def evaluation(self, step: int, loss: float) -> None:
        """Show the held-out loss after ``step`` steps. Raises WriteError."""
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
