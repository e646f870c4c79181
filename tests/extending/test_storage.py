"""Run the conformance tests on a storage of another package, and on local files."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.extending.http_storage import HttpFile
from zerostart import errors
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import Storage, register_storage
from zerostart.checkpoint.storage import base as storages
from zerostart.engines import register_engine
from zerostart.engines import registry as engines
from zerostart.engines.deepspeed.family import ZeroThree
from zerostart.models import register_model_library
from zerostart.models import registry as libraries
from zerostart.models.libraries.plain import Plain
from zerostart.testing import StorageConformance


class Ranges(BaseHTTPRequestHandler):
    """Serves ranges of a folder's files, with an ETag from size and time."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def _read_file(self) -> tuple[bytes, str] | None:
        path = self.folder / self.path.lstrip("/")
        if not path.is_file():
            self._answer(404, b"", {})
            return None
        status = path.stat()
        return path.read_bytes(), f'"{status.st_size}-{status.st_mtime_ns}"'

    def _answer(self, status: int, content: bytes, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        if (file := self._read_file()) is not None:
            self._answer(200, b"", {"Content-Length": len(file[0]), "ETag": file[1]})

    def do_GET(self) -> None:
        if (file := self._read_file()) is None:
            return
        content, tag = file
        if self.headers.get("If-Match", tag) != tag:
            self._answer(412, b"", {})
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self._answer(206 if part else 416, part, {})

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def server(folder: Path) -> Iterator[Callable[[str], str]]:
    handler = type("Handler", (Ranges,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield lambda name: f"web://127.0.0.1:{http_server.server_port}/{name}"
        finally:
            http_server.shutdown()
            thread.join()


class TestHttp(StorageConformance):
    imports = ("tests.extending.http_storage",)

    def served(self, folder: Path) -> Any:
        return server(folder)


class TestLocalFiles(StorageConformance):
    @contextmanager
    def served(self, folder: Path) -> Iterator[Callable[[str], str]]:
        yield lambda name: str(folder / name)


def test_a_torch_file_is_read_from_any_storage(tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.arange(12.0).view(3, 4).t()}, tmp_path / "model.pt")
    with server(tmp_path) as url:
        assert open_catalog(url("model.pt")).tensors == open_catalog(tmp_path / "model.pt").tensors


def test_unknown_and_duplicate_schemes_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"s9://bucket/x: nothing reads s9://"):
        open_catalog("s9://bucket/x")

    class Other(Storage):
        schemes = ("web",)

    with pytest.raises(errors.ConfigError, match="web:// is already registered"):
        register_storage(Other)
    assert register_storage(HttpFile) is HttpFile


def test_a_storage_needs_schemes_and_a_method_at() -> None:
    with pytest.raises(errors.ConfigError, match="HttpFile has no URL schemes"):
        register_storage(type("HttpFile", (HttpFile,), {"schemes": ()}))

    class Unreached(Storage):
        schemes = ("unreached",)

    with pytest.raises(errors.ConfigError, match=r"Unreached .*at\(source\)"):
        register_storage(Unreached)
    with pytest.raises(errors.ConfigError, match="nothing reads unreached://"):
        open_catalog("unreached://x")


@pytest.mark.parametrize(
    ("group", "register", "base"),
    [
        ("zerostart.storages", register_storage, HttpFile),
        ("zerostart.engines", register_engine, ZeroThree),
        ("zerostart.model_libraries", register_model_library, Plain),
    ],
)
def test_an_installed_package_owns_its_names(
    group: str, register: Any, base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the package of an entry point may register its name."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nTaken = theirs.absent:Absent\ntaken = theirs:It\n")
    monkeypatch.syspath_prepend(tmp_path)
    storages._installed.cache_clear()
    monkeypatch.setattr(storages, "_registered", dict(storages._registered))
    for registry in (engines._registry, libraries._registry):
        monkeypatch.setattr(registry, "registered", dict(registry.registered))
        points = {point.name: point for point in entry_points(group=registry.group)}
        monkeypatch.setitem(vars(registry), "installed", points)
    try:
        kind = type("Mine", (base,), {"name": "taken", "schemes": ("TAKEN",)})
        with pytest.raises(errors.ConfigError, match="is already registered"):
            register(kind)
        kind.__module__ = "theirs.parts"
        assert register(kind) is kind
    finally:
        storages._installed.cache_clear()
