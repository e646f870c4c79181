"""Uploads to file systems of fsspec: local ones, ``sftp``, ``hdfs``, ``memory`` and whatever else writes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import random
import re
import threading
import time
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
#: Those of which an error is one at once: nothing is between them and this process.
_HERE = frozenset(("file", "local", "memory"))
#: Errors of which a further attempt would be another one.
LASTING = (
    *(PermissionError, FileExistsError, IsADirectoryError),
    *(TypeError, ValueError, ImportError, NotImplementedError),
)
#: Seconds before each further attempt of what a server did not answer.
DELAYS = (0.2, 1.0, 5.0)
#: Bytes that are written at a time, and most of what is sent at once, such as a note.
_STEP, _SHORT = 4 << 20, 64 << 10


@dataclass(frozen=True)
class Connection:
    """A file system of fsspec, and what to hold while it is asked."""

    system: Any
    turn: contextlib.AbstractContextManager[Any]
    #: Whether there is a server, which may have let go of the connection since it was asked last.
    is_remote: bool


def connected(base: str, sending: bool = False) -> Connection:
    """The file system of a URL, the same until ``forget_connections``. Raises what fsspec raises.

    One that is asked by one thread at a time has another connection to send long files by, so that a note
    is renewed meanwhile.
    """
    if "::" not in base:  # of several directories of one server it is one
        base = re.sub(r"(?<=://)([^/]*).*", r"\1/", base, count=1, flags=re.DOTALL)
    return _connected(base, sending, os.getpid())


@functools.lru_cache(maxsize=8)
def _connected(base: str, sending: bool, process: int) -> Connection:
    import fsspec

    # Of fsspec's own cache would come a connection that was found dead.
    known = {"use_listings_cache": False, "skip_instance_cache": True}
    try:
        system: Any = fsspec.core.url_to_fs(base, **known)[0]
    except TypeError:  # handed on to a library that does not know it
        del known["use_listings_cache"]
        system = fsspec.core.url_to_fs(base, **known)[0]
    names = {*((system.protocol,) if isinstance(system.protocol, str) else system.protocol)}
    alone = not (system.async_impl or _CONCURRENT & names)
    turn = threading.Lock() if alone else contextlib.nullcontext()
    return Connection(system, turn, not _HERE & names)


#: Has the next one who asks connect anew: a server ends connections of which nothing has come for long.
forget_connections = _connected.cache_clear


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
                if hasattr(file, "set_pipelined"):  # else paramiko waits for an answer every 32 KiB
                    file.set_pipelined(True)
                for at in range(0, len(data), _STEP):
                    file.write(bytes(data[at : at + _STEP]))

        self._asked(write, name, "uploading", sending=len(data) > _SHORT)

    def move(self, name: str, to: str) -> None:
        """See ``StagedUploads``."""
        import fsspec

        path, attempts = self._path(to), itertools.count()

        def rename(fs: Any) -> None:
            if next(attempts) and not fs.exists(self._path(name)) and fs.exists(path):
                return  # it was done, and the answer lost
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if type(fs).mv is not fsspec.AbstractFileSystem.mv:
                fs.mv(self._path(name), path)
                return
            # It would take signs in a name for those of a pattern.
            fs.cp_file(self._path(name), path)
            fs.rm_file(self._path(name))

        self._asked(rename, to, "moving into its place")

    def delete(self, name: str) -> None:
        """See ``StagedUploads``."""
        self._asked(lambda fs: fs.rm_file(self._path(name)), name, REMOVING)

    def delete_folder(self, folder: str) -> None:
        """See ``StagedUploads``: a file system refuses it for one that has something."""
        with contextlib.suppress(Exception):  # or has no folders, or none that are removed
            connection = connected(self.base)
            with connection.turn:
                connection.system.rmdir(self._path(folder))

    def _path(self, name: str) -> str:
        begin = "/" if self.root.endswith(":///") else ""
        return begin + "/".join(filter(None, (self.url[len(self.root) :].strip("/"), name)))

    def _asked(
        self, ask: Callable[[Any], T], name: str, doing: str, absent: Any = ..., sending: bool = False
    ) -> T:
        """What the file system answers; ``absent``, if that is given, where nothing is there."""
        where = f"{self.url}/{name}".rstrip("/")
        try:
            return self._answer(ask, sending)
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

    def _answer(self, ask: Callable[[Any], T], sending: bool) -> T:
        for delay in (*DELAYS, None):
            connection: Connection | None = None
            try:
                connection = connected(self.base, sending)
                with connection.turn:
                    return ask(connection.system)
            except (FileNotFoundError, NotADirectoryError, *LASTING):
                raise
            except Exception:  # of any library
                if delay is None or (connection is not None and not connection.is_remote):
                    raise
                forget_connections()
            time.sleep(delay * random.uniform(0.5, 1))
        raise AssertionError("the last attempt returns or raises")
