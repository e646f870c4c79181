"""Directories of ``save_state``, also among those of other libraries."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.base import MODEL_FOLDER, TRIES, Format, catalog_at
from zerostart.checkpoint.formats.pipeline import is_pipeline
from zerostart.checkpoint.formats.training import stock_time
from zerostart.checkpoint.formats.weights import (
    SUFFIX,
    catalog_of,
    has_weights,
    storage_catalog,
    weights_in,
)
from zerostart.checkpoint.manifest import (
    MARKER,
    SAVED_AT,
    STATE_MARKER,
    contents_of,
    current,
    is_inside,
    is_state,
    saved_at,
)
from zerostart.checkpoint.paths import shown_url
from zerostart.checkpoint.settings import copied
from zerostart.checkpoint.storage import Storage, storage_at
from zerostart.checkpoint.storage.files import read_small
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, read_json
from zerostart.checkpoint.usual_names import STANDARD_NAMES
from zerostart.checkpoint.write.staging import finish_switched
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, VerifyError, ZerostartError

logger = logging.getLogger("zerostart")

#: DeepSpeed's file with the name of its last checkpoint.
LATEST = "latest"
#: accelerate's names of a model's checkpoint, with DeepSpeed and with FSDP2.
DEEPSPEED, FSDP = "pytorch_model", "pytorch_model_fsdp"


class SavedState(Format):
    """Model of a zerostart training state."""

    name = "state"

    def recognises(self, path: Path) -> bool:
        """Return False if weights were saved next to the state later."""
        if not path.is_dir():
            return False
        return _is_saved_state(path) or _state_within(path) is not None

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        state = path if _is_saved_state(path) else _state_within(path)
        if state is None:
            raise CheckpointNotFoundError(f"{path}: the training state was removed while it was opened")
        return open_saved_state(state, [MODEL_FOLDER])[1][0]


def _state_within(path: Path) -> Path | None:
    return None if is_pipeline(path) or has_weights(path) else state_in(path)


def _is_saved_state(directory: Path) -> bool:
    if not is_state(directory) or not (directory / MODEL_FOLDER).is_dir():
        return False
    try:
        # ``save`` may write weights next to a state: the newer of the two counts, by the times in their
        # documents. Copying changes the times of files.
        document = current(directory, MARKER) if has_weights(directory) else None
        contents = contents_of(document).values() if document is not None else ()
        weights = weights_in(directory).name if contents else ""
        when = _read_state(directory).get(SAVED_AT) if contents else 0
    # A damaged document has no time: opening the state reports the damage.
    except (CheckpointError, ReadError, VerifyError):
        return True
    times = [one.get(SAVED_AT) for one in contents if weights in one["files"]]
    return not any(type(time) is int and type(when) is int and time > when for time in times)


def _read_state(path: Path) -> JsonObject:
    return read_json(path / STATE_MARKER, "training state", MAX_DOCUMENT_BYTES)


def open_saved_state(
    path: Path | str, folders: Sequence[str], read: Callable[[Path], dict[str, object]] = _read_state
) -> tuple[JsonObject, list[Catalog]]:
    """Return the document and catalogs of a training state.

    ``path`` is a directory or its URL. Only files that the document names count. ``read`` reads the
    document in a directory, and may raise for one that it refuses. Raises as ``open_catalog`` does.
    """
    storage = storage_at(path) if isinstance(path, str) else None
    if isinstance(path, Path):
        # Complete a save that was killed after its switch.
        finish_switched(path)
    for _ in range(TRIES):
        document = read(_directory(path, storage))
        try:
            return document, [_catalog(path, storage, document, folder) for folder in folders]
        except CheckpointNotFoundError as error:  # unless a save has replaced it meanwhile
            if read(_directory(path, storage)) == document:
                raise
            missing = error
    raise missing


def _directory(path: Path | str, storage: Storage | None) -> Path:
    if storage is None:
        return Path(path)
    if not is_stored_state(storage):
        raise CheckpointNotFoundError(
            f"{shown_url(str(path))} is not a complete training state: {STATE_MARKER}, which "
            "zerostart.save_state writes last, is missing"
        )
    return copied(storage, [STATE_MARKER])


def _catalog(path: Path | str, storage: Storage | None, document: JsonObject, folder: str) -> Catalog:
    names = _weights_of(document, folder)
    if storage is not None:
        if not names:
            raise CheckpointNotFoundError(f"{storage.folder}/{folder}: the document names no weights there")
        return storage_catalog(replace(storage.named(names), folder=""))
    place = Path(path)
    if not names:
        return catalog_at(Path(os.path.abspath(place / folder)))  # noqa: PTH100
    return catalog_of(place / folder, [place / name for name in names])


def is_stored_state(storage: Storage) -> bool:
    """Return True if a URL is a training state."""
    return bool(storage.folder) and not storage.asked and STATE_MARKER in storage.names()


def is_state_alone(storage: Storage) -> bool:
    """Return True if a URL is only a training state."""
    return is_stored_state(storage) and not {*STANDARD_NAMES} & {*storage.names()}


def _weights_of(document: dict[str, object], folder: str) -> list[str]:
    files = document.get("files")
    names = [name for name in files if is_inside(name)] if isinstance(files, dict) else []
    return sorted(n for n in names if n.endswith(SUFFIX) and str(PurePosixPath(n).parent) == folder)


def state_in(directory: str | os.PathLike[str], number: int = 0, tag: str | None = None) -> Path | None:
    """Find zerostart's newest training state in ``directory``.

    ``number`` selects a model of accelerate. Returns the newest zerostart state, whatever other libraries
    have left next to it; None without one. ``tag`` is DeepSpeed's name of one of several states, which
    restricts the search to it.
    """
    folder = Path(directory)
    own = f"{DEEPSPEED}_{number}" if number else DEEPSPEED
    names = [own, f"{FSDP}_{number}"] if tag in (None, own) else [str(tag)]
    latest = folder / LATEST
    if not number and tag is None:
        names.append(".")
        if latest.is_file():
            named = read_small(str(latest)).decode("utf-8", "replace").strip()
            names += [named] if is_tag(named) else []
    states = [folder / name for name in names if is_state(folder / name)]
    # Compare the times in the documents; otherwise those of the files.
    return max(states, key=_saved_at) if len(states) > 1 else next(iter(states), None)


def _saved_at(state: Path) -> int:
    marker, document = state / STATE_MARKER, dict[str, object]()
    with contextlib.suppress(ZerostartError):  # a damaged document has no time
        document = read_json(marker, "training state", MAX_DOCUMENT_BYTES)
    return saved_at(document, marker)


#: Pairs of directories for which the warning about a newer checkpoint was logged.
_warned: set[tuple[Path, Path]] = set()


def warn_of_newer(directory: Path, own: Path) -> None:
    """Warn once about a newer checkpoint of another library."""
    try:
        stock = stock_time(directory)
        is_newer = stock is not None and stock[1] > (own / STATE_MARKER).stat().st_mtime
    except (ZerostartError, OSError):
        return  # only a warning would follow
    if stock is not None and is_newer and (stock[0], own) not in _warned:
        _warned.add((stock[0], own))
        logger.warning(
            "loading %s, which zerostart saved, although %s is a newer checkpoint of another library; to "
            "load that one, pass its own folder, or delete %s",
            own,
            stock[0],
            own / STATE_MARKER,
        )


def is_tag(name: str) -> bool:
    """Return True if ``name`` can name a sibling folder."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name
