"""``--download``: huggingface_hub's own client, against a hub of this machine, and without any."""

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
    "pytorch_model.bin": b"the same in another format",
}
COMMIT = hashlib.sha1(b"a commit").hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """What of the hub's protocol a snapshot needs: a revision's files, and their content."""

    asked: ClassVar[list[str]] = []

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
            self.asked.append(file)
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
        """Nothing."""


def _id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _siblings() -> list[dict[str, str]]:
    return [{"rfilename": name} for name in FILES]


@pytest.fixture
def endpoint() -> Iterator[str]:
    Hub.asked.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def inspect(source: str, cache: Path, endpoint: str, *more: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "zerostart", "inspect", source, *more], cache, endpoint)


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
def test_a_model_is_fetched_once(endpoint: str, tmp_path: Path) -> None:
    done = inspect("owner/model", tmp_path, endpoint)
    assert (done.returncode, Hub.asked) == (1, [])
    assert "--download" in done.stderr
    done = inspect("owner/model", tmp_path, endpoint, "--download", "--json")
    assert done.returncode == 0, done.stderr
    assert [tensor["name"] for tensor in json.loads(done.stdout)["tensors"]] == ["weight"]
    assert set(Hub.asked) == {"config.json", "model.safetensors"}, "what is there as safetensors, too"
    Hub.asked.clear()
    assert inspect("owner/model", tmp_path, endpoint, "--download").returncode == 0
    assert Hub.asked == []
    done = inspect("owner/other", tmp_path, endpoint, "--download")
    assert done.returncode == 1
    assert done.stderr.startswith("error: owner/other: ")
    assert "does not give this model" in done.stderr


LOAD = """
import sys, torch, zerostart
model = zerostart.load(sys.argv[1], lambda: torch.nn.Linear(2, 4, bias=False), engine="fsdp2", progress=False)
print(float(sum(t.sum() for _, t in zerostart.full_tensors(model))))
"""


@pytest.mark.slow
def test_a_load_fetches_the_files_that_the_index_lists(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the same weights in one file, nor those of other libraries; and a plan fetches nothing."""
    shard = "model-00001-of-00001.safetensors"
    more = {
        shard: FILES["model.safetensors"],
        "model.safetensors.index.json": json.dumps({"weight_map": {"weight": shard}}).encode(),
        "consolidated.safetensors": b"for somebody else",
    }
    monkeypatch.delitem(FILES, "model.safetensors")
    for name, content in more.items():
        monkeypatch.setitem(FILES, name, content)
    planned = run(["-m", "zerostart", "plan", "owner/model", "--world-size", "2"], tmp_path, endpoint)
    assert (planned.returncode, Hub.asked) == (1, [])
    done = run(["-c", LOAD, "owner/model"], tmp_path, endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8.0"
    assert set(Hub.asked) == {"config.json", "model.safetensors.index.json", shard}
