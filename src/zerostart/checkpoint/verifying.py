"""Compare a saved directory with the documents that were written with it."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.catalog import DTYPE_BITS, Catalog, TensorEntry
from zerostart.checkpoint.digest import Digests, is_comparable
from zerostart.checkpoint.formats.weights import storage_catalog
from zerostart.checkpoint.manifest import MARKERS, STATE_MARKER, check_seal, documents
from zerostart.checkpoint.paths import expanded, wait_for
from zerostart.checkpoint.settings import copied
from zerostart.checkpoint.source import WeightFiles, open_catalog
from zerostart.checkpoint.storage import LocalFiles, Storage, storage_at
from zerostart.checkpoint.storage.files import open_regular
from zerostart.checkpoint.strict_json import JsonObject, shown
from zerostart.checkpoint.write.staging import finish_switched
from zerostart.distributed.machine import cores
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, VerifyError

#: Maximum number of faults in a message.
_LISTED = 8


@dataclass(frozen=True)
class Verified:
    """Numbers of verified files, tensors and bytes."""

    files: int
    tensors: int
    bytes: int


def verify(path: str | os.PathLike[str]) -> Verified:
    """Implement ``zerostart.verify``."""
    # The documents are read from ``place``, a local copy if the source is a URL.
    storage = storage_at(path)
    if storage is None:
        place = expanded(path)
        wait_for(place)
        if not place.is_dir():
            if place.exists():
                raise VerifyError(f"{place} is a file; name the directory that zerostart saved")
            raise VerifyError(f"{place}: there is no such directory")
    else:
        place = _documents_here(storage)
    shown_place = place if storage is None else storage.folder
    try:
        finish_switched(place)
        saved = documents(place)
        for document in saved:
            check_seal(document, place / STATE_MARKER)  # only a state has a seal
    except CheckpointError as error:
        raise VerifyError(str(error)) from error
    if not saved:
        raise VerifyError(
            f"{shown_place}: has no {' and no '.join(MARKERS)}, so nothing records what was saved: "
            "zerostart did not save it, or the save was not complete; zerostart.diff compares it "
            "with another checkpoint"
        )
    # Check the sizes of files first: tensors of incomplete files would repeat these faults.
    faults = [fault for document in saved for fault in _faults_of_files(place, storage, document)]
    tensors = 0
    for document in saved if not faults else ():
        for folder, digests in document.get("digests", {}).items():
            if any(not is_comparable(digest) for digest in digests.values()):
                raise VerifyError(
                    f"{shown_place} cannot be compared with what was saved: its digests are of another "
                    "definition, that of the version of zerostart which wrote it. Its files have the lengths "
                    "that they had. Verify it with that version, or load and save it with this one"
                )
            faults += _faults_of_tensors(_catalog(place, folder, document, storage), digests)
            tensors += len(digests)
    if faults:
        more = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        raise VerifyError(f"{shown_place} is not what was saved: {'; '.join(faults[:_LISTED])}{more}")
    files = {name: one["bytes"] for document in saved for name, one in document["files"].items()}
    return Verified(len(files), tensors, sum(files.values()))


def _faults_of_files(place: Path, storage: Storage | None, document: JsonObject) -> Iterator[str]:
    for name, described in document["files"].items():
        try:
            file = _local_file(str(place / name)) if storage is None else storage.named([name])
            if file.sizes[0] != described["bytes"]:
                yield f"{file.files[0]} has {file.sizes[0]} bytes and had {described['bytes']}"
            elif "sha256" in described and _hash(file) != described["sha256"]:
                yield f"{file.files[0]} has other contents"
        except CheckpointNotFoundError:
            yield f"{place if storage is None else storage.folder}/{name} is missing"
        except CheckpointError as error:
            yield str(error)
        except ReadError as error:
            raise VerifyError(str(error)) from error


def _local_file(path: str) -> Storage:
    with open_regular(path, "saved") as (_, size):
        return LocalFiles((path,), (size,))


def _documents_here(storage: Storage) -> Path:
    """Copy the documents at a URL to this machine.

    Raises VerifyError.
    """
    if not storage.folder or storage.asked:
        raise VerifyError(f"{storage.name}: only a directory that zerostart has saved can be verified")
    try:
        return copied(storage, [name for name in storage.names() if name in MARKERS])
    except CheckpointNotFoundError as error:
        raise VerifyError(str(error)) from error


def _hash(file: Storage) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    with file.reader() as reader:
        for at in range(0, file.sizes[0], CHUNK):
            part = memoryview(buffer)[: min(CHUNK, file.sizes[0] - at)]
            reader.read(0, at, [part])
            digest.update(part)
    return digest.hexdigest()


def _catalog(place: Path, folder: str, document: JsonObject, storage: Storage | None) -> Catalog:
    names = [name for name in document["files"] if PurePosixPath(name).parent == PurePosixPath(folder)]
    weights = [str(place / name) for name in sorted(names) if name.endswith(".safetensors")]
    try:
        if storage is not None:
            shards = [name for name in sorted(names) if name.endswith(".safetensors")]
            # Without a folder: all of these files are opened.
            return storage_catalog(replace(storage.named(shards), folder=""))
        return open_catalog(WeightFiles(tuple(weights), str(place / folder)))
    except (CheckpointError, CheckpointNotFoundError, ReadError) as error:
        raise VerifyError(f"{place} is not what was saved: {error}") from error


def _faults_of_tensors(catalog: Catalog, digests: Mapping[str, str]) -> Iterator[str]:
    for name in digests.keys() - catalog.tensors.keys():
        yield f"tensor {shown(name)} is in none of its files"
    for name in catalog.tensors.keys() - digests.keys():
        yield f"tensor {shown(name)} in {catalog.files[catalog.tensors[name].file]} was not saved with it"
    try:
        current_digests = file_digests(catalog, digests.keys())
    except (ReadError, CheckpointNotFoundError) as error:
        raise VerifyError(str(error)) from error
    for name, digest in current_digests.items():
        if digest != digests[name]:
            entry = catalog.tensors[name]
            yield f"tensor {shown(name)} in {catalog.files[entry.file]} has other contents"


#: Bytes of one read, which is the buffer of a thread; maximum number of threads.
CHUNK, THREADS = 4 << 20, 8


def file_digests(catalog: Catalog, names: Collection[str] | None = None) -> dict[str, str]:
    """Return the digest of each tensor of safetensors files.

    It equals that of a live model. Raises ReadError and CheckpointNotFoundError.
    """
    entries = [entry for entry in catalog.tensors.values() if names is None or entry.name in names]
    digests = Digests((entry.name, entry.dtype, entry.shape) for entry in entries)
    # One buffer for each thread, however many reads it does.
    own = threading.local()

    def buffer(count: int) -> memoryview:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(CHUNK)
        return memoryview(own.buffer)[:count]

    with catalog.storage.reader() as reader:

        def add(job: tuple[TensorEntry, int, int]) -> None:
            entry, start, count = job
            data = buffer(count)
            reader.read(entry.file, entry.offset + start, [data])
            digests.add(entry.name, start * 8 // DTYPE_BITS[entry.dtype], data)

        # Requests to a store wait, so that threads may exceed the processors.
        threads = THREADS if not catalog.storage.cached else max(1, min(THREADS, int(cores())))
        with ThreadPoolExecutor(threads) as pool:
            # In batches, so that an error ends it soon without a list of all reads.
            jobs = (job for entry in entries for job in _reads(entry))
            while batch := list(itertools.islice(jobs, 64)):
                list(pool.map(add, batch))
    return digests.summed()


def _reads(entry: TensorEntry) -> Iterator[tuple[TensorEntry, int, int]]:
    for start in range(0, entry.nbytes, CHUNK):
        yield entry, start, min(CHUNK, entry.nbytes - start)
