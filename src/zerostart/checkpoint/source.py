"""From what a user names (file, directory, hub id) to the catalog of its tensors.

Hub ids are looked up in the local cache only; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.finding import state_in
from zerostart.checkpoint.formats.pipeline import choose, components
from zerostart.checkpoint.formats.safetensors import read_header
from zerostart.checkpoint.formats.torch_zip import NOTED_VERSIONS, read_torch_file
from zerostart.checkpoint.formats.training import training_checkpoint
from zerostart.checkpoint.manifest import (
    MARKER,
    SAVED_AT,
    STATE_MARKER,
    contents_of,
    current,
    is_inside,
    is_state,
)
from zerostart.checkpoint.paths import expanded, wait_for
from zerostart.checkpoint.storage import Storage, storage_at
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.checkpoint.strict_json import (
    DAMAGED,
    MAX_CONFIG_BYTES,
    MAX_DOCUMENT_BYTES,
    OTHER_FORMATS,
    read_json,
    shown,
)
from zerostart.checkpoint.write.staging import finish_switched
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, VerifyError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
#: How an index is called; diffusers puts the name of a variant before the last dot.
INDEX_NAME = re.compile(r"(?P<weights>.+\.(safetensors|bin))\.index(\.[\w-]+)?\.json")
#: Suffixes of files that torch.save writes; an index is written for the first kind only.
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: The names that transformers and diffusers look for, in their order: safetensors before torch files.
STANDARD_NAMES = tuple(
    f"{stem}{suffix}{index}"
    for stem, suffix in (
        ("model", SUFFIX),
        ("diffusion_pytorch_model", SUFFIX),
        ("pytorch_model", ".bin"),
        ("diffusion_pytorch_model", ".bin"),
    )
    for index in ("", INDEX_SUFFIX)
)
#: What training leaves beside weights, by the names of transformers' Trainer and of accelerate.
NO_WEIGHTS = (
    *("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("optimizer.bin", "scheduler.bin", "sampler.bin"),
)
CONFIG_NAME = "config.json"
#: Headers are small and parsing holds the interpreter lock: threads hide the latency of opening only.
HEADER_THREADS = 8
#: How often a checkpoint is opened that a save replaces meanwhile.
_TRIES = 3
#: The model in a directory of ``save_state``.
_MODEL = "model"


@dataclass(frozen=True)
class Files:
    """Weights files that a caller has found by itself, which together are the checkpoint ``name``."""

    paths: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return self.name


def open_catalog(source: str | os.PathLike[str] | Files, classes: Collection[str] = ()) -> Catalog:
    """Catalog of the checkpoint at ``source``, every header checked.

    ``source`` is a ``.safetensors`` file, a file of torch.save (``.bin``, ``.pt``, ``.pth``, ``.ckpt``), an
    index file of either kind, a directory with the names of transformers or diffusers or with one single
    such file or index, a hub id, optionally ``id@revision``, that lies in the local cache, ``Files``, or a
    URL of a registered storage, all of whose files are the checkpoint.
    Where a directory has both kinds, safetensors are taken. Tensors are in the order of files, then of
    offsets (in a torch file, of its state dict). A tensor in a listed shard belongs to the checkpoint even if
    the index does not list it, because transformers too loads all that the listed files hold.

    A directory that a training run left is read as what it is: DeepSpeed's ZeRO and universal checkpoints,
    those of ``torch.distributed.checkpoint`` and accelerate's, and zerostart's own; their tensors lie in the
    shares of the ranks that wrote them (``Catalog.assembled``).

    A directory with a ``model_index.json`` is a pipeline: meant is the component whose class is among
    ``classes``, or the only model that there is.

    Raises CheckpointNotFoundError if nothing is there or a listed file is absent, CheckpointError if a
    file is malformed or contradicts the index, ReadError if reading fails.
    """
    if (storage := storage_at(source)) is not None:
        return _stored(storage)
    if isinstance(source, Files):
        return replace(_catalog(Path(), [Path(path) for path in source.paths], wanted=None), root="")
    path = resolve_source(source)
    places = (path, path.parent) if path.is_dir() else (path.parent,)  # a state's model lies in a folder
    for _ in range(_TRIES):
        for place in places:
            finish_switched(place)
        before = _configurations(path)
        catalog = _opened(path, classes)
        for place in places:  # a save may have made its switch since: its configuration is waited for
            finish_switched(place)
        if _configurations(path) == before:
            break
    return replace(catalog, configured=catalog.configured or before.get(catalog.root))


def _configurations(path: Path) -> dict[str, FileState | None]:
    places = (path, path / _MODEL) if path.is_dir() else (path.parent,)
    return {str(place): FileState.at(str(place / CONFIG_NAME)) for place in places}


def check_configuration(catalog: Catalog) -> None:
    """Raise ReadError where another configuration lies beside the weights now than when they were opened.

    Of a save that has made its switch since the old weights are there for a moment longer.
    """
    known, path = catalog.configured, Path(catalog.root) / CONFIG_NAME
    if known is not None and (now := FileState.at(str(path))) != known:
        raise ReadError(
            f"{path} was changed while the checkpoint was opened (it {known.changed_to(now)}); load again "
            "when nobody writes to it"
        )


def _opened(path: Path, classes: Collection[str]) -> Catalog:
    if path.is_dir() and _is_saved_state(path):
        return open_saved_state(path, [_MODEL])[1][0]
    found = components(path) if path.is_dir() else None
    if found is not None:
        component = choose(path, found, classes)
        return replace(open_catalog(component.path), component=component.name)
    if path.is_dir() and not _has_weights(path):
        if (own := state_in(path)) is not None:  # in a directory of accelerate's
            return open_saved_state(own, [_MODEL])[1][0]
        if (trained := training_checkpoint(path)) is not None:
            return trained
    for _ in range(_TRIES):
        weights = _weights_in(path) if path.is_dir() else path
        if suffix := _other(weights.name):
            raise CheckpointError(f"{weights}: {OTHER_FORMATS[suffix]}")
        before = FileState.at(str(weights))
        try:
            if INDEX_NAME.fullmatch(weights.name):
                return _open_index(weights)
            return _catalog(weights.parent, [weights], wanted=None)
        except CheckpointNotFoundError as error:  # unless a save has replaced it meanwhile
            if FileState.at(str(weights)) == before:
                raise
            missing = error
    raise missing


def _read_state(path: Path) -> dict[str, Any]:
    return read_json(path / STATE_MARKER, "training state", MAX_DOCUMENT_BYTES)


def open_saved_state(
    path: Path, folders: Sequence[str], read: Callable[[Path], dict[str, Any]] = _read_state
) -> tuple[dict[str, Any], list[Catalog]]:
    """The document of the training state in ``path``, and the catalogs of some of its ``folders``.

    Of the files that the document names, whatever else lies there. ``read`` gives the document, and may raise
    for one that it does not take. Raises as ``open_catalog`` does.
    """
    finish_switched(path)
    for _ in range(_TRIES):
        document = read(path)
        try:
            return document, [_listed(path, document, folder) for folder in folders]
        except CheckpointNotFoundError as error:  # unless a save has replaced it meanwhile
            if read(path) == document:
                raise
            missing = error
    raise missing


def _listed(path: Path, document: dict[str, Any], folder: str) -> Catalog:
    files = document.get("files")
    names = [name for name in files if is_inside(name)] if isinstance(files, dict) else []
    names = sorted(n for n in names if n.endswith(SUFFIX) and str(PurePosixPath(n).parent) == folder)
    if not names:
        return open_catalog(path / folder)
    return _catalog(path / folder, [path / name for name in names], wanted=None)


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """Absolute path of the file or directory that ``source`` means: itself, or a cached hub snapshot.

    Raises CheckpointNotFoundError, saying what was looked for.
    """
    name = os.fspath(source)
    path = expanded(name)
    wait_for(path)
    # Not `resolve`: a cache's snapshot is made of links, and their names are what tells the format.
    path = Path(os.path.abspath(path))  # noqa: PTH100
    if path.exists():
        return path
    if isinstance(source, str) and _may_be_hub_id(name):
        return _cached_snapshot(name, path)
    raise CheckpointNotFoundError(f"{path}: there is no such file or directory")


def config_path(root: str | os.PathLike[str]) -> Path | None:
    """Path of the ``config.json`` of the checkpoint in directory ``root``, or None without one."""
    path = Path(root) / CONFIG_NAME
    return path if path.is_file() else None


def read_config(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Content of the ``config.json`` in directory ``root``, or None without one.

    A name that is there twice counts as the last says: so transformers and diffusers, which build the model,
    read the files that people have edited by hand. Raises CheckpointError if it is not a JSON object.
    """
    path = config_path(root)
    return None if path is None else read_json(path, "configuration", MAX_CONFIG_BYTES, repeated=True)


