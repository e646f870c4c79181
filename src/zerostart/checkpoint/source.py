"""From what a user names (file, directory, hub id) to the catalog of its tensors.

Hub ids are looked up in the local cache only; nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.safetensors import read_header
from zerostart.checkpoint.strict_json import DAMAGED, read_json, shown
from zerostart.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["config_path", "open_catalog", "read_config", "resolve_source"]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
#: The names that transformers and diffusers look for, in their order.
STANDARD_STEMS = ("model", "diffusion_pytorch_model")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
CONFIG_NAME = "config.json"
#: Headers are small and parsing holds the interpreter lock: threads hide the latency of opening only.
HEADER_THREADS = 8


def open_catalog(source: str | os.PathLike[str]) -> Catalog:
    """Catalog of the safetensors checkpoint at ``source``, every header checked.

    ``source`` is a ``.safetensors`` file, an index file, a directory with the names of transformers or
    diffusers or with one single ``.safetensors`` file or index, or a hub id, optionally
    ``id@revision``, that lies in the local cache. Tensors are in the order of files, then of offsets.
    A tensor in a listed shard belongs to the checkpoint even if the index does not list it, because
    transformers too loads all that the listed files hold.

    Raises CheckpointNotFoundError if nothing is there or a listed file is absent, CheckpointError if a
    file is malformed or contradicts the index, ReadError if reading fails.
    """
    path = resolve_source(source)
    weights = _weights_in(path) if path.is_dir() else path
    if weights.name.endswith(INDEX_SUFFIX):
        return _open_index(weights)
    if weights.name.endswith(PICKLED):
        _refuse_pickled(weights, [weights.name])
    return _catalog(weights.parent, [weights], wanted=None)


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """Absolute path of the file or directory that ``source`` means: itself, or a cached hub snapshot.

    Raises CheckpointNotFoundError, saying what was looked for.
    """
    name = os.fspath(source)
    path = Path(name).expanduser()
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

    Raises CheckpointError if it is not a JSON object.
    """
    path = config_path(root)
    return None if path is None else read_json(path, "configuration")


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


def _weights_in(directory: Path) -> Path:
    """The one weights or index file of a directory, by the rules of transformers and diffusers."""
    for stem in STANDARD_STEMS:
        for suffix in (SUFFIX, INDEX_SUFFIX):
            if (directory / f"{stem}{suffix}").exists():
                return directory / f"{stem}{suffix}"
    names = sorted(entry.name for entry in directory.iterdir())
    for suffix in (INDEX_SUFFIX, SUFFIX):
        found = [name for name in names if name.endswith(suffix)]
        if len(found) == 1:
            return directory / found[0]
        if found:
            raise CheckpointError(
                f"{directory}: which checkpoint is meant? It holds {', '.join(map(shown, found[:8]))}"
                f"{' and more' if len(found) > 8 else ''}; name one file, or add an index"
            )
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        _refuse_pickled(directory, pickled)
    looked_for = [f"{stem}{suffix}" for stem in STANDARD_STEMS for suffix in (SUFFIX, INDEX_SUFFIX)]
    raise CheckpointNotFoundError(
        f"{directory}: no checkpoint here; looked for {', '.join(looked_for)} and any other *{SUFFIX}"
    )


def _refuse_pickled(place: Path, names: Sequence[str]) -> NoReturn:
    raise CheckpointError(
        f"{place}: the weights are pickled ({', '.join(map(shown, names[:4]))}); this version reads only "
        "safetensors, a later one pickled files too. Convert them once: "
        "AutoModel.from_pretrained(directory).save_pretrained(new_directory) writes safetensors"
    )


def _open_index(index: Path) -> Catalog:
    document = read_json(index, "index")
    wanted = document.get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise CheckpointError(f"{index}: no weight_map that says which file holds which tensor: {DAMAGED}")
    for name, file in wanted.items():
        _check_shard_name(index, name, file)
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
    if not file.endswith(SUFFIX):
        raise CheckpointError(
            f"{index}: tensor {shown(name)} is said to lie in {shown(file)}, which is not a {SUFFIX} file"
        )


def _catalog(
    root: Path, files: Sequence[Path], wanted: dict[str, str] | None, index: Path | None = None
) -> Catalog:
    """Parse all headers and join them; ``wanted`` maps each name that an index lists to its file."""
    paths = [str(file) for file in files]
    with ThreadPoolExecutor(min(HEADER_THREADS, len(paths))) as pool:
        headers = list(pool.map(read_header, paths, range(len(paths))))
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for (entries, own, _), path in zip(headers, paths, strict=True):
        for entry in entries:
            if (other := tensors.setdefault(entry.name, entry)) is not entry:
                raise CheckpointError(
                    f"{path}: tensor {shown(entry.name)} is also in {paths[other.file]}; which one counts? "
                    "Remove one of the two files, or write the checkpoint again"
                )
        metadata = {**own, **metadata}
    if wanted is not None and index is not None:
        _check_index(index, wanted, files, tensors)
    return Catalog(str(root), tuple(paths), tuple(size for _, _, size in headers), tensors, metadata)


def _check_index(
    index: Path, wanted: dict[str, str], files: Sequence[Path], tensors: dict[str, TensorEntry]
) -> None:
    number = {str(file.relative_to(index.parent)): position for position, file in enumerate(files)}
    for name, file in wanted.items():
        entry = tensors.get(name)
        if entry is None or entry.file != number[str(PurePosixPath(file))]:
            where = "no shard has it" if entry is None else f"{files[entry.file].name} has it"
            raise CheckpointError(
                f"{index}: tensor {shown(name)} is said to lie in {file}, but {where}; "
                "shards of different checkpoints are mixed: download them again"
            )
