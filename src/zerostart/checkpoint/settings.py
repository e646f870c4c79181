"""Local copies of config, tokenizer and code files at a URL.

Model libraries read such files by their paths.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.usual_names import SETTINGS, USUAL_SETTINGS
from zerostart.errors import CheckpointError, WriteError

#: Maximum size of one file in bytes; larger files that no library looks for are a user's data.
MAX_BYTES, MAX_OTHER_BYTES = 256 << 20, 32 << 20
#: Indexes and documents of saves describe weights, which are not here.
_LEFT_OUT = ("*.index.json", "*.index.*.json", "zerostart.json", "state.json", "model_index.json")
#: Files fetched at once, and bytes of one read.
_THREADS, _READ_BYTES = 8, 8 << 20


def settings_here(storage: Storage) -> str:
    """Fetch the files next to the weights; return their directory.

    Raises ReadError, CheckpointError for a file that is too long, WriteError if there is no room.
    """
    sizes = dict(zip(storage.names(), storage.sizes, strict=True))
    names = [
        name
        for name, size in sizes.items()
        if name in USUAL_SETTINGS or (size <= MAX_OTHER_BYTES and _matches(name, SETTINGS))
        if not _matches(name, _LEFT_OUT)
    ]
    return str(copied(storage, names)) if names else ""


def copied(storage: Storage, names: Sequence[str]) -> Path:
    """Fetch ``names`` into a cached local directory.

    The directory has the name of the versions of the files, so that it is fetched once.
    """
    files = storage.named(names)
    for file, size in zip(files.files, files.sizes, strict=True):
        if size > MAX_BYTES:
            raise CheckpointError(f"{file}: {size} bytes are too many for a file beside weights")
    version = repr([*zip(files.files, files.sizes, files.identities, strict=True)])
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        within = cache / "zerostart" / "beside"
        place = within / hashlib.blake2b(version.encode(), digest_size=16).hexdigest()
        # A cache may have been cleared file by file.
        if not all((place / name).is_file() for name in names):
            within.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = Path(tempfile.mkdtemp(dir=within))
            try:
                _fetch(files, names, part)
                if place.is_dir():
                    shutil.copytree(part, place, dirs_exist_ok=True)
                else:
                    part.rename(place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return place
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home, as in a container
        raise WriteError(
            f"the files beside the weights of {storage.folder} cannot be kept here: {error}; set "
            "XDG_CACHE_HOME to a directory with room"
        ) from error


def _fetch(files: Storage, names: Sequence[str], directory: Path) -> None:
    def fetch(file: int) -> None:
        place = directory / names[file]
        place.parent.mkdir(parents=True, exist_ok=True)
        buffer = memoryview(bytearray(min(_READ_BYTES, files.sizes[file])))
        with place.open("wb") as out:
            for at in range(0, files.sizes[file], _READ_BYTES):
                piece = buffer[: min(_READ_BYTES, files.sizes[file] - at)]
                reader.read(file, at, [piece])
                out.write(piece)

    with files.reader() as reader, ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fetch, range(len(names))))


@contextlib.contextmanager
def whole_copy(catalog: Catalog) -> Iterator[str]:
    """Yield a local directory of the whole checkpoint.

    Raises ReadError, and OSError if there is no room.
    """
    storage = catalog.storage
    if not storage.folder:
        yield catalog.root
        return
    with tempfile.TemporaryDirectory(prefix="zerostart-copy-") as folder:
        if catalog.root:
            shutil.copytree(catalog.root, folder, dirs_exist_ok=True)
        files = storage.names()
        _fetch(storage, files, Path(folder))
        if len(files) > 1:
            places = {name: files[entry.file] for name, entry in catalog.tensors.items()}
            index = {"metadata": {"total_size": catalog.nbytes}, "weight_map": places}
            stem = Path(files[0]).stem.partition("-")[0]
            Path(folder, f"{stem}{Path(files[0]).suffix}.index.json").write_text(json.dumps(index))
        yield folder


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
