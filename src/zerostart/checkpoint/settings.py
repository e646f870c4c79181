"""What lies at a URL beside the weights (configuration, tokenizer, code), in a directory of this machine.

Libraries of models read such files by their paths. They are fetched anew each time, being small, and a
directory is called by what is in it: so a configuration never comes from another version than its weights.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.usual_names import SETTINGS, USUAL_SETTINGS
from zerostart.checkpoint.write.notes import not_delivered
from zerostart.checkpoint.write.switching import CONTENT
from zerostart.errors import CheckpointError, CheckpointNotFoundError, WriteError

#: Of one file: the longest vocabularies have some 40 MB.
MOST_BYTES = 256 << 20
#: Indexes say where weights are, which are not here; documents of saves what else was saved.
_ASIDE = ("*.index.json", "*.index.*.json", "zerostart.json", "state.json", "model_index.json")
_THREADS = 8
#: Bytes at a time of a file that is copied whole.
_STEP = 8 << 20


def settings_here(storage: Storage, weights: Storage) -> str:
    """The directory with the files beside ``weights``, which were opened before; see ``Settings``.

    Raises ReadError, CheckpointError for a file that is too long, WriteError where there is no room for them.
    """
    return Settings.fetched(storage).beside(weights)


@dataclass(frozen=True)
class Settings:
    """The files beside the weights in ``storage.folder`` as they were at a moment, in a directory here."""

    storage: Storage
    names: tuple[str, ...]
    #: The directory; empty where there are no such files.
    place: str
    #: What tells each of the files from what it is replaced by.
    marks: Mapping[str, Hashable]

    @classmethod
    def fetched(cls, storage: Storage) -> Settings:
        """Fetch them.

        Raises ReadError, CheckpointError for one that is too long, WriteError where there is no room for
        them.
        """
        sizes = dict(zip(storage.names(), storage.sizes, strict=True))
        names = [name for name in sizes if _matches(name, SETTINGS) and not _matches(name, _ASIDE)]
        # A long one that no library looks for is data of somebody's.
        names = [name for name in names if sizes[name] <= MOST_BYTES or name in USUAL_SETTINGS]
        if not names:
            return cls(storage, (), "", {})
        files = storage.named(names)
        marks = dict(zip(names, files.identities, strict=True))
        return cls(storage, tuple(names), str(_copied(files, names)), marks)

    def beside(self, weights: Storage) -> str:
        """The directory with what belongs to ``weights``, which were opened after it or before.

        A save that replaces a model makes its switch, then puts a new configuration in the place of the old
        one. Where it has not come to that yet, or was killed before it, the new one is read from where it
        lies meanwhile. Raises as ``fetched`` does.
        """
        if not self.names or not self.storage.is_saved_to:
            return self.place
        names = list(self.names)
        if waiting := not_delivered(self.storage, weights):
            with contextlib.suppress(CheckpointNotFoundError):  # it has been delivered since
                return str(_copied(self.storage.named([waiting.get(name, name) for name in names]), names))
        telling = [name for name in names if PurePosixPath(name).name in CONTENT]
        now = self.storage.named(telling)
        if waiting or list(now.identities) != [self.marks[name] for name in telling]:
            return str(copied(self.storage, names))
        return self.place


def copied(storage: Storage, names: list[str]) -> Path:
    """A directory of this machine with the files of these ``names``, whole. Raises as ``settings_here``."""
    return _copied(storage.named(names), names)


def _copied(files: Storage, names: Sequence[str]) -> Path:
    """A directory of this machine with all ``files``, whole, under these names."""
    with files.reader() as reader, ThreadPoolExecutor(_THREADS) as pool:

        def content(file: int) -> bytes:
            if files.sizes[file] > MOST_BYTES:
                raise CheckpointError(
                    f"{files.files[file]}: {files.sizes[file]} bytes are too many for a file beside weights"
                )
            buffer = bytearray(files.sizes[file])
            if buffer:
                reader.read(file, 0, [memoryview(buffer)])
            return bytes(buffer)

        contents = list(pool.map(content, range(len(names))))
    digest = hashlib.blake2b(digest_size=16)
    for name, data in zip(names, contents, strict=True):
        digest.update(f"{len(name)} {len(data)} {name}".encode() + data)
    place = _directory() / digest.hexdigest()
    wanted = dict(zip(names, contents, strict=True))
    # By its contents: a cache is cleared by age, file by file, and others may be able to write to it.
    if not _holds(place, wanted):
        _write(place, wanted)
    return place


def _holds(place: Path, contents: dict[str, bytes]) -> bool:
    """Whether these are the files of ``place``, and no others."""
    try:
        there = {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}
        own = {name for name in there if "__pycache__" not in name}
        return own == contents.keys() and all((place / n).read_bytes() == d for n, d in contents.items())
    except OSError:
        return False


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


def _write(place: Path, contents: dict[str, bytes]) -> None:
    """Whole or not at all: other processes write and read the same."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = Path(tempfile.mkdtemp(dir=place.parent))
        try:
            for name, data in contents.items():
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                (part / name).write_bytes(data)
            if place.exists():  # with other contents: see ``copied``
                place.rename(part / ".before")
                shutil.rmtree(part / ".before", ignore_errors=True)
            part.rename(place)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            if not (isinstance(error, OSError) and _holds(place, contents)):  # else another process was first
                raise
    except OSError as error:
        raise WriteError(
            f"{place}: the files beside the weights cannot be kept here: {error.strerror or error}; set "
            "XDG_CACHE_HOME to a directory with room"
        ) from error
