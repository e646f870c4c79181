"""Directories that a training run left: recognising them, and their catalogs."""

from __future__ import annotations

from pathlib import Path

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats import dcp, universal, zero
from zerostart.checkpoint.formats.parts import PartFiles
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["states_catalog", "training_checkpoint"]

#: What separates the name of an optimizer's state from that of its parameter.
STATE = ":"
CONFIG_NAME = "config.json"
#: The folders in which accelerate's ``save_state`` leaves a sharded model's weights.
_ACCELERATE = ("pytorch_model_fsdp_0", "pytorch_model")
#: The files that name the newest checkpoint of a DeepSpeed directory.
_LATEST = ("latest", "latest_universal")


def training_checkpoint(directory: Path) -> Catalog | None:
    """The weights in a directory of DeepSpeed's, of ``torch.distributed.checkpoint`` or of accelerate's.

    None if it is none of these. Raises CheckpointError where it is one that is not whole.
    """
    found = _found(directory)
    if found is None:
        return None
    catalog = states_catalog(found)
    weights = {name: tensor for name, tensor in (catalog.assembled or {}).items() if STATE not in name}
    parts = {source for tensor in weights.values() for piece in tensor.pieces for source in piece.source}
    stored = {name: entry for name, entry in catalog.tensors.items() if name in parts}
    return Catalog(_root(directory, found), catalog.storage, stored, {"format": "pt"}, assembled=weights)


def states_catalog(directory: Path) -> Catalog:
    """Everything in such a directory, the optimizer's states under ``exp_avg:NAME`` and the like."""
    files = PartFiles()
    if dcp.is_dcp(directory):
        tensors, assembled = dcp.read_dcp(directory, files)
    elif universal.is_universal(directory):
        tensors, assembled = universal.read_universal(directory, files)
    else:
        tensors, assembled = zero.read_zero(directory, files)
    storage = LocalFiles.known(files.paths, files.states)
    return Catalog(str(directory), storage, tensors, assembled=assembled)


def _found(directory: Path) -> Path | None:
    """The directory itself, the newest one that it names, or the one within that accelerate makes."""
    if dcp.is_dcp(directory) or universal.is_universal(directory) or zero.is_zero(directory):
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
    places = [given, found, *(found.parents[:2])]
    return str(next((place for place in places if (place / CONFIG_NAME).is_file()), given))
