"""Whatever else fsspec reads: a file system of its by the scheme, such as ``sftp``, ``hdfs`` or ``hf``."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerostart.checkpoint.paths import shown_url, without_secrets
from zerostart.checkpoint.storage.objects import (
    Bucket,
    ChangedError,
    Found,
    ObjectFiles,
    PassingError,
    RefusedError,
)
from zerostart.errors import ConfigError, ReadError

#: Bytes of one request: fsspec gives an answer whole.
REQUEST = 4 << 20
#: What file systems call what tells a file from another, and from itself once it is written to. A time of
#: the last access does not.
_TELLING = frozenset(
    (
        *("etag", "e_tag", "mtime", "modified", "last_modified", "lastmodified", "updated", "ino"),
        *("generation", "version", "md5", "sha", "sha256", "blob_id"),
        *("modify", "modificationtime", "last_write_time"),
    )
)
#: File systems that several threads may ask at once, as all that are asynchronous within. Others have one
#: connection, or one place in a file, for all threads, and give one the bytes that another has asked for.
_CONCURRENT = frozenset(("file", "local", "memory", "hf", "hdfs", "arrow_hdfs", "webhdfs"))
_in_turn = threading.Lock()


@dataclass(frozen=True)
class FsspecFiles(ObjectFiles):
    """See ``ObjectFiles``. ``root`` is the scheme alone, and keys are paths as the file system has them."""

    buffer = 2 * REQUEST

    @classmethod
    def places(cls, source: str) -> tuple[str, str, str]:
        """See ``ObjectFiles``.

        Raises ConfigError where the package of the file system is not installed, and ReadError where its
        server is not there.
        """
        import fsspec

        scheme = source.partition("://")[0]
        try:
            _, path = fsspec.core.url_to_fs(source)
        except (ImportError, ValueError) as error:
            told = without_secrets(str(error))
            raise ConfigError(f"{scheme}:// is read by fsspec, which says: {told}") from error
        except Exception as error:  # some ask the server at once
            raise ReadError(f"{shown_url(source)}: the store does not answer: {_fault(error)}") from error
        begin = source[: source.index("://") + 3]
        key = path.rstrip("/")
        # A local path begins with the slash that the URL has as well.
        # The base is the whole URL: it says the server and the user, which paths do not.
        return (f"{begin}/", source, key.lstrip("/")) if key.startswith("/") else (begin, source, key)

    def bucket(self) -> Bucket:
        """See ``ObjectFiles``."""
        return _Fsspec(self.base, "/" if self.root.endswith(":///") else "")


class _Fsspec(Bucket):
    """A file system; ``begin`` is what its paths begin with and keys do not."""

    def __init__(self, base: str, begin: str) -> None:
        import fsspec

        try:
            try:
                self._system: Any = fsspec.core.url_to_fs(base, use_listings_cache=False)[0]
            except TypeError:  # handed on to a library that does not know it
                self._system = fsspec.core.url_to_fs(base)[0]
        except Exception as error:  # some ask the server at once
            raise _fault(error) from error
        self._begin = begin
        names = self._system.protocol
        alone = not (
            self._system.async_impl or _CONCURRENT & {*((names,) if isinstance(names, str) else names)}
        )
        self._turn = _in_turn if alone else contextlib.nullcontext()

    def list(self, folder: str) -> dict[str, int] | None:
        """See ``Bucket``."""
        try:
            with self._turn:
                found = self._system.ls(self._begin + folder, detail=True, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except NotImplementedError:
            return None
        except Exception as error:
            raise _fault(error) from error
        files = {str(one["name"]).removeprefix(self._begin): one for one in found if one["type"] == "file"}
        return {name: int(one["size"]) for name, one in files.items() if name != folder}

    def find(self, key: str) -> Found | None:
        """See ``Bucket``. What a file system says of a file is what tells it from another."""
        try:
            with self._turn:
                try:
                    told = self._system.info(self._begin + key, refresh=True)  # not from a list that it keeps
                except TypeError:  # of those that keep none
                    told = self._system.info(self._begin + key)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _fault(error) from error
        if told["type"] != "file":
            return None
        text = repr(sorted((name, str(value)) for name, value in told.items() if name.lower() in _TELLING))
        return Found(int(told["size"]), hashlib.blake2b(text.encode(), digest_size=8).hexdigest())

    def stream(self, key: str, begin: int, end: int, known: Found | None) -> Iterator[bytes]:
        """See ``Bucket``. There are no conditions: it is looked at before and after."""
        for at in range(begin, end, REQUEST):
            self._check(key, known)
            try:
                with self._turn:
                    piece: bytes = self._system.cat_file(
                        self._begin + key, start=at, end=min(end, at + REQUEST)
                    )
            except FileNotFoundError:
                raise
            except Exception as error:
                raise _fault(error) from error
            self._check(key, known)
            if len(piece) > (wanted := min(end, at + REQUEST) - at):
                raise RefusedError("it gives no ranges of files; copy the checkpoint to a local directory")
            yield piece
            if len(piece) < wanted:  # what follows does not belong behind it
                return

    def _check(self, key: str, known: Found | None) -> None:
        found = self.find(key)
        if found is None:
            raise FileNotFoundError(key)
        if known is not None and found != known:
            raise ChangedError(
                f"it has {found.size} bytes now and had {known.size}"
                if found.size != known.size
                else "it was written to"
            )


def _fault(error: Exception) -> PassingError | RefusedError:
    words = without_secrets(f"{type(error).__name__}: {error}")
    if isinstance(error, (PermissionError, TypeError, ValueError, ImportError, NotImplementedError)):
        return RefusedError(words)
    return PassingError(words)
