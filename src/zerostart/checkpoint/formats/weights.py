"""Weights files of safetensors or torch: one file, or several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.formats.base import TRIES, Format
from zerostart.checkpoint.formats.safetensors import read_header
from zerostart.checkpoint.formats.torch_zip import NOTED_VERSIONS, read_torch_file
from zerostart.checkpoint.settings import settings_here
from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.checkpoint.strict_json import (
    DAMAGED,
    MAX_JSON_BYTES,
    OTHER_FORMATS,
    JsonObject,
    load_json,
    read_json,
    shown,
)
from zerostart.checkpoint.usual_names import STANDARD_NAMES
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
#: Names of index files; diffusers puts a variant's name before the last dot.
INDEX_NAME = re.compile(r"(?P<weights>.+\.(safetensors|bin))\.index(\.[\w-]+)?\.json")
#: Names of shards of a checkpoint with several files.
_SHARD = re.compile(r".+-\d{5}-of-(?!00001)\d{5}\.\w+")
#: Suffixes of ``torch.save`` files; indexes exist only for the first one.
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: Files of transformers' Trainer and of accelerate that are no weights.
NO_WEIGHTS = (
    *("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("optimizer.bin", "scheduler.bin", "sampler.bin"),
)
#: Threads that read headers: they hide the latency of opening files, not parsing.
HEADER_THREADS = 8


class Weights(Format):
    """Weights of transformers or diffusers, or a single file."""

    name = "weights"

    def recognises(self, path: Path) -> bool:
        """Return True: the last format explains any path."""
        return True

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """Return the catalog of a file, index or directory."""
        # A save may replace files between listing and opening: the index or single file has then changed, and
        # the directory is listed again.
        for _ in range(TRIES):
            weights = weights_in(path) if path.is_dir() else path
            if suffix := _other_suffix(weights.name):
                raise CheckpointError(f"{weights}: {OTHER_FORMATS[suffix]}")
            before = FileState.at(str(weights))
            try:
                if INDEX_NAME.fullmatch(weights.name):
                    return _open_index(weights)
                return catalog_of(weights.parent, [weights])
            except CheckpointNotFoundError as error:  # unless a save has replaced it meanwhile
                if FileState.at(str(weights)) == before:
                    raise
                missing = error
        raise missing


def has_weights(directory: Path) -> bool:
    """Return True if weights have a standard name."""
    return any((directory / name).exists() for name in STANDARD_NAMES)


def weights_in(directory: Path) -> Path:
    """Find the weights or index file of a directory."""
    for name in STANDARD_NAMES:
        if (directory / name).exists():
            return directory / name
    return directory / weights_among([entry.name for entry in directory.iterdir()], str(directory))


def weights_among(of_directory: Iterable[str], directory: str) -> str:
    """Choose the weights or index file among names."""
    every = set(of_directory)
    for name in STANDARD_NAMES:
        if name in every:
            return name
    names = sorted(every.difference(NO_WEIGHTS))
    indexes = {name: m["weights"] for name in names if (m := INDEX_NAME.fullmatch(name))}
    # Safetensors before torch files; for each kind an index before single files.
    for suffix in (SUFFIX, TORCH_SUFFIXES):
        matches = [name for name, weights in indexes.items() if weights.endswith(suffix)]
        matches = matches or [name for name in names if name.endswith(suffix)]
        # A first save to a store uploads the shards before their index.
        if matches and all(map(_SHARD.fullmatch, matches)):
            raise CheckpointNotFoundError(
                f"{directory}: holds shards of a checkpoint ({shown(matches[0])}) and no index of them: a "
                "running save or copy writes it last, and an interrupted one never; wait for it, save again, "
                "or add the index"
            )
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise CheckpointError(
                f"{directory}: holds several checkpoints "
                f"({', '.join(map(shown, matches[:8]))}{(' and more' if len(matches) > 8 else '')}), and it "
                "is not clear which one to load; name one file, or add an index"
            )
    hint = next((f"; {shown(n)}: {OTHER_FORMATS[s]}" for n in names if (s := _other_suffix(n))), "")
    raise CheckpointNotFoundError(
        f"{directory}: no checkpoint in this directory; looked for {', '.join(STANDARD_NAMES)}, "
        f"any other *{SUFFIX}, and "
        f"{', '.join(f'*{suffix}' for suffix in TORCH_SUFFIXES)}{hint}"
    )


def _other_suffix(name: str) -> str:
    return next((suffix for suffix in OTHER_FORMATS if name.lower().endswith(suffix)), "")


def _open_index(index: Path) -> Catalog:
    weight_map = _listed(read_json(index, "index"), index)
    names = sorted(set(weight_map.values()))
    for file in names:
        if not (index.parent / file).exists():
            raise CheckpointNotFoundError(
                f"{index.parent / file}: this file of the checkpoint is missing, but {index.name} lists "
                "it; download it again"
            )
    return catalog_of(index.parent, [index.parent / file for file in names], weight_map, index)


def shards_of(index: Path) -> list[str]:
    """Return the files of an index. Raises CheckpointError."""
    return sorted(set(_listed(read_json(index, "index"), index).values()))


def _listed(document: JsonObject, index: Path | str) -> dict[str, str]:
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: has no weight_map that says which file holds which tensor: {DAMAGED}"
        )
    # Check each file name once: an index names the same few for thousands of tensors.
    checked: set[object] = set()
    for name, file in weight_map.items():
        if not isinstance(file, str) or file not in checked:
            _check_shard_name(index, name, file)
            checked.add(file)
    return weight_map


def _check_shard_name(index: Path | str, name: str, file: object) -> None:
    """Check that a shard is below its index.

    Only by its name: in the hub cache every shard is a link out of the directory, to a blob.
    """
    if not isinstance(file, str):
        raise CheckpointError(f"{index}: tensor {shown(name)} is not mapped to a file name: {DAMAGED}")
    parts = PurePosixPath(file).parts
    outside = file.startswith("/") or ".." in parts or bool(PureWindowsPath(file).drive) or "\\" in file
    if outside or "\0" in file:
        raise CheckpointError(
            f"{index}: places tensor {shown(name)} in {shown(file)}, outside the checkpoint's "
            "directory; do not load this checkpoint"
        )
    match = INDEX_NAME.fullmatch(PurePosixPath(index).name)
    suffix = PurePosixPath(match["weights"]).suffix if match else ""
    if not file.endswith(suffix):
        raise CheckpointError(
            f"{index}: places tensor {shown(name)} in {shown(file)}, which is not a {suffix} file"
        )


def _read_file(
    path: str, number: int, storage: Storage | None = None
) -> tuple[list[TensorEntry], dict[str, str], FileState | None]:
    """Return entries, metadata and state of one file.

    Raises ReadError if a local file changes meanwhile.
    """
    read = read_torch_file if path.endswith(TORCH_SUFFIXES) else read_header
    if storage is not None:
        return (*read(path, number, lambda *_: storage.opened(number))[:2], None)
    before = FileState.at(path)
    entries, metadata, _ = read(path, number)
    if before is None or (now := FileState.at(path)) != before:
        change = before.changed_to(now) if before is not None else "was made"
        raise ReadError(
            f"{path} was changed while its header was read (it {change}); load again when no other "
            "process writes to it"
        )
    return entries, metadata, before


def catalog_of(
    root: Path, files: Sequence[Path], index_map: dict[str, str] | None = None, index: Path | None = None
) -> Catalog:
    """Parse and join all headers; check ``index_map``."""
    paths = [str(file) for file in files]
    tensors, metadata, versions, states = _joined(paths)
    if index_map is not None and index is not None:
        _check_index(index, index_map, [str(file.relative_to(index.parent)) for file in files], tensors)
    return Catalog(str(root), LocalFiles.known(paths, states), tensors, metadata, versions=versions)


def storage_catalog(storage: Storage) -> Catalog:
    """Parse the headers of the weights at a URL."""
    if not storage.folder:
        tensors, metadata, versions, _ = _joined(storage.files, storage)
        return Catalog("", storage, tensors, metadata, versions=versions)
    name = storage.asked or weights_among(storage.names(), storage.folder)
    if suffix := _other_suffix(name):
        raise CheckpointError(f"{storage.folder}/{name}: {OTHER_FORMATS[suffix]}")
    index_map, index = None, f"{storage.folder}/{name}"
    names = [name]
    # All three mostly wait for responses.
    with ThreadPoolExecutor(3) as pool:
        root = pool.submit(settings_here, storage)
        if INDEX_NAME.fullmatch(PurePosixPath(name).name):
            index_map = _listed(_document(storage.named([name])), index)
            names = sorted({str(PurePosixPath(file)) for file in index_map.values()})
        weights = storage.named(names)
        measured = pool.submit(weights.measured)
        tensors, metadata, versions, _ = _joined(weights.files, weights)
    if index_map is not None:
        _check_index(index, index_map, names, tensors)
    return Catalog(root.result(), measured.result(), tensors, metadata, versions=versions)


def _document(storage: Storage) -> JsonObject:
    """Read the only file of a storage as JSON.

    Raises CheckpointError for a long one.
    """
    with storage.opened(0) as (handle, size):
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{storage.files[0]}: an index of {size} bytes is too long: {DAMAGED}")
        return load_json(handle.read(size, 0), storage.files[0], "index")


def _joined(
    paths: Sequence[str], storage: Storage | None = None
) -> tuple[dict[str, TensorEntry], dict[str, str], dict[str, Any] | None, tuple[FileState, ...]]:
    """Join tensors, metadata, versions and states of all files."""
    with ThreadPoolExecutor(max(1, min(HEADER_THREADS, len(paths)))) as pool:
        headers = list(pool.map(_read_file, paths, range(len(paths)), [storage] * len(paths)))
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    versions: dict[str, object] | None = None
    for (entries, own, _), path in zip(headers, paths, strict=True):
        for entry in entries:
            if (other := tensors.setdefault(entry.name, entry)) is not entry:
                raise CheckpointError(
                    f"{path}: tensor {shown(entry.name)} is also in {paths[other.file]}; remove the "
                    "wrong one "
                    "of the two files, or write the checkpoint again"
                )
        if path.endswith(TORCH_SUFFIXES) and NOTED_VERSIONS in own:
            # The first file with a module's version counts, as for the metadata.
            versions = {**json.loads(own.pop(NOTED_VERSIONS)), **(versions or {})}
        metadata = {**own, **metadata}
    return tensors, metadata, versions, tuple(state for *_, state in headers if state is not None)


def _check_index(
    index: Path | str, index_map: dict[str, str], files: Sequence[str], tensors: dict[str, TensorEntry]
) -> None:
    number = {str(PurePosixPath(file)): position for position, file in enumerate(files)}
    # Names in an index may have another spelling (``./a.bin``): compare paths in one spelling.
    spelled = {file: number[str(PurePosixPath(file))] for file in set(index_map.values())}
    for name, file in index_map.items():
        entry = tensors.get(name)
        if entry is None or entry.file != spelled[file]:
            where = (
                "no shard has it"
                if entry is None
                else f"{shown(PurePosixPath(files[entry.file]).name)} has it"
            )
            raise CheckpointError(
                f"{index}: places tensor {shown(name)} in {shown(file)}, but {where}; files of different "
                "checkpoints are mixed: download them again"
            )