def _may_be_hub_id(name: str) -> bool:
    identifier = name.partition("@")[0]
    parts = identifier.split("/")
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~")) and not name.endswith(SUFFIX)


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
        # A snapshot can lack files that no load needs; which ones are needed, its index says.
        if (incomplete := getattr(error, "snapshot_path", None)) is not None:
            return Path(incomplete)
        wanted = identifier + (f" --revision {revision}" if revision else "")
        raise CheckpointNotFoundError(
            f"{name}: no file or directory {looked_for}, and no such model in the local hub cache "
            f"({huggingface_hub.constants.HF_HUB_CACHE}); fetch it first: hf download {wanted}"
        ) from error


def _has_weights(directory: Path) -> bool:
    """Whether the directory has weights under one of the names of transformers or diffusers."""
    return any((directory / name).exists() for name in STANDARD_NAMES)


def _is_saved_state(directory: Path) -> bool:
    """Whether the model that counts is that of ``save_state``, and none that was saved beside it later."""
    if not is_state(directory) or not (directory / _MODEL).is_dir():
        return False
    try:
        document = current(directory, MARKER) if _has_weights(directory) else None
        beside = contents_of(document).values() if document is not None else ()
        weights = _weights_in(directory).name if beside else ""
        when = _read_state(directory).get(SAVED_AT) if beside else 0
    except (CheckpointError, ReadError, VerifyError):
        return True
    times = [one.get(SAVED_AT) for one in beside if weights in one["files"]]
    return not any(type(time) is int and type(when) is int and time > when for time in times)


