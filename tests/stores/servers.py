"""Local rclone (HTTP, WebDAV) and SeaweedFS (S3) servers."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BUCKET = "bucket"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def run_server(command: list[str], ready: str, folder: str) -> Iterator[None]:
    """Run ``command``, and wait until ``ready`` answers."""
    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(ready, timeout=5).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
            if process.poll() is not None:
                break
        else:
            raise AssertionError("the server does not answer: " + Path(folder, "log").read_text()[-2000:])
        if process.poll() is not None:
            raise AssertionError("the server has ended: " + Path(folder, "log").read_text()[-2000:])
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def rclone(folder: Path, kind: str, *options: str) -> Iterator[str]:
    """Serve ``folder`` without caches; yield the address."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        locate("rclone") or "rclone",
        "serve",
        kind,
        "--addr",
        address,
        "--dir-cache-time",
        "0s",
        "--buffer-size",
        "0",
        *options,
        str(folder),
    ]
    with tempfile.TemporaryDirectory() as log_folder, run_server(command, f"http://{address}/", log_folder):
        yield f"http://{address}"


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """Run an S3 server with an empty bucket; yield the endpoint."""
    with contextlib.ExitStack() as stack:
        yield _start_seaweed(stack)


def _start_seaweed(stack: contextlib.ExitStack, attempts: int = 3) -> str:
    """Start a server on ``stack``; return its endpoint."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    names = ("master", "volume", "filer")
    # Set the gRPC ports, too, whose defaults are these plus 10 000.
    ports = [f"-{name}.port={free_port()}" for name in names]
    ports += [f"-{name}.port.grpc={free_port()}" for name in (*names, "s3")]
    command = [locate("weed") or "weed", "server", f"-dir={folder}", "-ip=127.0.0.1"]
    # Disable two servers with fixed ports.
    command += ["-s3", f"-s3.port={port}", *ports, "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-volume.max=8", "-master.volumeSizeLimitMB=1024"]
    try:
        stack.enter_context(run_server(command, endpoint, folder))
    except AssertionError:
        if attempts == 1:
            raise
        return _start_seaweed(stack, attempts - 1)  # another program may have taken one of the ports
    for _ in range(100):
        with contextlib.suppress(OSError):
            request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            return endpoint
        time.sleep(0.2)
    raise AssertionError("the server makes no bucket: " + Path(folder, "log").read_text()[-2000:])


def environment(endpoint: str) -> dict[str, str]:
    """Environment variables for a custom S3 endpoint."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def set_environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def store(endpoint: str) -> Any:
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="any",
        secret_access_key="any",
        client_options=options,
    )


def upload(folder: Path, endpoint: str, prefix: str) -> None:
    """Make the objects below ``prefix`` equal ``folder``."""
    bucket = store(endpoint)
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    for batch in bucket.list(prefix):
        for entry in batch:
            if entry["path"].removeprefix(f"{prefix}/") not in names:
                bucket.delete(entry["path"])
    for name in names:
        bucket.put(f"{prefix}/{name}", folder / name)


def has(command: str) -> bool:
    return locate(command) is not None


def locate(command: str) -> str | None:
    """Find a command, first in this environment."""
    return shutil.which(command, path=str(Path(sys.executable).parent)) or shutil.which(command)


UrlOf = Callable[[str], str]
