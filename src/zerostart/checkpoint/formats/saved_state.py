"""Directories of ``save_state``: the model in one, and ours among those of other libraries."""

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

#: The name of DeepSpeed's file that names its last checkpoint.
LATEST = "latest"
#: accelerate's names of a model's checkpoint, on DeepSpeed and on FSDP2.
DEEPSPEED, FSDP = "pytorch_model", "pytorch_model_fsdp"


class SavedState(Format):
    """The model of a training state of ours: of the directory itself, or of one that accelerate has in it."""

    name = "state"

    def recognises(self, path: Path) -> bool:
        """Whether the state's model is what counts, and not weights that were saved beside it later."""
        if not path.is_dir():
            return False
        return _is_saved_state(path) or _state_within(path) is not None

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """The model in the state's own folder."""
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
        # Weights beside a state are of ``save`` into the same directory: the newer of the two counts, by the
        # times in their documents and not by those of files, which copying changes.
        document = current(directory, MARKER) if has_weights(directory) else None
        beside = contents_of(document).values() if document is not None else ()
        weights = weights_in(directory).name if beside else ""
        when = _read_state(directory).get(SAVED_AT) if beside else 0
    # A damaged document does not say: the state is opened, which then tells what is wrong.
    except (CheckpointError, ReadError, VerifyError):
        return True
    times = [one.get(SAVED_AT) for one in beside if weights in one["files"]]
    return not any(type(time) is int and type(when) is int and time > when for time in times)


def _read_state(path: Path) -> JsonObject:
    return read_json(path / STATE_MARKER, "training state", MAX_DOCUMENT_BYTES)


def open_saved_state(
    path: Path | str, folders: Sequence[str], read: Callable[[Path], dict[str, object]] = _read_state
) -> tuple[JsonObject, list[Catalog]]:
    """The document of the training state in ``path``, and the catalogs of some of its ``folders``.

    ``path`` is a directory, or the URL of one. Of the files that the document names, whatever else lies
    there. ``read`` gives the document in a directory, and may raise for one that it does not take. Raises as
    ``open_catalog`` does.
    """
    storage = storage_at(path) if isinstance(path, str) else None
    if isinstance(path, Path):
        # A save that was killed behind its switch is brought to its end first.
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
    """Whether a URL is that of a training state, whose model lies in a directory of its own."""
    return bool(storage.folder) and not storage.asked and STATE_MARKER in storage.names()


def is_state_alone(storage: Storage) -> bool:
    """Whether a URL is that of a training state, and no weights lie beside its document."""
    return is_stored_state(storage) and not {*STANDARD_NAMES} & {*storage.names()}


def _weights_of(document: dict[str, object], folder: str) -> list[str]:
    files = document.get("files")
    names = [name for name in files if is_inside(name)] if isinstance(files, dict) else []
    return sorted(n for n in names if n.endswith(SUFFIX) and str(PurePosixPath(n).parent) == folder)


def state_in(directory: str | os.PathLike[str], number: int = 0, tag: str | None = None) -> Path | None:
    """The training state of ours in ``directory``: itself, or that of model ``number`` of accelerate's.

    The newest one of ours, whatever other libraries have left beside it; None where there is none. ``tag`` is
    DeepSpeed's name for one of several, and then that one alone is meant.
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
    found = [folder / name for name in names if is_state(folder / name)]
    # By the time in the document; where it does not say, by that of its file.
    return max(found, key=_saved_at) if len(found) > 1 else next(iter(found), None)


def _saved_at(state: Path) -> int:
    marker, document = state / STATE_MARKER, dict[str, object]()
    with contextlib.suppress(ZerostartError):  # a damaged one does not say
        document = read_json(marker, "training state", MAX_DOCUMENT_BYTES)
    return saved_at(document, marker)


#: Directories of which somebody was told that they hold a newer checkpoint of another library.
_told: set[tuple[Path, Path]] = set()


def tell_of_newer(directory: Path, own: Path) -> None:
    """Warn, once, where ``directory`` has a checkpoint of another library that is newer than our ``own``."""
    try:
        stock = stock_time(directory)
        is_newer = stock is not None and stock[1] > (own / STATE_MARKER).stat().st_mtime
    except (ZerostartError, OSError):
        return  # nobody has asked for it
    if stock is not None and is_newer and (stock[0], own) not in _told:
        _told.add((stock[0], own))
        logger.warning(
            "%s is taken, which zerostart saved; %s has a newer checkpoint of another library: to take that "
            "one, name its own folder, or remove %s",
            own,
            stock[0],
            own / STATE_MARKER,
        )


def is_tag(name: str) -> bool:
    """Whether ``name`` is one of a folder beside the file that names it."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name
