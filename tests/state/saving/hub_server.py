"""A server that speaks the part of the hub's protocol by which huggingface_hub uploads a model.

Repositories are made, small files come in the commit itself (base64, newline-delimited JSON), large ones by
git-LFS: https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md, of which content is addressed by its
SHA-256.
"""

import base64
import hashlib
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by their ids, whether each is private, and what has been committed to it by its path."""

    def __init__(self, slow: float = 0.0) -> None:
        """``slow``: seconds that a commit takes."""
        super().__init__(("127.0.0.1", 0), _Answer)
        self.slow = slow
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """That of a process whose hub this is."""
        # Xet is a binary protocol of its own; without it the client takes git-LFS.
        own = {"HF_HOME": str(home), "HF_ENDPOINT": self.endpoint, "HF_TOKEN": "hf_ours"}
        own["HF_HUB_DISABLE_XET"] = "1"
        told = {**os.environ, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **own}
        return {name: value for name, value in told.items() if name != "HF_HUB_CACHE"}


@contextmanager
def serving(slow: float = 0.0) -> Iterator[Hub]:
    """A hub on this machine."""
    with Hub(slow) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        repository = self.path.removeprefix("/api/models/").partition("/revision")[0]
        if repository not in self.server.private:
            self._send({"error": "no such repository"}, 404)
            return
        siblings = [{"rfilename": name} for name in self.server.files[repository]]
        self._send({"id": repository, "private": self.server.private[repository], "siblings": siblings})

    def do_PUT(self) -> None:
        body = self._body()
        oid = self.path.rpartition("/")[2]
        right = hashlib.sha256(body).hexdigest() == oid
        if right:
            self.server.large[oid] = body
        self._send({}, 200 if right else 400)

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        repository = path.removeprefix("/api/models/")
        if self.headers.get("Authorization") != "Bearer hf_ours":
            self._send({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif "/preupload/" in repository:
            self._send({"files": [_mode(file) for file in json.loads(body)["files"]]})
        elif "/paths-info/" in repository:
            self._send([])
        elif "/commit/" in repository:
            self._commit(repository.partition("/commit/")[0], body)
        else:
            self._send({"error": f"this hub knows nothing of {path}"}, 404)

    def _create(self, asked: Mapping[str, Any]) -> None:
        repository = f"{asked.get('organization') or 'me'}/{asked['name']}"
        there = repository in self.server.private
        if not there:
            private = asked.get("visibility") == "private" or asked.get("private") is True
            self.server.private[repository], self.server.files[repository] = private, {}
        url = f"{self.server.endpoint}/{repository}"
        self._send({"url": url, "name": repository, "id": "1"}, 409 if there else 200)

    def _batch(self, asked: Mapping[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            upload = {"href": f"{self.server.endpoint}/large/{one['oid']}"}
            objects.append({**one, "authenticated": True, "actions": {"upload": upload}})
        self._send({"transfer": "basic", "objects": objects})

    def _commit(self, repository: str, body: bytes) -> None:
        time.sleep(self.server.slow)
        files = self.server.files[repository]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        url = f"{self.server.endpoint}/{repository}/commit/{COMMIT}"
        self._send({"success": True, "commitUrl": url, "commitOid": COMMIT, "hookOutput": ""})


def _mode(file: Mapping[str, Any]) -> dict[str, Any]:
    large = file["path"].endswith(".safetensors")
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
