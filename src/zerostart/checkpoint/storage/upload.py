"""Upload the files of a save to S3, Google Cloud Storage or Azure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerostart.checkpoint.paths import scheme_of, shown_url
from zerostart.checkpoint.storage import object_store
from zerostart.checkpoint.storage.object_store import STORES, ObjectFiles, error_text, open_store
from zerostart.errors import ConfigError, WriteError, ZerostartError

#: Size of an upload part in bytes; parts that one upload sends at once; maximum parts of an object.
PART_BYTES, MAX_PARTS_IN_FLIGHT, MAX_PARTS = 8 << 20, 2, 10_000


@dataclass(frozen=True)
class StoreDirectory:
    """Directory of an object store, as a save target.

    Its methods raise WriteError.
    """

    url: str
    #: URL of the bucket; may contain secrets.
    base: str = field(repr=False)
    #: Prefix of all keys in the directory: empty, or with a slash at its end.
    prefix: str = ""

    @classmethod
    def at(cls, url: str) -> StoreDirectory:
        """Parse a directory URL. Raises ConfigError."""
        if scheme_of(url) not in STORES:
            raise ConfigError(
                f"{shown_url(url)}: zerostart saves only to local directories, s3://, gs:// and az://; save "
                "to a local directory and copy it"
            )
        root, base, key = ObjectFiles.places(url)
        if key and ({"", ".", ".."} & {*key.split("/")} or re.search(r"[\x00-\x1f\x7f\\]", key)):
            raise ConfigError(
                f"{shown_url(url)}: a directory name cannot be empty, . or .., or contain a "
                "backslash or a control character; name another directory"
            )
        return cls(f"{root}{key}".rstrip("/"), base, f"{key}/" if key else "")

    def list(self) -> dict[str, int]:
        """Return the size of each object, by name."""
        import obstore

        with self._errors("", "listing"):
            batches = obstore.list(self._store, self.prefix.rstrip("/") or None)
            return {one["path"][len(self.prefix) :]: one["size"] for batch in batches for one in batch}

    def read(self, name: str) -> bytes | None:
        """Read an object, or return None."""
        import obstore

        with self._errors(name, "reading"):
            try:
                return bytes(obstore.get(self._store, self.prefix + name).bytes())
            except FileNotFoundError:
                return None

    def put(self, name: str, data: bytes | Path) -> None:
        """Upload bytes or a local file as one object."""
        import obstore

        with self._errors(name, "uploading"):
            obstore.put(
                self._store,
                self.prefix + name,
                data,
                chunk_size=PART_BYTES,
                max_concurrency=MAX_PARTS_IN_FLIGHT,
            )

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; skip those that do not exist."""
        import obstore

        for name in names:
            with self._errors(name, "deleting"), contextlib.suppress(FileNotFoundError):  # already deleted
                obstore.delete(self._store, self.prefix + name)

    @property
    def _store(self) -> Any:
        return open_store(self.base, object_store.RETRIES, writing=True)

    @contextlib.contextmanager
    def _errors(self, name: str, action: str) -> Iterator[None]:
        try:
            yield
        except ZerostartError:
            raise
        except Exception as error:  # obstore raises its own and built-in exceptions
            place = f"{self.url}/{name}".rstrip("/")
            raise WriteError(f"{action} {place} failed: {error_text(error)}") from None


class ObjectWriter:
    """Sequential upload of one object, visible after ``close``.

    The store compares the checksum of each part with the bytes that arrive (S3; others rely on TLS).
    """

    def __init__(self, directory: StoreDirectory, name: str, size: int) -> None:
        import obstore

        self._directory, self._name = directory, name
        self._file = obstore.open_writer(
            directory._store,
            directory.prefix + name,
            buffer_size=max(PART_BYTES, -(-size // MAX_PARTS)),
            max_concurrency=MAX_PARTS_IN_FLIGHT,
        )

    def write(self, data: bytes | bytearray) -> None:
        """Append a copy of the bytes. Raises WriteError."""
        with self._directory._errors(self._name, "uploading"):
            self._file.write(data)

    def close(self) -> None:
        """Complete the upload. Raises WriteError."""
        with self._directory._errors(self._name, "completing"):
            self._file.close()
