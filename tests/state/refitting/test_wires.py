"""The wire between a worker and the trainer is cut or stops at each message in turn, or a worker does."""

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.state.refitting.test_failures import SIZE, _start
from zerostart import serving
from zerostart.errors import PeerError, ZerostartError
from zerostart.state.refitting import refitter as refitter_module
from zerostart.state.refitting import session
from zerostart.state.refitting.transports import group

#: Seconds after which a wire that has stopped is taken for dead.
GIVEN_UP = 8.0
#: What each side says, in the order of a first push.
MESSAGES = ["hello", "image", "wants", "prepare", "prepared", "commit", "serving"]


class Wire:
    """Forwards connections to a trainer, until it comes to a message that it was told to ``cut``.

    Messages of the standard library's connections are a length and as many bytes.
    """

    def __init__(self) -> None:
        self.to: tuple[str, int] | None = None
        #: The message, and whether it is lost with the connection, half of it, or both just stop.
        self.cut: tuple[str, str] | None = None
        #: Set when it has.
        self.was_cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stopped: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._stopped):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:
                return
            try:
                assert self.to is not None
                trainer = socket.create_connection(self.to)
            except OSError:  # no trainer is there yet
                worker.close()
                continue
            for pair in ((worker, trainer), (trainer, worker)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, come: socket.socket, go: socket.socket) -> None:
        with suppress(OSError, EOFError):
            while True:
                length = _exactly(come, 4)
                data = _exactly(come, struct.unpack("!i", length)[0])
                how = self._matches(data)
                if how == "stop":
                    self._stopped += [come, go]
                    self.was_cut.set()
                    # As the system does on both sides, which asks the other one now and then.
                    threading.Timer(GIVEN_UP, lambda: [_shut(one) for one in (come, go)]).start()
                    return
                if how == "half":
                    go.sendall(length + data[: len(data) // 2])
                if how:
                    break
                go.sendall(length + data)
        for one in (come, go):
            _shut(one)
            one.close()
        if self.cut is None:
            return
        self.was_cut.set()

    def _matches(self, data: bytes) -> str:
        cut = self.cut
        if cut is None or self.was_cut.is_set() or f'"kind": "{cut[0]}"'.encode() not in data[:200]:
            return ""
        return cut[1]


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := connection.recv(count - len(data))):
            raise EOFError
        data += part
    return data


@contextmanager
def _served(
    folder: Path, transport: str, timeout: float, full_every: int = 1
) -> Iterator[tuple[Any, nn.Module, Wire, Any]]:
    """A refit, its model, and the wire by which one worker is connected with it."""
    weights = {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE[0])}
    model = zerostart.load(weights, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)
    wire = Wire()
    refitter: Any = zerostart.refit(
        model, "tcp://127.0.0.1:0", transport=transport, timeout=timeout, full_every=full_every
    )
    with refitter:
        wire.to = ("127.0.0.1", int(str(refitter.address).rpartition(":")[2]))
        worker = _start(wire.address, "worker", folder, "", 1, timeout)
        try:
            yield refitter, model, wire, worker
        finally:
            os.kill(worker.pid, signal.SIGCONT)
            worker.kill()
            wire.close()