def _weights_in(directory: Path) -> Path:
    """The one weights or index file of a directory, by the rules of transformers and diffusers."""
    for name in STANDARD_NAMES:
        if (directory / name).exists():
            return directory / name
    names = sorted(entry.name for entry in directory.iterdir() if entry.name not in NO_WEIGHTS)
    indexes = {name: m["weights"] for name in names if (m := INDEX_NAME.fullmatch(name))}
    for suffix in (SUFFIX, TORCH_SUFFIXES):
        found = [name for name, weights in indexes.items() if weights.endswith(suffix)]
        found = found or [name for name in names if name.endswith(suffix)]
        if len(found) == 1:
            return directory / found[0]
        if found:
            raise CheckpointError(
                f"{directory}: which checkpoint is meant? It holds {', '.join(map(shown, found[:8]))}"
                f"{' and more' if len(found) > 8 else ''}; name one file, or add an index"
            )
    others = next((f"; {shown(n)}: {OTHER_FORMATS[s]}" for n in names if (s := _other(n))), "")
    raise CheckpointNotFoundError(
        f"{directory}: no checkpoint here; looked for {', '.join(STANDARD_NAMES)}, any other *{SUFFIX}, and "
        f"{', '.join(f'*{suffix}' for suffix in TORCH_SUFFIXES)}{others}"
    )


def _other(name: str) -> str:
    """The suffix of a file of weights that is not read; empty for any other."""
    return next((suffix for suffix in OTHER_FORMATS if name.lower().endswith(suffix)), "")


def _open_index(index: Path) -> Catalog:
    document = read_json(index, "index")
    wanted = document.get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise CheckpointError(
            f"{index}: there is no weight_map that says which file holds which tensor: {DAMAGED}"
        )
    checked: set[object] = set()
    for name, file in wanted.items():
        if not isinstance(file, str) or file not in checked:
            _check_shard_name(index, name, file)
            checked.add(file)
    names = sorted(set(wanted.values()))
    for file in names:
        if not (index.parent / file).exists():
            raise CheckpointNotFoundError(
                f"{index.parent / file}: this shard is missing, but {index.name} lists it; download it again"
            )
    return _catalog(index.parent, [index.parent / file for file in names], wanted, index)


