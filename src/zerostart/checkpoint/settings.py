"""What lies at a URL beside the weights (configuration, tokenizer, code), in a directory of this machine.

Libraries of models read such files by their paths. They are fetched anew each time, being small, and a
directory is called by what is in it: so a configuration never comes from another version than its weights.
"""

from __future__ import annotations

import bisect
import contextlib
import filecmp
import fnmatch
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.usual_names import SETTINGS, USUAL_SETTINGS
from zerostart.errors import (
    CheckpointError,
    WriteError,
    ZerostartError,
    printable,
)

logger = logging.getLogger("zerostart")

#: Of one file: the longest vocabularies have some 40 MB. And of all together that no library looks for.
MOST_BYTES = 256 << 20
#: Indexes say where weights are, which are not here; documents of saves what else was saved.
_ASIDE = ("*.index.json", "*.index.*.json", "zerostart.json", "state.json", "model_index.json")
#: Files that are fetched at once, and bytes at a time of one that is copied whole.
_THREADS, _STEP = 8, 8 << 20
#: What directories are called in which files arrive, and seconds after which one is of a killed process.
_ARRIVING, _LEFT = "arriving-", 24 * 3600


def settings_here(storage: Storage) -> str:
    """Return a local directory with the files next to the weights in ``storage.folder``; empty without any.

    Raises ReadError, CheckpointError for a file that is too long, WriteError if there is no room.
    """
    sizes = dict(zip(storage.names(), storage.sizes, strict=True))
    names = [name for name in sizes if _matches(name, SETTINGS) and not _matches(name, _ASIDE)]
    names = _bounded(names, sizes, storage)
    return str(copied(storage, names)) if names else ""


def copied(storage: Storage, names: list[str]) -> Path:
    """A directory of this machine with the files of these ``names``, whole. Raises as ``settings_here``."""
    return _copied(storage.named(names), names)


def _bounded(names: Sequence[str], sizes: Mapping[str, int], storage: Storage) -> list[str]:
    """Those of ``names`` that libraries look for, and of the others the shortest, as far as there is room."""
    # Long ones, or many, that no library looks for are data of somebody's.
    others = sorted((name for name in names if name not in USUAL_SETTINGS), key=lambda name: sizes[name])
    total = list(itertools.accumulate(sizes[name] for name in others))
    left_out = set(others[bisect.bisect_right(total, MOST_BYTES) :])
    if left_out:
        logger.warning(
            "%s: %d files beside the weights are not fetched, %s among them: those that no library looks for "
            "have more than %d bytes together",
            *(storage.folder, len(left_out), printable(min(left_out)), MOST_BYTES),
        )
    return [name for name in names if name not in left_out]


def _copied(files: Storage, names: Sequence[str]) -> Path:
    """A directory of this machine with all ``files``, whole, under these names; never in memory whole."""
    for file, size in zip(files.files, files.sizes, strict=True):
        if size > MOST_BYTES:
            raise CheckpointError(f"{file}: {size} bytes are too many for a file beside weights")
    within = _directory()
    with _room(within):
        within.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clear(within)
        part = Path(tempfile.mkdtemp(prefix=_ARRIVING, dir=within))
    try:
        digest = hashlib.blake2b(digest_size=16)
        for name, size, content in zip(names, files.sizes, _fetched(files, names, part), strict=True):
            digest.update(f"{len(name)} {size} {name}".encode() + content)
        place = within / digest.hexdigest()
        # By its contents: a cache is cleared by age, file by file, and others may be able to write to it.
        if not _same(place, part, names):
            with _room(place):
                _moved(part, place, names)
        return place
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fetched(files: Storage, names: Sequence[str], part: Path) -> list[bytes]:
    """Write all ``files`` into ``part``; the digest of each. Threads share one reader."""

    def fetch(file: int) -> bytes:
        digest, place = hashlib.blake2b(digest_size=16), part / names[file]
        buffer = memoryview(bytearray(min(_STEP, files.sizes[file])))
        with _room(place), _written(place) as out:
            for at in range(0, files.sizes[file], _STEP):
                piece = buffer[: min(_STEP, files.sizes[file] - at)]
                reader.read(file, at, [piece])
                digest.update(piece)
                out.write(piece)
        return digest.digest()

    with files.reader() as reader, ThreadPoolExecutor(_THREADS) as pool:
        try:
            return list(pool.map(fetch, range(len(names))))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _written(place: Path) -> Iterator[BinaryIO]:
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as file:
        yield file


@contextlib.contextmanager
def _room(place: Path) -> Iterator[None]:
    """Inside, what the file system has against a file becomes a WriteError."""
    try:
        yield
    except ZerostartError:
        raise
    except OSError as error:
        raise WriteError(
            f"{place}: the files beside the weights cannot be kept here: {error.strerror or error}; set "
            "XDG_CACHE_HOME to a directory with room"
        ) from error


def _same(place: Path, part: Path, names: Sequence[str]) -> bool:
    """Whether the files of ``place`` are those of ``part``, and no others."""
    try:
        there = {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}
        own = {name for name in there if "__pycache__" not in name}
        return own == set(names) and all(filecmp.cmp(place / n, part / n, shallow=False) for n in names)
    except OSError:
        return False


def _moved(part: Path, place: Path, names: Sequence[str]) -> None:
    """Whole or not at all: other processes write and read the same."""
    try:
        if place.exists():  # with other contents: see ``_copied``
            before = Path(tempfile.mkdtemp(prefix=_ARRIVING, dir=place.parent))
            place.rename(before / "before")
            shutil.rmtree(before, ignore_errors=True)
        part.rename(place)
    except OSError:
        if not _same(place, part, names):  # else another process was first
            raise


def _clear(within: Path) -> None:
    """Remove what processes have left that were killed while files arrived."""
    for part in within.glob(f"{_ARRIVING}*"):
        with contextlib.suppress(OSError):  # another process was first
            if time.time() - part.stat().st_mtime > _LEFT:
                shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def whole_copy(catalog: Catalog) -> Iterator[str]:
    """The directory of a checkpoint; of one at a URL a whole copy, which goes at the end of the block.

    Raises ReadError, and OSError where there is no room for it.
    """
    storage = catalog.storage
    if not storage.folder:
        yield catalog.root
        return
    with tempfile.TemporaryDirectory(prefix="zerostart-copy-") as folder:
        if catalog.root:
            shutil.copytree(catalog.root, folder, dirs_exist_ok=True)
        with storage.reader() as reader:
            for number, name in enumerate(storage.names()):
                place = Path(folder, name)
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as file:
                    for at in range(0, storage.sizes[number], _STEP):
                        buffer = bytearray(min(_STEP, storage.sizes[number] - at))
                        reader.read(number, at, [memoryview(buffer)])
                        file.write(buffer)
        if len(storage.files) > 1:
            files = storage.names()
            places = {name: files[entry.file] for name, entry in catalog.tensors.items()}
            index = {
                "metadata": {"total_size": catalog.nbytes},
                "weight_map": places,
            }
            stem = Path(files[0]).stem.partition("-")[0]
            Path(folder, f"{stem}{Path(files[0]).suffix}.index.json").write_text(json.dumps(index))
        yield folder


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _directory() -> Path:
    """Where users' programs keep what can be had again."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "zerostart" / "beside"
    try:
        return Path("~/.cache").expanduser() / "zerostart" / "beside"
    except RuntimeError as error:  # a user without a home, as in a container
        raise WriteError(
            f"{error}: set XDG_CACHE_HOME to a directory for the files beside weights"
        ) from error