def _set(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _push(refitter: Any, model: nn.Module, value: float) -> str:
    """What a push of ``value`` fails with; empty where it does not."""
    _set(model, value)
    try:
        report = refitter.push()
    except PeerError as error:
        return str(error)
    assert [worker.version for worker in report.workers] == [refitter.version]
    return ""


def _holds(folder: Path, accepted: Callable[[dict[str, float]], bool]) -> None:
    """Wait until the worker has noted what is ``accepted``."""
    until = time.monotonic() + 30
    while True:
        with suppress(FileNotFoundError):
            if accepted(json.loads((folder / "worker.json").read_text())):
                return
        assert time.monotonic() < until, (folder / "worker.json").read_text()
        time.sleep(0.02)


@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    ("how", "transport"),
    [
        ("all", "shared_memory"),
        *(
            pytest.param(how, transport, marks=pytest.mark.slow)
            for how, transport in [
                *(("half", "shared_memory"), ("stop", "shared_memory")),
                *((how, "group") for how in ("all", "half", "stop")),
            ]
        ),
    ],
)
def test_a_wire_that_is_cut_at_each_message(how: str, transport: str, tmp_path: Path) -> None:
    timeout = 3.0 if how == "stop" else 20.0
    with _served(tmp_path, transport, timeout) as (refitter, model, wire, _):
        assert _push(refitter, model, 1.0) == ""
        for number, message in enumerate(MESSAGES):
            old, new = 10.0 * number + 1, 10.0 * number + 2
            if number:
                assert _push(refitter, model, old) == ""
            before = refitter.version
            wire.was_cut.clear()
            wire.cut = message, how
            if message in ("hello", "image", "wants"):  # of a worker that comes: have it come again
                refitter._session.workers["worker"].channel.close()
            begun = time.monotonic()
            said = _push(refitter, model, new)
            assert time.monotonic() - begun < 6 * timeout
            if message == "serving" or said:
                # The old version or the new, whole; the push says which of both it may be.
                decided = message in ("commit", "serving")
                assert not said or ("decided" in said) == decided, (message, said)
                value, version = (new, before + 1) if decided else (old, before)
                _holds(tmp_path, lambda held, v=value, n=version: held == {"version": n, "weight": v})  # type: ignore[misc]
            # A push that found the worker gone has not waited for it to come again, and to be cut.
            assert how != "stop" or wire.was_cut.wait(30), message
            # The next pushes succeed: the worker has connected again, or does.
            wire.cut = None
            until = time.monotonic() + (90 if how == "stop" else 30)  # a group is waited for, too
            while said := _push(refitter, model, new + 1):
                assert time.monotonic() < until, (message, said)
            assert wire.was_cut.is_set(), message
            _holds(tmp_path, lambda held, v=new + 1: held["weight"] == v)  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shared_memory", "group"])
def test_a_worker_that_stops_is_named_and_comes_back(transport: str, tmp_path: Path) -> None:
    with _served(tmp_path, transport, 3.0) as (refitter, model, _, worker):
        assert _push(refitter, model, 1.0) == ""
        os.kill(worker.pid, signal.SIGSTOP)
        begun = time.monotonic()
        said = _push(refitter, model, 2.0)
        assert "worker" in said
        assert time.monotonic() - begun < 20
        os.kill(worker.pid, signal.SIGCONT)
        until = time.monotonic() + 60
        while True:
            with suppress(ZerostartError):
                if _push(refitter, model, 3.0) == "":
                    break
            assert time.monotonic() < until
        _holds(tmp_path, lambda held: held["weight"] == 3.0 and held["version"] == refitter.version)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shared_memory", "group"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_pushes_go_on_without_a_worker_that_stops(first: bool, transport: str, tmp_path: Path) -> None:
    """Two of three at once, while the transport is ``first`` opened for them, or when it has been."""
    address, names = f"unix://{tmp_path}/workers", ["goes-on", "stops", "stops-too"]
    model = zerostart.load(
        {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE[0])},
        lambda: nn.Linear(SIZE[1], SIZE[0]),
        engine="fsdp2",
        progress=False,
    )
    refitter: Any = zerostart.refit(model, address, workers=3, transport=transport, timeout=5.0)
    with refitter:
        workers = [_start(address, name, tmp_path, "", 1, 60.0) for name in names]
        try:
            refitter._session.wait_for(3, 60)
            if not first:
                assert sorted(worker.name for worker in refitter.push().workers) == names
            for worker in workers[1:]:
                os.kill(worker.pid, signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(PeerError, match=r"worker.* stops\b"):
                refitter.push()
            if transport == "group" and not first:  # the other one is absent from the next group
                with pytest.raises(PeerError, match="worker stops"):
                    refitter.push()
            # They are waited for together, and not one after the other.
            assert time.monotonic() - begun < (60 if transport == "group" else 9)
            begun = time.monotonic()
            assert [worker.name for worker in refitter.push().workers] == names[:1]
            assert time.monotonic() - begun < 10
            for worker in workers[1:]:
                os.kill(worker.pid, signal.SIGCONT)
            until, there = time.monotonic() + 60, 1
            while there < 3:
                assert time.monotonic() < until
                time.sleep(0.2)
                there = len(refitter.push().workers)
        finally:
            for worker in workers:
                os.kill(worker.pid, signal.SIGCONT)
                worker.kill()


def test_more_workers_come_at_once_than_are_welcomed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE[0])}
    model = zerostart.load(weights, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)
    monkeypatch.setattr(session, "MOST_STRANGERS", 1)
    served: list[int | None] = []

    def worker(number: int, address: str) -> None:
        engine = nn.Linear(SIZE[1], SIZE[0])

        def load(pairs: Any) -> None:
            time.sleep(0.3)
            engine.load_state_dict(dict(pairs))

        served.append(serving.serve(serving.Receiver(engine, load, name=f"{number}"), address, timeout=20))

    with zerostart.refit(model, workers=6, timeout=20) as refitter:
        threads = [
            threading.Thread(target=worker, args=(number, refitter.address), daemon=True)
            for number in range(6)
        ]
        for thread in threads:
            thread.start()
        assert len(refitter.push().workers) == 6
    for thread in threads:
        thread.join(20)
    assert served == [1] * 6


