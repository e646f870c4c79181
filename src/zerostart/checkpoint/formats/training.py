"""Directories that a training run left: recognising them, and their catalogs."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

from zerostart.checkpoint.catalog import Assembled, Catalog
from zerostart.checkpoint.formats import dcp, rank_files, universal, zero
from zerostart.checkpoint.formats.assembling import STATE, Found, check_whole
from zerostart.checkpoint.formats.parts import PartFiles
from zerostart.checkpoint.storage.files import read_small
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, ZerostartError

CONFIG_NAME = "config.json"
#: The folders in which accelerate's ``save_state`` leaves a sharded model's weights, and FSDP2's optimizer.
_ACCELERATE, _OPTIMIZER = ("pytorch_model_fsdp_0", "pytorch_model"), "optimizer_0"
#: The files that name the newest checkpoint of a DeepSpeed directory.
_LATEST = ("latest", "latest_universal")
#: How many directories may name the next one.
_DEEPEST = 8


def training_checkpoint(directory: Path) -> Catalog | None:
    """The weights in a directory of DeepSpeed's, of ``torch.distributed.checkpoint`` or of accelerate's.

    None if it is none of these. Raises CheckpointError and CheckpointNotFoundError where it is not whole, and
    ReadError if reading fails.
    """
    files = PartFiles()
    with _damage_named(directory, files):
        place = _found(directory)
        if place is None:
            return None
        found = _read(place, files)
    weights = {name: tensor for name, tensor in found.assembled.items() if STATE not in name}
    return _catalog(found, files, weights, _root(directory, place))


def training_states(directory: Path) -> tuple[Found, Catalog, Catalog] | None:
    """All that such a directory holds, with the catalogs of weights and of an optimizer's states.

    In the second a state has the name ``optimizer/KEY/NAME``. None where the directory is none of these.
    Raises CheckpointError and CheckpointNotFoundError where it is not whole, ReadError if reading
    fails.
    """
    files = PartFiles()
    with _damage_named(directory, files):
        place = _found(directory)
        if place is None:
            return None
        found = _read(place, files)
        if place.name == _ACCELERATE[0] and dcp.is_dcp(place.parent / _OPTIMIZER):
            beside = _read(place.parent / _OPTIMIZER, files)
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
    return place, max((entry.stat().st_mtime for entry in files), default=place.stat().st_mtime)


def _read(place: Path, files: PartFiles) -> Found:
    """What the files hold, all of it proved to be there."""
    if dcp.is_dcp(place):
        read = dcp.read_dcp
    elif universal.is_universal(place):
        read = universal.read_universal
    elif rank_files.has_rank_files(place):
        read = rank_files.read_rank_files
    else:
        read = zero.read_zero
    found = read(place, files)
    files.reading, files.record = str(place), ""
    check_whole(found.tensors, found.assembled, [state.size for state in files.states])
    return found


#: What readers stumble over where a record is not what it has to be.
_STUMBLES = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError),
    *(TypeError, ValueError, struct.error),
)


@contextlib.contextmanager
def _damage_named(directory: Path, files: PartFiles) -> Iterator[None]:
    """What is wrong in the files of others, as an error with the file and the record that it was found in.

    The readers check what they know can be wrong. A damaged pickle has more ways than that, and each is the
    file's fault to whoever loads it; the error below, which names the line, stays its cause.
    """
    try:
        yield
        return
    except ZerostartError as error:
        if str(directory) in str(error) or not isinstance(error, CheckpointError):
            raise
        cause: Exception = error
        told = str(error)
    except OSError as error:
        raise ReadError(f"{files.reading or directory}: cannot be read: {error.strerror}") from error
    except _STUMBLES as error:
        cause = error
        record = f"what it says of {shown(files.record)}" if files.record else "what it says"
        told = f"{record} makes no sense ({type(error).__name__}: {shown(str(error))}): {DAMAGED}"
    raise CheckpointError(f"{files.reading or directory}: {told}") from cause


def _catalog(found: Found, files: PartFiles, tensors: dict[str, Assembled], root: str) -> Catalog:
    """A catalog of some of the tensors, with what is stored of these."""
    parts = {source for tensor in tensors.values() for piece in tensor.pieces for source in piece.source}
    stored = {name: entry for name, entry in found.tensors.items() if name in parts}
    storage = LocalFiles.known(files.paths, files.states)
    return Catalog(root, storage, stored, {"format": "pt"}, assembled=tensors)


def _found(directory: Path, depth: int = 0) -> Path | None:
    """The directory itself, the newest one that it names, or the one within that accelerate makes."""
    if depth > _DEEPEST:
        raise CheckpointError(f"{directory}: directories name each other in a circle: {DAMAGED}")
    kinds = (dcp.is_dcp, universal.is_universal, zero.is_zero, rank_files.has_rank_files)
    if any(is_one(directory) for is_one in kinds):
        return directory
    for name in _LATEST:
        if (directory / name).is_file():
            tag = read_small(str(directory / name)).decode("utf-8", "replace").strip()
            if not tag or "/" in tag or "\\" in tag or "\0" in tag or tag in (".", ".."):
                raise CheckpointError(
                    f"{directory / name}: names {shown(tag)}, which is not a folder beside it"
                )
            if not (directory / tag).is_dir():
                raise CheckpointNotFoundError(f"{directory / tag}: not there, but {name} names it")
            return _found(directory / tag, depth + 1)
    for name in _ACCELERATE:
        if (directory / name).is_dir() and (inner := _found(directory / name, depth + 1)) is not None:
            return inner
    return None


def _root(given: Path, found: Path) -> str:
    """Where the configuration is: beside the weights, or above them."""
    places = [given, found, *found.parents[:2]]
    return str(next((place for place in places if (place / CONFIG_NAME).is_file()), given))
