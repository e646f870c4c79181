"""The control wire: a Unix socket for one user, with one deadline for each wait."""

import fcntl
import json
import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.refit.test_failures import SIZE, _start
from zerostart import serving
from zerostart.errors import ConfigError, ReadError, ZerostartError
from zerostart.refit import wire
from zerostart.refit.image import Image, SharedImage, make_memory


def _model() -> nn.Module:
    weights = {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE[0])}
    return zerostart.load(weights, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)


def _receiver(engine: nn.Module, name: str = "worker") -> serving.Receiver:
    return serving.Receiver(engine, lambda pairs: engine.load_state_dict(dict(pairs)), name=name)


def test_only_the_own_user_can_use_the_socket(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with zerostart.refit(_model()) as refitter:
            path = Path(refitter.address.removeprefix("unix://"))
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not path.parent.exists()
        with zerostart.refit(_model(), f"unix://{tmp_path}/made/socket") as refitter:
            assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
            with pytest.raises(ConfigError, match="another process listens"):
                zerostart.refit(_model(), refitter.address)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen"):
        zerostart.refit(_model(), f"unix://{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


def test_other_memory_is_refused(tmp_path: Path) -> None:
    image = Image.of([("weight", "F32", (4, 4))])
    other = Image.of([("weight", "F32", (4, 5))])
    with pytest.raises(ReadError, match="sent no shared memory"):
        SharedImage(image, -1)
    with pytest.raises(ReadError, match="is not an image"):
        SharedImage(image, make_memory(other))
    # Memory that may shrink can kill its readers.
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, image.nbytes)
    with pytest.raises(ReadError, match="is not an image"):
        SharedImage(image, unsealed)
    descriptor = make_memory(image)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 1)
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    SharedImage(image, descriptor).close()


@pytest.mark.parametrize(
    ("data", "content"), [(b"", None), (b"hello", None), (b"hello", b"{}]"), (b"\0" * 64, b"[1]")]
)
def test_a_stranger_delays_no_push(data: bytes, content: bytes | None) -> None:
    model, engine = _model(), nn.Linear(SIZE[1], SIZE[0])
    with zerostart.refit(model, timeout=20) as refitter:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(refitter.address.removeprefix("unix://"))
        with tempfile.TemporaryFile() as file:
            file.write(content or b"")
            file.flush()
            socket.send_fds(stranger, [data], [] if content is None else [file.fileno()])
        thread = threading.Thread(target=serving.serve, args=(_receiver(engine), refitter.address))
        thread.start()
        start_time = time.monotonic()
        assert refitter.push().version == 1
        assert time.monotonic() - start_time < 10
        stranger.close()
    thread.join(20)


@contextmanager
def _start_serving(folder: Path, timeout: float) -> Iterator[tuple[Any, nn.Module, Any]]:
    """Yield a refit, its model, and a worker process."""
    model = _model()
    with zerostart.refit(model, timeout=timeout) as refitter:
        worker = _start(refitter.address, "worker", folder, "", 1, timeout)
        try:
            yield refitter, model, worker
        finally:
            os.kill(worker.pid, signal.SIGCONT)
            worker.kill()


def _push(refitter: Any, model: nn.Module, value: float) -> str:
    """Push ``value``; return the error text, or an empty string."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    try:
        report = refitter.push()
    except ZerostartError as error:
        return str(error)
    assert [worker.version for worker in report.workers] == [refitter.version]
    return ""


@pytest.mark.parametrize("message", ["hello", "image", "wants", "fill", "serving"])
def test_a_wire_that_is_cut_at_each_message(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has the old or the new version; the next push updates the worker that came back."""
    engine, model = nn.Linear(SIZE[1], SIZE[0]), _model()
    receiver, send, cut = _receiver(engine), wire.Channel.send, threading.Event()

    def cutting(self: wire.Channel, kind: str, *given: Any, **options: Any) -> None:
        if kind == message and cut.is_set():
            cut.clear()
            self._socket.shutdown(socket.SHUT_RDWR)
        send(self, kind, *given, **options)

    monkeypatch.setattr(wire.Channel, "send", cutting)
    with zerostart.refit(model, timeout=20) as refitter:
        how = {"timeout": 20, "patience": 20}
        thread = threading.Thread(target=serving.serve, args=(receiver, refitter.address), kwargs=how)
        thread.start()
        assert _push(refitter, model, 1.0) == ""
        cut.set()
        if message in ("hello", "image", "wants"):  # messages of a joining worker: let it join again
            server: Any = refitter._transport._server  # type: ignore[union-attr]
            server._workers[0].channel._socket.shutdown(socket.SHUT_RDWR)
        start_time = time.monotonic()
        error_text = _push(refitter, model, 2.0)
        assert time.monotonic() - start_time < 20
        assert "worker" in error_text
        state = engine.weight.detach()
        assert torch.equal(state, torch.full(SIZE, 1.0)) or torch.equal(state, torch.full(SIZE, 2.0))
        until = time.monotonic() + 20
        while _push(refitter, model, 3.0):
            assert time.monotonic() < until
        assert torch.equal(engine.weight.detach(), torch.full(SIZE, 3.0))
    thread.join(20)
    assert not cut.is_set()


@pytest.mark.slow
def test_a_worker_that_stops_is_named_and_comes_back(tmp_path: Path) -> None:
    with _start_serving(tmp_path, 3.0) as (refitter, model, worker):
        assert _push(refitter, model, 1.0) == ""
        os.kill(worker.pid, signal.SIGSTOP)
        start_time = time.monotonic()
        assert "worker" in _push(refitter, model, 2.0)
        assert time.monotonic() - start_time < 6
        os.kill(worker.pid, signal.SIGCONT)
        until = time.monotonic() + 60
        while _push(refitter, model, 3.0):
            assert time.monotonic() < until
        time.sleep(0.5)
        state = json.loads((tmp_path / "worker.json").read_text())
        assert state == {"version": refitter.version, "weight": 3.0}


def test_a_model_whose_tensors_change_is_refused() -> None:
    model, engine = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    with zerostart.refit(model, timeout=20) as refitter:
        thread = threading.Thread(target=serving.serve, args=(_receiver(engine), refitter.address))
        thread.start()
        refitter.push()
        model.append(nn.Linear(2, 2))
        with pytest.raises(ConfigError, match=r"tensors have changed since zerostart.refit was called"):
            refitter.push()
    thread.join(20)
