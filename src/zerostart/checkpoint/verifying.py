"""A saved directory against the marker that was written with it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.digesting import file_digests
from zerostart.checkpoint.manifest import MARKERS, STATE_MARKER, check_seal, documents, lies_at
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.pending import wait_for
from zerostart.checkpoint.source import Files, open_catalog
from zerostart.checkpoint.strict_json import shown
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, VerifyError

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
    wait_for(place)
    if not place.is_dir():
        raise VerifyError(f"{place}: there is no such directory")
    found = documents(place)
    if not found:
        raise VerifyError(
            f"{place}: there is no {' and no '.join(MARKERS)} in it, so that nothing says what was saved: "
            "zerostart has not saved it, or not all of it; zerostart.diff compares it with another checkpoint"
        )
    try:
        for document in found:
            check_seal(document, place / STATE_MARKER)  # which no other has
    except CheckpointError as error:
        raise VerifyError(str(error)) from error
    faults = [fault for document in found for fault in _faults_of_files(place, document)]
    tensors = 0
    for document in found if not faults else ():
        for folder, digests in document.get("digests", {}).items():
            faults += _faults_of_tensors(_catalog(place, folder, document), digests)
            tensors += len(digests)
    if faults:
        more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        raise VerifyError(f"{place} is not what was saved: {'; '.join(faults[:_LISTED])}{more}")
    files = {name: one["bytes"] for document in found for name, one in document["files"].items()}
    return Verified(len(files), tensors, sum(files.values()))


def _faults_of_files(place: Path, document: Mapping[str, Any]) -> Iterator[str]:
    for name, described in document["files"].items():
        file = lies_at(place, document, name)
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):  # which may have no end, or none for now
                yield f"{file} is not a regular file"
            elif status.st_size != described["bytes"]:
                yield f"{file} has {status.st_size} bytes and had {described['bytes']}"
            elif "sha256" in described and _hash(file) != described["sha256"]:
                yield f"{file} has other contents"
        except FileNotFoundError:
            yield f"{file} is missing"
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}"


def _hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _catalog(place: Path, folder: str, document: Mapping[str, Any]) -> Catalog:
    """The tensors of all safetensors files of one folder that the document lists."""
    names = [name for name in document["files"] if PurePosixPath(name).parent == PurePosixPath(folder)]
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
