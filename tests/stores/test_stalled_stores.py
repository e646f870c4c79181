"""Stores that do not answer, or answer slowly."""

import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

import zerostart
from tests.ranks import rank_outcomes
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import Storage, object_store
from zerostart.errors import ReadError
from zerostart.testing.ranks import Net, save


class Server(ThreadingHTTPServer):
    """Serve one file; ``behaviour`` maps Range headers to answers."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, file: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.file, self.tag = file, '"one"'
        self.behaviour: Callable[[str], str] = lambda span: "whole"
        self.closing = Event()
        self.requests: list[tuple[str, str]] = []  #: (method, If-Match header)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        server, expected_tag = self.server, self.headers.get("If-Match", "")
        server.requests.append((self.command, expected_tag))
        behaviour = server.behaviour(self.headers.get("Range", ""))
        if behaviour == "mute":
            server.closing.wait(60)
            self.close_connection = True
            return
        data = server.file.read_bytes() if self.path == f"/{server.file.name}" else b""
        status = 404 if not data else 200
        if behaviour == "refused":
            status = 503
        # Compare the tag literally.
        elif expected_tag and expected_tag != server.tag:
            status = 412
        self.send_response(206 if status == 200 and "Range" in self.headers else status)
        if status != 200:
            data = b""
        elif match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2]), len(data) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        self.send_header("ETag", server.tag)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[: len(data) // 2] if behaviour == "half" else data)
        if behaviour == "half":
            server.closing.wait(60)
            self.close_connection = True


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(tmp_path / "model.safetensors")
    with Server(tmp_path / "model.safetensors") as server_object:
        thread = Thread(target=server_object.serve_forever)
        thread.start()
        yield server_object
        server_object.closing.set()
        server_object.shutdown()
        thread.join()


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(object_store, "RETRIES", 1)
    object_store._opened.cache_clear()


def content(storage: Storage) -> tuple[bytes, str]:
    buffer = bytearray(storage.sizes[0])
    with storage.reader() as reader:
        reader.read(0, 0, [memoryview(buffer)])
        return bytes(buffer), reader.describe_reads()


@pytest.mark.slow
@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("behaviour", ["mute", "half"])
def test_stalled_store_is_an_error(server: Server, behaviour: str) -> None:
    url = f"{server.address}/model.safetensors"
    storage, started = open_catalog(url).storage, time.monotonic()
    server.behaviour = lambda span: behaviour
    with pytest.raises(ReadError, match=re.escape(f"reading {storage.sizes[0]} bytes of {url} at offset 0")):
        content(storage)
    assert 0.4 < time.monotonic() - started < 10


@pytest.mark.slow
def test_stalled_store_is_one_error_on_all_ranks(server: Server) -> None:
    # The header is answered, later reads are not.
    server.behaviour = lambda span: "whole" if not span or span.startswith("bytes=0-") else "mute"
    outcomes = rank_outcomes(load, 2, f"{server.address}/model.safetensors", timeout=60)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.ReadError"}, outcomes
    assert len({outcome.message for outcome in outcomes}) == 1
    assert re.search(r"bytes of http://\S+/model\.safetensors at offset \d+ failed", outcomes[0].message)
    assert max(outcome.seconds for outcome in outcomes) < 20


def load(url: str) -> None:
    object_store.READ_TIMEOUT_S, object_store.RETRIES = 0.5, 1
    zerostart.load(url, model=Net, engine="fsdp2", progress=False)
