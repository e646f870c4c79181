"""Whatever else fsspec reads: a file system of its by the scheme, such as ``sftp``, ``hdfs`` or ``hf``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zerostart.checkpoint.manifest import MARKERS
from zerostart.checkpoint.paths import shown_url, without_secrets
from zerostart.checkpoint.storage.fsspec_uploads import (
    LASTING,
    FsspecUploads,
    connected,
    forget_connections,
    mark_of,
)
from zerostart.checkpoint.storage.objects import (
    Bucket,
    ChangedError,
    Found,
    ObjectFiles,
    PassingError,
    RefusedError,
)
from zerostart.checkpoint.storage.uploads import Uploads
from zerostart.errors import ConfigError, ReadError

#: Bytes of one request: fsspec gives an answer whole.
REQUEST = 4 << 20


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
            raise ReadError(f"{shown_url(source)}: asking the store failed: {_fault(error)}") from error
        begin = source[: source.index("://") + 3]
        key = path.rstrip("/")
        # A local path begins with the slash that the URL has as well.
        # The base is the whole URL: it says the server and the user, which paths do not.
        return (f"{begin}/", source, key.lstrip("/")) if key.startswith("/") else (begin, source, key)

    @classmethod
    def uploads(cls, url: str) -> Uploads:
        """See ``Storage``."""
        scheme = url.partition("://")[0].lower()
        if scheme == "hf":
            raise ConfigError(
                f"{shown_url(url)}: each file would be a commit of its own there; save to a directory with "
                'push_to_hub="OWNER/NAME"'
            )
        if "::" in url:
            raise ConfigError(f"{shown_url(url)}: nothing is saved into archives; name a directory")
        root, base, key = cls.places(url)
        if not key or {"", ".", ".."} & {*key.split("/")}:
            raise ConfigError(
                f"{shown_url(url)}: nothing is saved to the top of a file system, nor to names with . or ..; "
                "name another directory"
            )
        return FsspecUploads(f"{root}{key}".rstrip("/"), root=root, base=base)

    @property
    def is_saved_to(self) -> bool:
        """See ``Storage``: by what saves leave there."""
        return bool({*MARKERS} & {*self.names()})

    def bucket(self) -> Bucket:
        """See ``ObjectFiles``."""
        return _Fsspec(self.base, "/" if self.root.endswith(":///") else "")


class _Fsspec(Bucket):
    """A file system; ``begin`` is what its paths begin with and keys do not."""

    def __init__(self, base: str, begin: str) -> None:
        self._base, self._begin = base, begin

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Any]:
        """The file system, in this thread's turn; what it says of a file is another fault than its own.

        Raises FileNotFoundError, NotADirectoryError, PassingError and RefusedError.
        """
        try:
            connection = connected(self._base)
            with connection.turn:
                yield connection.system
        except (FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:  # of any library
            if isinstance(fault := _fault(error), PassingError):
                forget_connections()
            raise fault from error

    def list(self, folder: str) -> dict[str, int] | None:
        """See ``Bucket``."""
        found = self._listed(folder)
        if found is None:
            return None
        files = {str(one["name"]).removeprefix(self._begin): one for one in found if one["type"] == "file"}
        return {name: int(one["size"]) for name, one in files.items() if name != folder}

    def folders(self, folder: str) -> Sequence[str]:
        """See ``Bucket``."""
        found = [str(one["name"]) for one in self._listed(folder) or () if one["type"] == "directory"]
        return [name.removeprefix(self._begin).rstrip("/") for name in found]

    def _listed(self, folder: str) -> Any:
        """What lies right below a folder; None where the file system tells nobody."""
        try:
            with self._asked() as system:
                return system.ls(self._begin + folder, detail=True, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except RefusedError as error:
            if isinstance(error.__cause__, NotImplementedError):
                return None
            raise

    def find(self, key: str) -> Found | None:
        """See ``Bucket``. What a file system says of a file is what tells it from another."""
        try:
            with self._asked() as system:
                try:
                    told = system.info(self._begin + key, refresh=True)  # not from a list that it keeps
                except TypeError:  # of those that keep none
                    told = system.info(self._begin + key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if told["type"] != "file":
            return None
        return Found(int(told["size"]), mark_of(told))

    def stream(self, key: str, begin: int, end: int, known: Found | None) -> Iterator[bytes]:
        """See ``Bucket``. There are no conditions: it is looked at before and after."""
        for at in range(begin, end, REQUEST):
            self._check(key, known)
            with self._asked() as system:
                piece: bytes = system.cat_file(self._begin + key, start=at, end=min(end, at + REQUEST))
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
    if isinstance(error, LASTING):
        return RefusedError(words)
    return PassingError(words)
