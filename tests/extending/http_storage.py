"""A storage of another package: one file over HTTP, read by ranges."""

import http.client
import threading
from collections.abc import Hashable, Sequence
from types import TracebackType
from urllib.parse import urlsplit

from zerostart.checkpoint.storage import Reader, Storage, register_storage
from zerostart.errors import CheckpointNotFoundError, ReadError

TIMEOUT_S = 20


class HttpReader(Reader):
    """Reader with one connection for each thread; ``If-Match`` detects changed files."""

    def __init__(self, storage: "HttpFile") -> None:
        self._storage = storage
        self._thread = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._connections:
            self._connections.pop().close()

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            while buffer:  # a server may return fewer bytes
                count = self._read_some(file, offset, buffer)
                offset, buffer = offset + count, buffer[count:]

    def _read_some(self, file: int, offset: int, buffer: memoryview) -> int:
        name = self._storage.files[file]
        headers = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"}
        if self._storage.identities and self._storage.identities[file] is not None:
            headers["If-Match"] = str(self._storage.identities[file])
        try:
            connection = self._connection(name)
            connection.request("GET", urlsplit(name).path, headers=headers)
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
        if not hasattr(self._thread, "connection"):
            self._thread.connection = http.client.HTTPConnection(urlsplit(name).netloc, timeout=TIMEOUT_S)
            self._connections.append(self._thread.connection)
        connection: http.client.HTTPConnection = self._thread.connection
        return connection


@register_storage
class HttpFile(Storage):
    """Storage that identifies a file by the server's ETag."""

    schemes = ("web",)  #: zerostart itself has a storage for http

    @classmethod
    def at(cls, source: str) -> "HttpFile":
        head = _request_head(source)
        if head is None:
            raise CheckpointNotFoundError(f"{source}: the server has no such file")
        size, tag = head
        return cls((source,), (size,), (tag,))

    def reader(self, *, cold: bool = False, direct: bool = False) -> HttpReader:
        return HttpReader(self)

    def identity(self, file: int) -> Hashable:
        head = _request_head(self.files[file])
        return None if head is None else head[1]


def _request_head(name: str) -> tuple[int, str] | None:
    """Return length and ETag of a file, None if it does not exist."""
    url = urlsplit(name)
    connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("HEAD", url.path)
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
