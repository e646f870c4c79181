"""Which of a run's training checkpoints stay: the last ones, and the best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from zerostart.checkpoint.manifest import saved_at
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, read_json
from zerostart.checkpoint.write.staging import clear_leftovers, remove
from zerostart.errors import CheckpointError, ConfigError, WriteError
from zerostart.state.resuming.training_state import MARKER


def complete(directory: Path | str, own: Callable[[object], bool] | None = None) -> list[Path]:
    """The complete training checkpoints in a directory, the oldest first.

    With ``own``, those alone of which it says so from their ``extra``, as it is in the document.
    """
    found = {
        path: when
        for path, document, when in saved_below(directory)
        if own is None or own(document.get("extra"))
    }
    return sorted(found, key=lambda path: (found[path], path.name))


def saved_below(directory: Path | str) -> Iterator[tuple[Path, JsonObject, int]]:
    """The directories right below one that have the document of a training state, with it and its time."""
    # What a killed save has left beside a checkpoint begins with a dot.
    for marker in Path(directory).glob(f"[!.]*/{MARKER}"):
        with contextlib.suppress(CheckpointError):
            document = read_json(marker, "training state", MAX_DOCUMENT_BYTES)
            yield marker.parent, document, saved_at(document, marker)


def prune(
    directory: Path | str,
    keep: int | None,
    best: int = 0,
    score: Callable[[object], float | None] | None = None,
    own: Callable[[object], bool] | None = None,
) -> list[Path]:
    """Remove training checkpoints in ``directory`` but the last ``keep`` and the ``best`` ones; gives them.

    One rank calls it, after a save. ``score`` says how good a checkpoint is, from its ``extra`` as it is in
    the document (more is better; None and nan are none of the best). ``keep=None`` keeps all. What is
    incomplete, or no training checkpoint, or none of ``own``, is left alone.
    A checkpoint is none any more from one step on, and then the files go that its document names: what others
    have put there stays, and what a kill has left goes with the next call.
    Raises ConfigError for numbers that keep nothing, WriteError where removing fails.
    """
    if keep is None:
        return []
    if keep < 1 or best < 0 or (best and score is None):
        raise ConfigError(f"keep={keep} and best={best}: keep the last one at least, and say what is best")
    # Killed saves and removals, whose directories nobody saves to again.
    for place in Path(directory).glob("*"):
        if not (place / MARKER).exists():
            clear_leftovers(place)
    found = complete(directory, own)
    kept = set(found[-keep:])
    if score is not None:
        extras = {path: document.get("extra") for path, document, _ in saved_below(directory)}
        told = {path: score(extras[path]) for path in found}
        known = {path: value for path, value in told.items() if value is not None and not math.isnan(value)}
        kept |= set(sorted(known, key=lambda path: known[path], reverse=True)[:best])
    removed = [path for path in found if path not in kept]
    for path in removed:
        try:
            remove(path, MARKER)
        except OSError as error:
            raise WriteError(f"{path}: cannot be removed: {error}") from error
    return removed
