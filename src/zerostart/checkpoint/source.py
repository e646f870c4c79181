"""Open the catalog of a file, directory or hub id, and detect changed files.

Hub ids are found in the local cache; a load fetches missing ones (:func:`download`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.base import CONFIG_NAME, MODEL_FOLDER, catalog_at
from zerostart.checkpoint.formats.saved_state import is_state_alone
from zerostart.checkpoint.formats.weights import (
    INDEX_SUFFIX,
    SUFFIX,
    catalog_of,
    shards_of,
    storage_catalog,
)
from zerostart.checkpoint.paths import expanded, shown_url, wait_for
from zerostart.checkpoint.storage import scheme_of, storage_at
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.checkpoint.strict_json import MAX_CONFIG_BYTES, JsonObject, read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX, SETTINGS, STANDARD_NAMES
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, ZerostartError


@dataclass(frozen=True)
class WeightFiles:
    """Weights files that together are the checkpoint ``name``."""

    paths: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return self.name


def open_catalog(source: str | os.PathLike[str] | WeightFiles, classes: Collection[str] = ()) -> Catalog:
    """Return the checked catalog of the checkpoint at ``source``.

    ``source`` is a ``.safetensors`` file, a file of torch.save (``.bin``, ``.pt``, ``.pth``, ``.ckpt``),
    an index file of either kind, a directory with the names of transformers or diffusers or with one
    single such file or index, a directory of a training run, the URL of any of these, a hub id
    (optionally ``id@revision``) in the local cache, or ``WeightFiles``. Safetensors are preferred. Tensors
    are in the order of files, then of offsets (in a torch file, of its state dict). A tensor in a listed
    shard belongs to the checkpoint even if the index does not list it, because transformers loads it,
    too. In a pipeline (``model_index.json``), ``classes`` selects the component; without them it must be
    the only model.

    Raises CheckpointNotFoundError if nothing is there or a listed file is absent, CheckpointError if a
    file is malformed or contradicts the index, ReadError if reading fails.
    """
    # Try registered storages first: their URLs would be paths that do not exist.
    if (storage := storage_at(source)) is not None:
        if is_state_alone(storage):
            return open_catalog(f"{os.fspath(str(source)).rstrip('/')}/{MODEL_FOLDER}", classes)
        return storage_catalog(storage)
    if isinstance(source, WeightFiles):
        return replace(catalog_of(Path(), [Path(path) for path in source.paths]), root="")
    return catalog_at(resolve_source(source), classes)


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """Return the absolute path of ``source``.

    Raises CheckpointNotFoundError with the places that were searched.
    """
    name = os.fspath(source)
    if scheme_of(name):
        raise CheckpointNotFoundError(
            f"{shown_url(name)}: a URL is taken where weights are read (load, plan, inspect, diff, verify), "
            "but this needs files of this machine; copy the checkpoint to a local directory"
        )
    path = expanded(name)
    # A thread of this process may still publish the directory.
    wait_for(path)
    # Not `resolve`: a snapshot in the cache consists of links, whose names determine the format.
    path = Path(os.path.abspath(path))  # noqa: PTH100
    if path.exists():
        return path
    # A directory of that name precedes the cache.
    if isinstance(source, str) and _may_be_hub_id(name):
        return _cached_snapshot(name, path)
    raise CheckpointNotFoundError(f"{path}: there is no such file or directory")


#: Patterns of weights in a model's repository; one kind is enough.
_WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth", "*.ckpt"))


def present(
    source: str | os.PathLike[str] | WeightFiles, classes: Collection[str] = ()
) -> str | os.PathLike[str] | WeightFiles:
    """Fetch ``source`` if it is an uncached hub id."""
    if isinstance(source, str) and not scheme_of(source) and _may_be_hub_id(source):
        from huggingface_hub import constants

        # Offline, the caller reports a missing model.
        if not constants.HF_HUB_OFFLINE:
            download(source, classes)
    return source


def fetch_as(root: str, files: Sequence[str]) -> None:
    """Fetch the hub snapshot of another machine's ``root``.

    The revision is the same, even if its branch has moved. Raises CheckpointNotFoundError.
    """
    path = Path(root)
    if _is_snapshot(path) and not all(Path(file).exists() for file in files):
        identifier = path.parent.parent.name.removeprefix("models--").replace("--", "/")
        present(f"{identifier}@{path.name}")


def download(source: str, classes: Collection[str] = ()) -> Path:
    """Fetch an uncached hub id, optionally ``id@revision``.

    Only the weights that a load reads are fetched, all of one revision. Raises CheckpointNotFoundError if
    the hub has no such model, refuses access, or cannot be reached, ReadError if a download breaks off.
    """
    with contextlib.suppress(CheckpointNotFoundError):
        path = resolve_source(source)
        if not _is_snapshot(path) or _is_whole(path, classes):
            return path
    if not _may_be_hub_id(source):
        return resolve_source(source)  # raises the error
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    identifier, _, revision = source.partition("@")
    where = huggingface_hub.constants.ENDPOINT
    missing = f"{source}: no file or directory of this name, not in the local hub cache"
    try:
        return _snapshot(identifier, revision)
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        answer = error if isinstance(error, HfHubHTTPError) else error.__cause__
        is_answer = isinstance(answer, HfHubHTTPError)
        fault = f"does not give this model ({_line(answer)})" if is_answer else "cannot be reached from here"
        raise CheckpointNotFoundError(
            f"{missing} ({huggingface_hub.constants.HF_HUB_CACHE}), and {where} {fault}; check the name, "
            "accept the licence on its page and log in with hf auth login, or fetch it on another machine "
            f"(hf download {identifier}), and copy the cache or name the directory"
        ) from None  # the hub's error may repeat the request
    except (ZerostartError, ImportError):
        raise
    except Exception as error:  # any client's connection error, or a full disk
        raise ReadError(
            f"fetching {source} from {where} broke off ({type(error).__name__}: {_line(error)}); start "
            "again: what has come stays in the local hub cache"
        ) from None


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _snapshot(identifier: str, revision: str) -> Path:
    import huggingface_hub

    def fetch(patterns: Sequence[str], commit: str) -> Path:
        return Path(
            huggingface_hub.snapshot_download(identifier, revision=commit or None, allow_patterns=[*patterns])
        )

    # Fetch the other files first, with the index that names the weights. Then keep to that commit, because a
    # branch may move.
    path = fetch(SETTINGS, revision)
    for name in () if (path / PIPELINE_INDEX).exists() else STANDARD_NAMES:
        if name.endswith(INDEX_SUFFIX):
            if (path / name).exists():
                return fetch(shards_of(path / name), path.name)
        elif (fetch([name], path.name) / name).exists():
            return path
    for kinds in _WEIGHTS:
        fetch(kinds, path.name)
        if any(next(path.rglob(kind), None) for kind in kinds):
            break
    return path


def _is_snapshot(path: Path) -> bool:
    return path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")


def _is_whole(path: Path, classes: Collection[str] = ()) -> bool:
    try:
        catalog_at(path, classes)
    except CheckpointError:
        return False
    return True


def config_path(root: str | os.PathLike[str]) -> Path | None:
    """Return the path of ``config.json``, or None."""
    path = Path(root) / CONFIG_NAME
    return path if path.is_file() else None


def read_config(root: str | os.PathLike[str]) -> JsonObject | None:
    """Return the content of ``config.json``, or None.

    Of a repeated name the last counts, as in transformers and diffusers, because people edit these files
    by hand. Raises CheckpointError if it is not a JSON object.
    """
    path = config_path(root)
    return None if path is None else read_json(path, "configuration", MAX_CONFIG_BYTES)


#: Suffixes of file names, which are not hub ids.
_FILES = (SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".json")


def _may_be_hub_id(name: str) -> bool:
    identifier = name.partition("@")[0]
    parts = identifier.split("/")
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~")) and not name.endswith(_FILES)


def _cached_snapshot(name: str, looked_for: Path) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    identifier, _, revision = name.partition("@")
    try:
        return Path(
            huggingface_hub.snapshot_download(identifier, revision=revision or None, local_files_only=True)
        )
    except HFValidationError as error:
        raise CheckpointNotFoundError(f"{looked_for}: there is no such file or directory") from error
    except LocalEntryNotFoundError as error:
        # A snapshot may lack files that no load needs; its index names the needed ones.
        if (incomplete := getattr(error, "snapshot_path", None)) is not None:
            return Path(incomplete)
        hub_id = identifier + (f" --revision {revision}" if revision else "")
        raise CheckpointNotFoundError(
            f"{name}: no file or directory {looked_for}, and no such model in the local "
            f"hub cache ({huggingface_hub.constants.HF_HUB_CACHE}); fetch it first: hf download {hub_id}, "
            "or with --download, which inspect, plan, load, train and cache take"
        ) from error


def check_configuration(catalog: Catalog) -> None:
    """Raise ReadError if the config file has changed.

    A save may have published new weights while the old ones still exist.
    """
    known, path = catalog.configured, Path(catalog.root) / CONFIG_NAME
    if known is not None and (now := FileState.at(str(path))) != known:
        raise ReadError(
            f"{path} was changed while the checkpoint was opened (it {known.changed_to(now)}); load "
            "again when no other process writes to it"
        )


def states_of(catalog: Catalog) -> tuple[FileState | None, ...]:
    """Return the states of local files when opened."""
    return catalog.storage.states if isinstance(catalog.storage, LocalFiles) else ()


def seen_here(catalog: Catalog) -> Catalog:
    """Return the catalog with this machine's file states.

    Raises CheckpointNotFoundError for a missing file, ReadError for one of another length.
    """
    states = [FileState.at(path) for path in catalog.files]
    for path, size, state in zip(catalog.files, catalog.sizes, states, strict=True):
        if state is None:
            raise CheckpointNotFoundError(
                f"{path} does not exist on this machine, but it does on the machine of rank 0; copy the "
                "checkpoint to every machine, or to a file system that all share"
            )
        if state.size != size:
            raise ReadError(
                f"{path} has another length on this machine than on the machine of rank 0; copy the "
                "checkpoint to every machine again"
            )
    return replace(catalog, storage=replace(catalog.storage, identities=tuple(states)))


def check_unchanged(catalog: Catalog) -> None:
    """Raise ReadError if a file was written to meanwhile.

    A replaced file is allowed: an open file still reads the old one.
    """
    for number, before in enumerate(states_of(catalog)):
        path = catalog.files[number]
        now = FileState.at(path)
        if before is None or now == before:
            continue
        if now is not None and now.number == before.number:
            raise ReadError(
                f"{path} was changed during the load (it {before.changed_to(now)}), so what was read may "
                "be a mixture; load again when no other process writes to it"
            )
