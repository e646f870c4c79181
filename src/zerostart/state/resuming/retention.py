"""Delete old training checkpoints of a run, except the last and the best."""

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


def list_complete(directory: Path | str, own: Callable[[object], bool] | None = None) -> list[Path]:
    """List the complete training checkpoints in a directory, the oldest first.

    ``own`` selects checkpoints by ``extra`` as it is in their documents; None selects all.
    """
    times = {
        path: when
        for path, document, when in iterate_states(directory)
        if own is None or own(document.get("extra"))
    }
    return sorted(times, key=lambda path: (times[path], path.name))


def iterate_states(directory: Path | str) -> Iterator[tuple[Path, JsonObject, int]]:
    """Yield the training states in a directory with their documents and times."""
    # Names of leftovers of killed saves begin with a dot.
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
    """Delete training checkpoints except the last ``keep`` and the ``best``; return them.

    One rank calls it, after a save. ``score`` rates a checkpoint by ``extra`` as it is in the document:
    higher is better, and None and nan never count as best. ``keep=None`` keeps all. Incomplete checkpoints,
    other directories and checkpoints that ``own`` rejects are not touched. Only files that the document of a
    checkpoint lists are deleted; the next call completes a deletion that was killed. Raises ConfigError for
    numbers that keep nothing, and WriteError if a deletion fails.
    """
    if keep is None:
        return []
    if keep < 1 or best < 0 or (best and score is None):
        raise ConfigError(f"keep={keep} and best={best}: keep at least one, and pass score with best")
    # Complete killed saves and deletions.
    for place in Path(directory).glob("*"):
        if not (place / MARKER).exists():
            clear_leftovers(place)
    paths = list_complete(directory, own)
    retained = set(paths[-keep:])
    if score is not None:
        extras = {path: document.get("extra") for path, document, _ in iterate_states(directory)}
        scores = {path: score(extras[path]) for path in paths}
        rated = {path: value for path, value in scores.items() if value is not None and not math.isnan(value)}
        retained |= set(sorted(rated, key=lambda path: rated[path], reverse=True)[:best])
    removed = [path for path in paths if path not in retained]
    for path in removed:
        try:
            remove(path, MARKER)
        except OSError as error:
            raise WriteError(f"{path} cannot be deleted: {error}") from error
    return removed