def test_a_worker_that_found_the_trainer_late_waits_for_pushes_as_long_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does that waited for another trainer, and whose patience had nearly ended."""
    weights = {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE[0])}
    model = zerostart.load(weights, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)
    engine, write_out = nn.Linear(SIZE[1], SIZE[0]), refitter_module.write_out

    def slow(*given: Any) -> int:
        time.sleep(0.6)
        return write_out(*given)

    monkeypatch.setattr(refitter_module, "write_out", slow)
    receiver = serving.Receiver(engine, lambda pairs: engine.load_state_dict(dict(pairs)))
    with zerostart.refit(model, timeout=20) as refitter:
        connected: list[serving.Connection] = []

        def follow() -> None:
            connected.append(serving.Connection(receiver, refitter.address, timeout=20, within=0.3))
            connected[0].follow()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        refitter.push()
        thread.join(20)
        connected[0].close()
    assert receiver.version == 1


def _sockets() -> dict[str, int]:
    """The TCP and Unix sockets of this process: by the system's number of one its descriptor."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = str(descriptor.readlink())
            if name.startswith("socket:"):
                found[name] = int(descriptor.name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("full_every", [1, 9], ids=["full", "delta"])
def test_the_groups_own_wire_is_cut_at_each_message(
    full_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections of gloo and of its store, all at once: the session's stands."""
    transmit, left, before = group._Parcel._transmit, 0, set[str]()

    def cutting(parcel: group._Parcel, tensor: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            for name, descriptor in _sockets().items():
                if name not in before:
                    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                        one.getpeername()  # what listens is no wire
                        one.shutdown(socket.SHUT_RDWR)
        transmit(parcel, tensor)

    monkeypatch.setattr(group._Parcel, "_transmit", cutting)
    with _served(tmp_path, "group", 10.0, full_every) as (refitter, model, _, _):
        refitter._session.wait_for(1, 30)
        before.update(_sockets())
        assert _push(refitter, model, 1.0) == ""
        for message in (1, 2, 3, 4):
            assert _push(refitter, model, 10.0 * message) == ""
            version, left = refitter.version, message
            said = _push(refitter, model, 10.0 * message + 1)
            # What was sent last may be there all the same.
            assert said or message == 4
            if said:
                assert "worker" in said
                held = {"version": version, "weight": 10.0 * message}
                _holds(tmp_path, lambda found, held=held: found == held)  # type: ignore[misc]
            until = time.monotonic() + 60
            while _push(refitter, model, 10.0 * message + 2):
                assert time.monotonic() < until
            _holds(tmp_path, lambda found, value=10.0 * message + 2: found["weight"] == value)  # type: ignore[misc]


@pytest.mark.parametrize("message", ["image", "wants"])
def test_a_trainer_that_goes_while_a_worker_joins_is_waited_for(message: str) -> None:
    """Though it is the first that the worker has found."""
    model, engine, wire = nn.Linear(3, 2), nn.Linear(3, 2), Wire()
    receiver = serving.Receiver(engine, lambda pairs: engine.load_state_dict(dict(pairs)))
    served = list[int | None]()
    worker = threading.Thread(
        target=lambda: served.append(serving.serve(receiver, wire.address, timeout=10, patience=10))
    )
    with zerostart.refit(model, "tcp://127.0.0.1:0", timeout=10) as refitter:
        wire.to, wire.cut = ("127.0.0.1", int(refitter.address.rpartition(":")[2])), (message, "all")
        worker.start()
        assert wire.was_cut.wait(10)
        refitter.push()
    worker.join(10)
    wire.close()
    assert served == [1]
    assert torch.equal(engine.weight, model.weight)