def _check_shard_name(index: Path, name: str, file: object) -> None:
    """A shard has to lie below its index, by its name.

    By its name only: in the hub cache every shard is a link out of the directory, to a blob.
    """
    if not isinstance(file, str):
        raise CheckpointError(f"{index}: tensor {shown(name)} is not mapped to a file name: {DAMAGED}")
    parts = PurePosixPath(file).parts
    outside = file.startswith("/") or ".." in parts or bool(PureWindowsPath(file).drive) or "\\" in file
    if outside or "\0" in file:
        raise CheckpointError(
            f"{index}: tensor {shown(name)} is said to lie in {shown(file)}, outside the checkpoint's "
            "directory; do not load this checkpoint"
        )
    match = INDEX_NAME.fullmatch(index.name)
    suffix = PurePosixPath(match["weights"]).suffix if match else ""
    if not file.endswith(suffix):
        raise CheckpointError(
            f"{index}: tensor {shown(name)} is said to lie in {shown(file)}, which is not a {suffix} file"
        )


def _read_file(
    path: str, number: int, storage: Storage | None = None
) -> tuple[list[TensorEntry], dict[str, str], FileState | None]:
    """Entries, metadata and state of one file, by its suffix; a local one unless a ``storage`` has it.

    A local one is one and the same from the beginning to the end, which nobody writes meanwhile.
    """
    read = read_torch_file if path.endswith(TORCH_SUFFIXES) else read_header
    if storage is not None:
        return (*read(path, number, lambda *_: storage.opened(number))[:2], None)
    before = FileState.at(path)
    entries, metadata, _ = read(path, number)
    if before is None or (now := FileState.at(path)) != before:
        what = before.changed_to(now) if before is not None else "was made"
        raise ReadError(
            f"{path} was changed while its header was read (it {what}); load again when nobody writes to it"
        )
    return entries, metadata, before


def _catalog(
    root: Path, files: Sequence[Path], wanted: dict[str, str] | None, index: Path | None = None
) -> Catalog:
    """Parse all headers and join them; ``wanted`` maps each name that an index lists to its file."""
    paths = [str(file) for file in files]
    tensors, metadata, versions, states = _joined(paths)
    if wanted is not None and index is not None:
        _check_index(index, wanted, files, tensors)
    return Catalog(str(root), LocalFiles.known(paths, states), tensors, metadata, versions=versions)


def _stored(storage: Storage) -> Catalog:
    """Parse the headers of all files of a storage that is reached by a URL."""
    tensors, metadata, versions, _ = _joined(storage.files, storage)
    return Catalog("", storage, tensors, metadata, versions=versions)


def _joined(
    paths: Sequence[str], storage: Storage | None = None
) -> tuple[dict[str, TensorEntry], dict[str, str], dict[str, Any] | None, tuple[FileState, ...]]:
    """Tensors, metadata and versions of all files together, and the states of local files."""
    headers = read_files(paths, range(len(paths)), storage)
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    versions: dict[str, Any] | None = None
    for (entries, own, _), path in zip(headers, paths, strict=True):
        for entry in entries:
            if (other := tensors.setdefault(entry.name, entry)) is not entry:
                raise CheckpointError(
                    f"{path}: tensor {shown(entry.name)} is also in {paths[other.file]}; which one counts? "
                    "Remove one of the two files, or write the checkpoint again"
                )
        if path.endswith(TORCH_SUFFIXES) and NOTED_VERSIONS in own:
            versions = {**json.loads(own.pop(NOTED_VERSIONS)), **(versions or {})}
        metadata = {**own, **metadata}
    return tensors, metadata, versions, tuple(state for *_, state in headers if state is not None)


def read_files(
    paths: Sequence[str], numbers: Sequence[int], storage: Storage | None = None
) -> list[tuple[list[TensorEntry], dict[str, str], FileState | None]]:
    """Entries, which call their file by its number of ``numbers``, metadata and state of each file."""
    with ThreadPoolExecutor(max(1, min(HEADER_THREADS, len(paths)))) as pool:
        return list(pool.map(_read_file, paths, numbers, [storage] * len(paths)))


def _check_index(
    index: Path, wanted: dict[str, str], files: Sequence[Path], tensors: dict[str, TensorEntry]
) -> None:
    number = {str(file.relative_to(index.parent)): position for position, file in enumerate(files)}
    spelled = {file: number[str(PurePosixPath(file))] for file in set(wanted.values())}
    for name, file in wanted.items():
        entry = tensors.get(name)
        if entry is None or entry.file != spelled[file]:
            where = "no shard has it" if entry is None else f"{shown(files[entry.file].name)} has it"
            raise CheckpointError(
                f"{index}: tensor {shown(name)} is said to lie in {shown(file)}, but {where}; "
                "shards of different checkpoints are mixed: download them again"
            )
