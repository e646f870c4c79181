"""``--download`` with huggingface_hub's client and a local hub."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save

FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": save({"weight": torch.ones(4, 2)}),
    "pytorch_model.bin": b"the same weights in another format",
}
COMMIT = hashlib.sha1(b"a commit").hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """Serve the hub's protocol for a snapshot download."""

    requests: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        kind, _, name = path.partition("/owner/model/")
        if kind == "/api/models" and name.startswith("revision/"):
            self._send(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": _siblings()}).encode())
        elif kind == "/api/models" and name.startswith("tree/"):
            tree = [{"type": "file", "path": k, "size": len(v), "oid": _id(v)} for k, v in FILES.items()]
            self._send(json.dumps(tree).encode())
        elif name.startswith("resolve/"):
            file = name.split("/", 2)[2]
            self.requests.append(file)
            self._send(FILES[file])
        else:
            self._send(b'{"error": "Repository not found"}', 404)

    def _send(self, content: bytes, code: int = 200) -> None:
        self.send_response(code)
        headers = {"Content-Length": str(len(content)), "ETag": f'"{_id(content)}"', "X-Repo-Commit": COMMIT}
        if code == 404:
            headers["X-Error-Code"] = "RepoNotFound"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _siblings() -> list[dict[str, str]]:
    return [{"rfilename": name} for name in FILES]


@pytest.fixture
def endpoint() -> Iterator[str]:
    Hub.requests.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def inspect(source: str, cache: Path, endpoint: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "zerostart", "inspect", source, *options], cache, endpoint)


def environment_of(cache: Path, endpoint: str) -> dict[str, str]:
    own = {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", **own}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    return environment


def run(arguments: list[str], cache: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    environment = environment_of(cache, endpoint)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_download_fetches_a_model_once(endpoint: str, tmp_path: Path) -> None:
    process = inspect("owner/model", tmp_path, endpoint)
    assert (process.returncode, Hub.requests) == (1, [])
    assert "--download" in process.stderr
    process = inspect("owner/model", tmp_path, endpoint, "--download", "--json")
    assert process.returncode == 0, process.stderr
    assert [tensor["name"] for tensor in json.loads(process.stdout)["tensors"]] == ["weight"]
    assert set(Hub.requests) == {"config.json", "model.safetensors"}, "one format"
    Hub.requests.clear()
    assert inspect("owner/model", tmp_path, endpoint, "--download").returncode == 0
    assert Hub.requests == []
    process = inspect("owner/other", tmp_path, endpoint, "--download")
    assert process.returncode == 1
    assert process.stderr.startswith("error: owner/other: ")
    assert "does not give this model" in process.stderr


LOAD = """
import sys, torch, zerostart
model = zerostart.load(sys.argv[1], lambda: torch.nn.Linear(2, 4, bias=False), engine="fsdp2", progress=False)
print(float(sum(t.sum() for _, t in zerostart.full_tensors(model))))
"""


@pytest.mark.slow
def test_load_fetches_only_files_of_the_index(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unlisted weights are fetched; a plan fetches nothing."""
    shard = "model-00001-of-00001.safetensors"
    files = {
        shard: FILES["model.safetensors"],
        "model.safetensors.index.json": json.dumps({"weight_map": {"weight": shard}}).encode(),
        "consolidated.safetensors": b"for somebody else",
    }
    monkeypatch.delitem(FILES, "model.safetensors")
    for name, content in files.items():
        monkeypatch.setitem(FILES, name, content)
    plan = run(["-m", "zerostart", "plan", "owner/model", "--world-size", "2"], tmp_path, endpoint)
    assert (plan.returncode, Hub.requests) == (1, [])
    process = run(["-c", LOAD, "owner/model"], tmp_path, endpoint)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "8.0"
    assert set(Hub.requests) == {"config.json", "model.safetensors.index.json", shard}
