"""A kept model beside its processes: the folder, its guard, and readers that meet deaths and strangers."""

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerostart.checkpoint.channel import PEERS, Address, connect, key_of
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.kept import folder as kept
from zerostart.checkpoint.kept.keeper import MOST_BYTES, PROTOCOL, start
from zerostart.checkpoint.kept.spans import Spans, first_gap
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import by_peers
from zerostart.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    PeerError,
    ReadError,
    WriteError,
)

SECRET = "of these tests"
ELSEWHERE = "the memory of another machine"


def test_spans_are_sets_of_bytes() -> None:
    drawn = random.Random(5)
    for _ in range(200):
        edges = sorted(drawn.sample(range(60), 2 * drawn.randrange(0, 8)))
        pairs = edges  # all differ
        spans = Spans.from_bytes(Spans(pairs).to_bytes())
        there = {
            byte for begin, end in zip(pairs[::2], pairs[1::2], strict=True) for byte in range(begin, end)
        }
        begin, end = sorted((drawn.randrange(64), drawn.randrange(64)))
        found = {byte: inside for low, high, inside in spans.pieces(begin, end) for byte in range(low, high)}
        assert found == {byte: byte in there for byte in range(begin, end)}
        assert spans.covers(begin, end) == all(found.values())
        assert spans.nbytes == len(there)
        gap = first_gap([spans], 60)
        assert gap == next((byte for byte in range(60) if byte not in there), None)
    for wrong in ([1], [3, 2], [0, 4, 2, 6], [-1, 3], [0, 4, 4, 6]):
        with pytest.raises(CheckpointError):
            Spans(wrong)


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Names for kept models, of which nothing stays."""
    made = [f"test-{secrets.token_hex(6)}" for _ in range(3)]
    yield made
    for name in made:
        kept.remove(kept.folder_of(name))


WEIGHTS = {"a": torch.arange(3000.0), "b": torch.arange(70000).to(torch.int32), "c": torch.ones(5)}


def made(
    tmp_path: Path, name: str, address: str = "", share: tuple[int, int] = (0, 1), number: int = 1
) -> tuple[bytes, str, Path]:
    """Keep ``WEIGHTS``, of whose bytes share number ``share[0]`` of ``share[1]`` are there."""
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    whole = (tmp_path / "weights.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    digests = Digests(
        [(n, {torch.float32: "F32", torch.int32: "I32"}[t.dtype], t.shape) for n, t in WEIGHTS.items()]
    )
    for tensor, values in WEIGHTS.items():
        digests.add(tensor, 0, values)
    folder = kept.folder_of(name)
    kept.claim(folder)
    terms = {"format": kept.FORMAT, "expires_at": time.time() + 600, "secret": SECRET}
    kept.write_json(folder / kept.TERMS, terms)
    path = kept.begun(folder, number, secrets.token_hex(16), len(whole), whole[:header])
    cut = [header + (len(whole) - header) * n // share[1] for n in range(share[1] + 1)]
    low, high = cut[share[0]], cut[share[0] + 1]
    with (path / kept.WEIGHTS).open("r+b") as file:
        file.seek(low)
        file.write(whole[low:high])
    pairs = [0, header, low, high] if low > header else [0, high]
    (path / kept.SPANS).write_bytes(Spans(pairs).to_bytes())
    (path / "config.json").write_text("{}")
    listening = start(folder, address)
    document = {
        "format": kept.FORMAT,
        # Machines keep under one name; here two of them are in one memory.
        "name": "model" if address else name,
        "number": number,
        "content": "c0ffee",
        # So that it is asked for, and not looked at.
        "memory": ELSEWHERE if address else kept.memory_name(),
        "nodes": [],
        "files": {kept.WEIGHTS: len(whole), "config.json": 2},
        "digests": digests.summed(),
    }
    kept.write_json(path / kept.DOCUMENT, document)
    return whole, listening.removeprefix("tcp://"), path


def read_all(source: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setenv(PEERS.variable, SECRET)
    storage = open_catalog(source).storage
    buffer = bytearray(storage.sizes[0])
    with storage.reader() as reader:
        step = len(buffer) // 7 + 1
        for at in range(0, len(buffer), step):
            reader.read(0, at, [memoryview(buffer)[at : at + step]])
    return bytes(buffer)


def guard_of(name: str) -> int:
    return int(json.loads((kept.folder_of(name) / kept.KEEPER).read_text())["pid"])


def ends(pid: int, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


def test_in_this_memory_and_by_guards_of_other_machines(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, _ = made(tmp_path, names[0])
    assert read_all(f"peer:///{names[0]}", monkeypatch) == whole
    # Each has half of the bytes.
    _, first, _ = made(tmp_path, names[1], "tcp://127.0.0.1:0", (0, 2))
    _, second, path = made(tmp_path, names[2], "tcp://127.0.0.1:0", (1, 2))
    assert read_all(f"peer://{first},{second}/model", monkeypatch) == whole
    with pytest.raises(CheckpointNotFoundError, match=r"no whole version.*is missing"):
        read_all(f"peer://{first}/model", monkeypatch)
    # Without one of them the checkpoint that is named stands in, if it has the same values.
    same = tmp_path / "weights.safetensors"
    assert read_all(f"peer://{first}/model?instead={same}", monkeypatch) == whole
    with pytest.raises(CheckpointNotFoundError, match=r"keeps 'model', not 'modle'"):
        open_catalog(f"peer://{first},{second}/modle")
    monkeypatch.setenv(PEERS.variable, "another secret")
    with pytest.raises(CheckpointNotFoundError, match="does not know the secret"):
        open_catalog(f"peer://{first}/model")
    monkeypatch.setenv(PEERS.variable, SECRET)
    storage = open_catalog(f"peer://{first},{second}/model").storage
    assert storage.names() == (kept.WEIGHTS,)
    assert storage.directory().names() == (kept.WEIGHTS, "config.json")
    # A guard stays for days beside whatever trains: it has no torch.
    assert "torch" not in Path(f"/proc/{guard_of(names[1])}/maps").read_text()
    again = storage.kept([0])
    assert again.recalled("so") is again
    kept.remove(kept.folder_of(names[2]))
    assert not path.exists()
    # Who has a version open goes on to read it, and who has not is told.
    buffer = bytearray(len(whole))
    other = f"peer://{first}/model?instead={same}"
    del storage
    with pytest.raises(ReadError, match="was removed"):
        again.recalled("so it cannot be read again")
    assert read_all(other, monkeypatch) == whole
    assert len(buffer) == len(whole)
    for wrong in ("peer://x", "peer:///a/b", "peer:///../a", "peer:///a?what=b", "peer://host:99999/a"):
        with pytest.raises((ConfigError, CheckpointNotFoundError)):
            open_catalog(wrong)


class Cut:
    """A way to a guard that ends with the answer number ``after``, and lets nobody through from then on."""

    def __init__(self, place: str, after: int) -> None:
        host, port = place.split(":")
        self._to, self._left, self._lock = (host, int(port)), after, threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def was_cut(self) -> bool:
        return self._left < 0

    def _accept(self) -> None:
        while not self.was_cut:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
            except OSError:
                return
            self._open += [near, far]
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    with self._lock:
                        self._left -= 1
                    if self.was_cut:
                        break
                target.sendall(data)
        if counts and self.was_cut:
            self.close()
            return
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.mark.slow
def test_a_peer_that_dies_at_any_message_is_replaced_or_named(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, first, _ = made(tmp_path, names[0], "tcp://127.0.0.1:0")
    _, second, _ = made(tmp_path, names[1], "tcp://127.0.0.1:0")
    same = tmp_path / "weights.safetensors"
    save_file({**WEIGHTS, "b": -WEIGHTS["b"]}, tmp_path / "other.safetensors")
    monkeypatch.setattr(by_peers, "DELAYS", (0.0,))
    cuts = 0
    while True:
        ways = [Cut(first, cuts) for _ in range(4)]
        # By another peer with the same bytes, and by a checkpoint with the same tensors.
        assert read_all(f"peer://{ways[0].place},{second}/model", monkeypatch) == whole
        try:
            assert read_all(f"peer://{ways[1].place}/model?instead={same}", monkeypatch) == whole
        except ReadError as error:  # within the header, before anything was loaded
            assert "for tensors alone" in str(error)  # noqa: PT017
        errors = (ReadError, CheckpointNotFoundError)
        alone = f"peer://{ways[2].place}/model"
        try:
            # How many pieces an answer comes in differs, and the last may be needed by nobody.
            assert read_all(alone, monkeypatch) == whole
            assert cuts > 4
        except errors as error:
            assert ways[2].was_cut
            assert "peer" in str(error)  # noqa: PT017
        instead = f"peer://{ways[3].place}/model?instead={tmp_path / 'other.safetensors'}"
        try:
            found = read_all(instead, monkeypatch)
            # Nothing of the version was read yet, or all.
            assert found in (whole, (tmp_path / "other.safetensors").read_bytes())
        except ReadError as error:
            words = ("other values than were kept", "for tensors alone")
            assert any(each in str(error) for each in words)  # noqa: PT017  # or none
        done = not any(way.was_cut for way in ways)
        for way in ways:
            way.close()
        if done:
            break
        cuts += 1 + cuts // 6
    assert cuts > 10


def test_strangers_and_the_end(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, place, path = made(tmp_path, names[0], "tcp://127.0.0.1:0", (1, 2))
    where = Address.of(place, PEERS)
    with pytest.raises(PeerError, match="does not know the secret of this kept model"):
        connect(where, key_of("wrong", where, PEERS), 5, wait=False)
    host, port = place.split(":")
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4, struct.pack("!i", 1 << 30), os.urandom(5000)):
        with socket.create_connection((host, int(port))) as raw:
            raw.settimeout(30)
            with contextlib.suppress(OSError):
                raw.sendall(junk)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(1 << 16):
                    pass
    size = len(whole)
    for ranges in (
        [[0, size]],  # what is a hole here
        [[-1, 4]],
        [[size - 1, 2]],
        [[0, 0]],
        [[0.5, 1]],
        [["0", 1]],
        [[0, 1, 2]],
        [0],
        {},
        [],
        [[0, 1]] * 5000,
        [[0, 100]] * (MOST_BYTES // 100 + 1),
        [[0, 1 << 60]],
    ):
        channel = connect(where, key_of(SECRET, where, PEERS), 5, wait=False)
        channel.send("hello", {"protocol": PROTOCOL})
        channel.receive("welcome")
        channel.send("open", {"path": str(path)})
        channel.receive("opened")
        channel.send("read", {"file": kept.WEIGHTS, "ranges": ranges})
        with pytest.raises(PeerError, match="lost"):
            channel.receive("bytes", timeout=20)
    for message, body in (
        ("open", {"path": "/etc"}),
        ("open", {"path": None}),
        ("read", {"file": "../../terms.json", "ranges": [[0, 1]]}),
        ("remove", {}),
        ("_open", {}),
    ):
        channel = connect(where, key_of(SECRET, where, PEERS), 5, wait=False)
        channel.send("hello", {"protocol": PROTOCOL})
        channel.receive("welcome")
        channel.send(message, body)
        try:
            assert channel.receive("gone", timeout=20).kind == "gone"
        except PeerError as error:
            assert "lost" in str(error)  # noqa: PT017  # or none
        channel.close()
    # It lives, and a version stays while a reader that has opened it lives.
    channel = connect(where, key_of(SECRET, where, PEERS), 5, wait=False)
    channel.send("hello", {"protocol": PROTOCOL})
    channel.receive("welcome")
    channel.send("open", {"path": str(path)})
    channel.receive("opened")
    folder = kept.folder_of(names[0])
    kept.supersede(folder, 2)
    assert path.exists()
    channel.close()
    until = time.monotonic() + 20
    while path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not path.exists()
    # Its end has come: the guard removes what it guards, and ends.
    pid = guard_of(names[0])
    kept.write_json(folder / kept.TERMS, {**kept.terms_of(folder), "expires_at": time.time()})
    assert ends(pid)
    assert not folder.exists()


def test_owners_leases_and_budgets(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, path = made(tmp_path, names[0])
    folder = kept.folder_of(names[0])
    other = f"""
