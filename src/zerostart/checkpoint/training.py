"""Directories that a training run left: recognising them, and their catalogs."""

from __future__ import annotations

from pathlib import Path

from zerostart.checkpoint.catalog import Assembled, Catalog
from zerostart.checkpoint.formats import dcp, rank_files, universal, zero
from zerostart.checkpoint.formats.found import STATE, Found
from zerostart.checkpoint.formats.parts import PartFiles
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["stock_time", "training_checkpoint", "training_states"]

CONFIG_NAME = "config.json"
#: The folders in which accelerate's ``save_state`` leaves a sharded model's weights, and FSDP2's optimizer.
_ACCELERATE, _OPTIMIZER = ("pytorch_model_fsdp_0", "pytorch_model"), "optimizer_0"
#: The files that name the newest checkpoint of a DeepSpeed directory.
_LATEST = ("latest", "latest_universal")


def training_checkpoint(directory: Path) -> Catalog | None:
    """The weights in a directory of DeepSpeed's, of ``torch.distributed.checkpoint`` or of accelerate's.

    None if it is none of these. Raises CheckpointError and CheckpointNotFoundError where it is not whole.
    """
    place = _found(directory)
    if place is None:
        return None
    files = PartFiles()
    found = _read(place, files)
    weights = {name: tensor for name, tensor in found.assembled.items() if STATE not in name}
    return _catalog(found, files, weights, _root(directory, place))


def training_states(directory: Path) -> tuple[Found, Catalog, Catalog] | None:
    """All that such a directory holds, with the catalogs of weights and of an optimizer's states.

    In the second a state has the name ``optimizer/KEY/NAME``. None where the directory is none of these.
    Raises CheckpointError and CheckpointNotFoundError where it is not whole.
    """
    place = _found(directory)
    if place is None:
        return None
    files = PartFiles()
    found = _read(place, files)
    if place.name == _ACCELERATE[0] and dcp.is_dcp(place.parent / _OPTIMIZER):
        beside = dcp.read_dcp(place.parent / _OPTIMIZER, files)
        found.add(beside.tensors.values())
        found.assembled |= beside.assembled
        found.numbers, found.groups = beside.numbers, beside.groups
    weights = {name: tensor for name, tensor in found.assembled.items() if STATE not in name}
    states = {}
    for name, tensor in found.assembled.items():
        key, separator, parameter = name.partition(STATE)
        if separator:
            states[f"optimizer/{key}/{parameter}"] = tensor
    root = _root(directory, place)
    return found, _catalog(found, files, weights, root), _catalog(found, files, states, root)


def stock_time(directory: Path) -> tuple[Path, float] | None:
    """Where such a checkpoint lies in ``directory``, and when the last of its files was written, in seconds.

    None where there is none. Raises what looking for it does.
    """
    place = _found(directory)
    if place is None:
        return None
    files = (entry for entry in place.iterdir() if entry.suffix != ".json" and entry.is_file())
    return place, max(entry.stat().st_mtime for entry in files)


def _read(place: Path, files: PartFiles) -> Found:
    if dcp.is_dcp(place):
        return dcp.read_dcp(place, files)
    if universal.is_universal(place):
        return universal.read_universal(place, files)
    if rank_files.has_rank_files(place):
        return rank_files.read_rank_files(place, files)
    return zero.read_zero(place, files)


def _catalog(found: Found, files: PartFiles, tensors: dict[str, Assembled], root: str) -> Catalog:
    """A catalog of some of the tensors, with what is stored of these."""
    parts = {source for tensor in tensors.values() for piece in tensor.pieces for source in piece.source}
    stored = {name: entry for name, entry in found.tensors.items() if name in parts}
    storage = LocalFiles.known(files.paths, files.states)
    return Catalog(root, storage, stored, {"format": "pt"}, assembled=tensors)


def _found(directory: Path) -> Path | None:
    """The directory itself, the newest one that it names, or the one within that accelerate makes."""
    kinds = (dcp.is_dcp, universal.is_universal, zero.is_zero, rank_files.has_rank_files)
    if any(is_one(directory) for is_one in kinds):
        return directory
    for name in _LATEST:
        if (directory / name).is_file():
            tag = (directory / name).read_text(encoding="utf-8", errors="replace").strip()
            if not tag or "/" in tag or "\\" in tag or tag in (".", ".."):
                raise CheckpointError(f"{directory / name}: names {tag!r}, which is no folder beside it")
            if not (directory / tag).is_dir():
                raise CheckpointNotFoundError(f"{directory / tag}: not there, but {name} names it")
            return _found(directory / tag)
    for name in _ACCELERATE:
        if (directory / name).is_dir() and (inner := _found(directory / name)) is not None:
            return inner
    return None


def _root(given: Path, found: Path) -> str:
    """Where the configuration is: beside the weights, or above them."""
    places = [given, found, *found.parents[:2]]
    return str(next((place for place in places if (place / CONFIG_NAME).is_file()), given))
