"""A saved directory against the marker that was written with it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.digesting import file_digests
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.publishing import FORMAT, recover
from zerostart.checkpoint.replacing import MARKERS, is_inside
from zerostart.checkpoint.source import Files, open_catalog
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, read_json, shown
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, VerifyError

__all__ = ["Verified", "read_marker", "verify"]

#: Most faults that a message lists.
_LISTED = 8


@dataclass(frozen=True)
class Verified:
    """What was found to be as it was saved: files and their bytes, and tensors in them."""

    files: int
    tensors: int
    bytes: int


def verify(path: str | os.PathLike[str]) -> Verified:
    """See ``zerostart.verify``, which raises what this raises."""
    place = expanded(path)
    try:
        recover(place)
    except OSError as error:
        raise VerifyError(f"{place}: a save was killed, and cannot be put right: {error.strerror}") from error
    if not place.is_dir():
        raise VerifyError(f"{place}: there is no such directory")
    found = read_marker(place)
    if found is None:
        raise VerifyError(
            f"{place}: there is no {' and no '.join(MARKERS)} in it, so that nothing says what was saved: "
            "zerostart has not saved it, or not all of it; zerostart.diff compares it with another checkpoint"
        )
    faults = [*_faults_of_files(place, found["files"])]
    tensors = 0
    if not faults:
        for folder, digests in found.get("digests", {}).items():
            catalog = _catalog(place, folder, found["files"])
            faults += _faults_of_tensors(catalog, digests)
            tensors += len(digests)
    if faults:
        more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        raise VerifyError(f"{place} is not what was saved: {'; '.join(faults[:_LISTED])}{more}")
    files: Mapping[str, Any] = found["files"]
    return Verified(len(files), tensors, sum(described["bytes"] for described in files.values()))


def read_marker(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The document with which directory ``path`` was saved; None without one. Raises VerifyError."""
    for name in MARKERS:
        marker = Path(path) / name
        try:
            if not marker.is_file():
                continue
            document = read_json(marker, "marker", MAX_DOCUMENT_BYTES)
        except (CheckpointError, ReadError, OSError) as error:
            raise VerifyError(str(error)) from error
        if document.get("format") != FORMAT:
            raise VerifyError(
                f"{marker}: its format is {document.get('format')!r}, and this version knows {FORMAT}: use "
                "the version of zerostart that has saved it"
            )
        if not _well_formed(document):
            raise VerifyError(f"{marker}: it does not list files and digests as zerostart writes them")
        return document
    return None


def _well_formed(document: Mapping[str, Any]) -> bool:
    files, digests = document.get("files"), document.get("digests", {})
    if not isinstance(files, dict) or not isinstance(digests, dict):
        return False
    described = all(isinstance(one, dict) and type(one.get("bytes")) is int for one in files.values())
    inside = all(is_inside(name) for name in (*files, *digests))
    return described and inside and all(isinstance(one, dict) for one in digests.values())


def _faults_of_files(place: Path, files: Mapping[str, Any]) -> Iterator[str]:
    for name, described in files.items():
        file = place / name
        try:
            size = file.stat().st_size
            if size != described["bytes"]:
                yield f"{file} has {size} bytes and had {described['bytes']}"
            elif "sha256" in described and _hash(file) != described["sha256"]:
                yield f"{file} has other contents"
        except FileNotFoundError:
            yield f"{file} is missing"
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}"


def _hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _catalog(place: Path, folder: str, files: Mapping[str, Any]) -> Catalog:
    """The tensors of all safetensors files of one folder that the marker lists."""
    names = [name for name in files if PurePosixPath(name).parent == PurePosixPath(folder)]
    weights = [str(place / name) for name in sorted(names) if name.endswith(".safetensors")]
    try:
        return open_catalog(Files(tuple(weights), str(place / folder)))
    except (CheckpointError, CheckpointNotFoundError, ReadError) as error:
        raise VerifyError(f"{place} is not what was saved: {error}") from error


def _faults_of_tensors(catalog: Catalog, digests: Mapping[str, str]) -> Iterator[str]:
    for name in digests.keys() - catalog.tensors.keys():
        yield f"tensor {shown(name)} is in none of its files"
    for name in catalog.tensors.keys() - digests.keys():
        yield f"tensor {shown(name)} in {catalog.files[catalog.tensors[name].file]} was not saved with it"
    try:
        found = file_digests(catalog, digests.keys())
    except (ReadError, CheckpointNotFoundError) as error:
        raise VerifyError(str(error)) from error
    for name, digest in found.items():
        if digest != digests[name]:
            entry = catalog.tensors[name]
            yield f"tensor {shown(name)} in {catalog.files[entry.file]} has other contents"