import sys
from pathlib import Path
from zerostart.checkpoint.kept import folder
from zerostart.errors import WriteError
try:
    folder.claim(Path({str(folder)!r}))
except WriteError as error:
    print(error)
lease = folder.Lease(Path({str(path)!r}))
print("leased", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert (
            f"process {os.getpid()} of another job keeps a model under this name" in process.stdout.readline()
        )
        assert process.stdout.readline() == "leased\n"
        _, _, second = made(tmp_path, names[0], number=2)
        kept.supersede(folder, 2)
        assert path.exists()  # is read
        with pytest.raises(WriteError, match="budget=10 "):
            kept.check_budget(folder, 1, 10)
        kept.check_budget(folder, 10, kept.used_bytes(folder) + 10)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept.remove_superseded(folder)
    assert not path.exists()
    assert read_all(f"peer:///{names[0]}", monkeypatch) == whole
    # A half written one of an owner that is gone goes when the next one claims the name.
    half = kept.begun(folder, 3, secrets.token_hex(16), 10, b"")
    kept._owned.clear()
    fcntl_owner = second.parent / kept.OWNER
    fcntl_owner.unlink()
    kept.claim(folder)
    assert not half.exists()
    assert [version.number for version in kept.versions(folder)] == [2]
    # Somebody else's folder, or one that others can enter, is left alone.
    strange = kept.folder_of(names[1])
    strange.mkdir(mode=0o755)
    with pytest.raises(WriteError, match="others can enter it"):
        kept.claim(strange)
    for name in ("", "..", "a/b", "x" * 101, "-a"):
        with pytest.raises(ConfigError):
            kept.folder_of(name)


def test_an_end_that_never_comes_is_refused() -> None:
    from zerostart.state.keeping import KeepRequest

    for wrong in (float("inf"), float("nan"), 0.0, -1.0):
        with pytest.raises(ConfigError, match="expires_after"):
            KeepRequest(expires_after=wrong).check()
