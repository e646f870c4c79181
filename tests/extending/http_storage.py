"""A storage of somebody else's: one file over HTTP, by requests for ranges of it."""

import http.client
import threading
from collections.abc import Hashable, Sequence
from types import TracebackType
from urllib.parse import urlsplit

from zerostart.checkpoint.storage import Reader, Storage, register_storage
from zerostart.errors import CheckpointNotFoundError, ReadError

SECONDS = 20


class HttpReader(Reader):
    """Each thread has a connection of its own. A file that is not what it was fails its ``If-Match``."""

    def __init__(self, storage: "HttpFile") -> None:
        self._storage = storage
        self._own = threading.local()
        self._made: list[http.client.HTTPConnection] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._made:
            self._made.pop().close()

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            while buffer:  # a server may give less than it was asked for
                count = self._some(file, offset, buffer)
                offset, buffer = offset + count, buffer[count:]

    def _some(self, file: int, offset: int, buffer: memoryview) -> int:
        name = self._storage.files[file]
        asked = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"}
        if self._storage.identities and self._storage.identities[file] is not None:
            asked["If-Match"] = str(self._storage.identities[file])
        try:
            connection = self._connection(name)
            connection.request("GET", urlsplit(name).path, headers=asked)
            with connection.getresponse() as answer:
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ReadError(f"reading {name} at offset {offset} failed: {error!r}") from error
        if answer.status == 412:
            raise ReadError(f"{name} was changed since the checkpoint was opened; load again")
        if answer.status != 206 or not content:
            raise ReadError(f"reading {name} at offset {offset} failed: {answer.status} {answer.reason}")
        buffer[: len(content)] = content
        return len(content)

    def _connection(self, name: str) -> http.client.HTTPConnection:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(urlsplit(name).netloc, timeout=SECONDS)
            self._made.append(self._own.connection)
        connection: http.client.HTTPConnection = self._own.connection
        return connection


@register_storage
class HttpFile(Storage):
    """What tells a file from another is the server's ETag."""

    schemes = ("web",)  #: not http: zerostart has a storage for that itself

    @classmethod
    def at(cls, source: str) -> "HttpFile":
        found = _asked(source)
        if found is None:
            raise CheckpointNotFoundError(f"{source}: the server has no such file")
        size, tag = found
        return cls((source,), (size,), (tag,))

    def reader(self, *, cold: bool = False, direct: bool = False) -> HttpReader:
        return HttpReader(self)

    def identity(self, file: int) -> Hashable:
        found = _asked(self.files[file])
        return None if found is None else found[1]


def _asked(name: str) -> tuple[int, str] | None:
    """Length and ETag of a file; None if there is none."""
    place = urlsplit(name)
    connection = http.client.HTTPConnection(place.netloc, timeout=SECONDS)
    try:
        connection.request("HEAD", place.path)
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ReadError(f"{name}: the server does not answer: {error!r}") from error
    finally:
        connection.close()
    if answer.status in (404, 410):
        return None
    if answer.status != 200:
        raise ReadError(f"{name}: the server answers {answer.status} {answer.reason}")
    return int(answer.headers["Content-Length"]), answer.headers["ETag"]
