"""Uploads to file systems of fsspec: local ones, ``sftp``, ``hdfs``, ``memory`` and whatever else writes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from zerostart.checkpoint.storage.staged_uploads import StagedUploads
from zerostart.checkpoint.storage.uploads import REMOVING, MayNotRemoveError, Stored, told
from zerostart.errors import WriteError

T = TypeVar("T")
#: What file systems call what tells a file from another, and from itself once it is written to. A time of
#: the last access does not.
_TELLING = frozenset(
    (
        *("etag", "e_tag", "mtime", "modified", "last_modified", "lastmodified", "updated", "ino"),
        *("generation", "version", "md5", "sha", "sha256", "blob_id"),
        *("modify", "modificationtime", "last_write_time"),
    )
)
#: The same of those that have nothing else, for a file that is written to is made anew there.
_MADE = "created"
#: Those of them that are the moment of the last change.
_MOMENTS = (
    *("mtime", "modified", "last_modified", "lastmodified", "updated"),
    *("modify", "modificationtime", "last_write_time", _MADE),
)
#: File systems that several threads may ask at once, as all that are asynchronous within. Others have one
#: connection, or one place in a file, for all threads, and give one the bytes that another has asked for.
_CONCURRENT = frozenset(("file", "local", "memory", "hf", "hdfs", "arrow_hdfs", "webhdfs"))
_in_turn = threading.Lock()
#: Bytes that are written at a time.
_STEP = 4 << 20


def connected(base: str) -> tuple[Any, contextlib.AbstractContextManager[Any]]:
    """The file system of a URL, and what to hold while it is asked. Raises what fsspec raises."""
    import fsspec

    try:
        system: Any = fsspec.core.url_to_fs(base, use_listings_cache=False)[0]
    except TypeError:  # handed on to a library that does not know it
        system = fsspec.core.url_to_fs(base)[0]
    names = system.protocol
    alone = not (system.async_impl or _CONCURRENT & {*((names,) if isinstance(names, str) else names)})
    return system, _in_turn if alone else contextlib.nullcontext()


def mark_of(described: Mapping[str, Any]) -> str:
    """What tells a file from another, by what a file system says of it."""
    telling = {name: value for name, value in described.items() if name.lower() in _TELLING}
    telling = telling or {name: value for name, value in described.items() if name == _MADE}
    # A list may have seconds where a file by itself has a date.
    spelled = {name: str(v.timestamp() if isinstance(v, datetime) else v) for name, v in telling.items()}
    text = repr(sorted(spelled.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _moment(described: Mapping[str, Any]) -> float:
    """When a file was changed, in seconds; now where its file system does not tell."""
    known = {name.lower(): value for name, value in described.items()}
    for name in _MOMENTS:
        value = known.get(name)
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(value, datetime):
            return value.replace(tzinfo=value.tzinfo or UTC).timestamp()
        if isinstance(value, int | float):
            return value / 1000 if value > 1e11 else float(value)  # some count milliseconds
    return datetime.now(UTC).timestamp()


@functools.lru_cache(maxsize=4)
def _system(base: str) -> tuple[Any, contextlib.AbstractContextManager[Any]]:
    return connected(base)


@dataclass(frozen=True)
class FsspecUploads(StagedUploads):
    """See ``Uploads``. ``base`` is the URL with the server and the user, ``root`` what is before paths."""

    root: str = field(default="", kw_only=True)
    base: str = field(default="", repr=False, compare=False, kw_only=True)

    def listed(self, folder: str = "") -> dict[str, Stored]:
        """See ``Uploads``."""
        found = self._asked(lambda fs: fs.find(self._path(folder), detail=True), folder, "listing", {})
        top = f"{self._path('')}/"
        return {
            name[len(top) :]: Stored(int(one["size"]), mark_of(one), _moment(one))
            for name, one in found.items()
            if name.startswith(top)
        }

    def folders(self, most: int | None = None) -> list[str]:
        """See ``Uploads``."""
        found = self._asked(lambda fs: fs.ls(self._path(""), detail=True), "", "listing", [])
        names = [one["name"].rstrip("/") for one in found if one["type"] == "directory"]
        return [name.rpartition("/")[2] for name in names]

    def read(self, name: str) -> tuple[bytes, str] | None:
        """See ``Uploads``."""
        # The tag before the bytes: what is put there between has another one, and is noticed.
        if (there := self.found(name)) is None:
            return None
        data = self._asked(lambda fs: fs.cat_file(self._path(name)), name, "reading", None)
        return None if data is None else (bytes(data), there.tag)

    def found(self, name: str) -> Stored | None:
        """See ``StagedUploads``."""
        one = self._asked(lambda fs: fs.info(self._path(name)), name, "looking at", None)
        if one is None or one["type"] != "file":
            return None
        return Stored(int(one["size"]), mark_of(one), _moment(one))

    def send(self, name: str, data: bytes | memoryview) -> None:
        """See ``StagedUploads``."""
        path = self._path(name)

        def write(fs: Any) -> None:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with fs.open(path, "wb") as file:
                for at in range(0, len(data), _STEP):
                    file.write(bytes(data[at : at + _STEP]))

        self._asked(write, name, "uploading")

    def move(self, name: str, to: str) -> None:
        """See ``StagedUploads``."""
        path = self._path(to)

        def rename(fs: Any) -> None:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.mv(self._path(name), path)

        self._asked(rename, to, "moving into its place")

    def delete(self, name: str) -> None:
        """See ``StagedUploads``."""
        self._asked(lambda fs: fs.rm_file(self._path(name)), name, REMOVING)

    def delete_folder(self, folder: str) -> None:
        """See ``StagedUploads``: a file system refuses it for one that has something."""
        system, turn = _system(self.base)
        with turn, contextlib.suppress(Exception):  # or has no folders, or none that are removed
            system.rmdir(self._path(folder))

    def _path(self, name: str) -> str:
        begin = "/" if self.root.endswith(":///") else ""
        return begin + "/".join(filter(None, (self.url[len(self.root) :].strip("/"), name)))

    def _asked(self, ask: Callable[[Any], T], name: str, doing: str, absent: Any = ...) -> T:
        """What the file system answers; ``absent``, if that is given, where nothing is there."""
        where = f"{self.url}/{name}".rstrip("/")
        try:
            system, turn = _system(self.base)
            with turn:
                return ask(system)
        except (FileNotFoundError, NotADirectoryError) as error:
            if absent is not ...:
                return absent  # type: ignore[no-any-return]
            if doing == REMOVING:
                raise
            raise WriteError(f"{doing} {where} failed: {told(error)}") from error
        except (NotImplementedError, AttributeError) as error:
            raise WriteError(
                f"{doing} {where} failed: this file system of fsspec is not written to ({told(error)}); "
                "save to a local directory, or to s3://, gs:// or az://"
            ) from error
        except Exception as error:  # of any library
            kind = (
                MayNotRemoveError if isinstance(error, PermissionError) and doing == REMOVING else WriteError
            )
            raise kind(f"{doing} {where} failed: {type(error).__name__}: {told(error)}") from error
