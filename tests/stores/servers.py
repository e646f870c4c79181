"""Real servers on loopback, from the package index: rclone (HTTP, WebDAV) and SeaweedFS (S3)."""

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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], ready: str, folder: str) -> Iterator[None]:
    """``command`` until the block ends; the block begins when something answers at ``ready``."""
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
def rclone(folder: Path, kind: str, *more: str) -> Iterator[str]:
    """The address of an rclone that serves ``folder`` by http or webdav, as it is at each moment."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        located("rclone") or "rclone",
        "serve",
        kind,
        "--addr",
        address,
        "--dir-cache-time",
        "0s",
        "--buffer-size",
        "0",
        *more,
        str(folder),
    ]
    with tempfile.TemporaryDirectory() as own, running(command, f"http://{address}/", own):
        yield f"http://{address}"


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """The endpoint of an S3 server with the empty bucket ``BUCKET``."""
    with contextlib.ExitStack() as stack:
        yield _started(stack)


def _started(stack: contextlib.ExitStack, attempts: int = 3) -> str:
    """The endpoint of a server that runs until ``stack`` is closed."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    own = stack.enter_context(tempfile.TemporaryDirectory())
    names = ("master", "volume", "filer")
    # The ports of its gRPC servers too, which else are these and 10 000 more.
    ports = [f"-{name}.port={free_port()}" for name in names]
    ports += [f"-{name}.port.grpc={free_port()}" for name in (*names, "s3")]
    command = [located("weed") or "weed", "server", f"-dir={own}", "-ip=127.0.0.1", "-s3", f"-s3.port={port}"]
    # Two servers of its that nobody asks have ports of their own, which are always the same.
    command += [*ports, "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-volume.max=8", "-master.volumeSizeLimitMB=1024"]
    try:
        stack.enter_context(running(command, endpoint, own))
    except AssertionError:
        if attempts == 1:
            raise
        return _started(stack, attempts - 1)  # another program may have taken one of the ports
    for _ in range(100):
        with contextlib.suppress(OSError):
            request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            return endpoint
        time.sleep(0.2)
    raise AssertionError("the server makes no bucket: " + Path(own, "log").read_text()[-2000:])


def environment(endpoint: str) -> dict[str, str]:
    """What a user of an endpoint of one's own sets."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def environed(values: dict[str, str]) -> Iterator[None]:
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
    """Make what is below ``prefix`` what is in ``folder``."""
    bucket = store(endpoint)
    here = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    for batch in bucket.list(prefix):
        for one in batch:
            if one["path"].removeprefix(f"{prefix}/") not in here:
                bucket.delete(one["path"])
    for name in here:
        bucket.put(f"{prefix}/{name}", folder / name)


def has(command: str) -> bool:
    return located(command) is not None


def located(command: str) -> str | None:
    """The path of a command, looked for in this environment first, which need not be activated."""
    return shutil.which(command, path=str(Path(sys.executable).parent)) or shutil.which(command)


Named = Callable[[str], str]
