"""The process that guards a kept model on a machine: gives its bytes to other machines, and ends it.

``start`` has it begun by whoever keeps the model; it is a child of nobody, and goes on when all others are
gone. It needs no torch. It ends with its folder: when that is removed, or when its time has come.

Who reads proves first that it knows the secret (``checkpoint/channel.py``). Then it says ``hello``, and asks:

    versions {}                      versions {documents: [...]}, and the spans of each
    open     {path}                  opened {}, or gone {}: until the connection ends the version stays
    read     {file, ranges}          bytes: those of the ranges ``[first, bytes]``, one after the other
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

from zerostart.checkpoint.channel import HANDSHAKE, PEERS, Address, Channel, Key, Message, key_of
from zerostart.checkpoint.kept.folder import (
    GUARD,
    KEEPER,
    WEIGHTS,
    Lease,
    Version,
    guarded,
    is_over,
    is_own,
    remove,
    remove_superseded,
    terms_of,
    versions,
    without_owner,
    write_json,
)
from zerostart.checkpoint.strict_json import read_json
from zerostart.errors import ConfigError, PeerError, WriteError, ZerostartError

#: Changes with what the messages mean.
PROTOCOL = 1
#: Most bytes, and most ranges, of a request.
MOST_BYTES, MOST_RANGES = 8 << 20, 4096
#: Most connections at a time, and seconds for which one may say nothing (a load plans for minutes) or take
#: nothing of an answer.
MOST_READERS, IDLE, PATIENCE = 4096, 3600.0, 60.0
#: Seconds between two looks at the folder, and for which a guard may take to begin.
_TICK, _BEGINNING = 0.5, 60.0


def start(folder: Path, address: str) -> str:
    """Have ``folder`` guarded, and give the address at which its guard listens; empty if at none.

    One that is there already stays. ``address`` is ``tcp://HOST:PORT`` (0: any port), or empty. Raises
    WriteError, and ConfigError where the guard that is there listens elsewhere.
    """
    if not guarded(folder):
        command = [sys.executable, "-m", "zerostart.checkpoint.kept.keeper", str(folder), address]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_BEGINNING,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WriteError(f"{folder}: its guard cannot be started: {error}") from error
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
            raise WriteError(f"{folder}: its guard cannot be started: {why[0]}")
    try:
        listening = str(read_json(folder / KEEPER, "document", 1 << 16).get("address", ""))
    except (ZerostartError, OSError) as error:
        raise WriteError(f"{folder}: its guard cannot be found: {error}") from error
    if address and not _same(address, listening):
        raise ConfigError(
            f"address={address!r}: this kept model is served at {listening or 'no address'} already; drop it "
            "first"
        )
    return listening


def _same(asked: str, listening: str) -> bool:
    """Whether a guard at ``listening`` is where it is asked to be; port 0 is any."""
    if not listening:
        return False
    wanted, there = Address.of(asked, PEERS), Address.of(listening, PEERS)
    anywhere = not isinstance(wanted.place, str) and wanted.place[1] == 0
    return wanted.place[0] == there.place[0] if anywhere else wanted == there


def main(arguments: Sequence[str]) -> int:
    """Guard the folder ``arguments[0]``; returns when the guard, a process of its own, has begun."""
    folder, address = Path(arguments[0]), arguments[1]
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        with os.fdopen(ready) as answer:
            why = answer.read()
        if why != "ready":
            print(why or "it died", file=sys.stderr)
        return int(why != "ready")
    os.close(ready)
    os.setsid()
    # Ended by the end of its folder alone, and not by what ends the job that it outlives.
    for kind in (signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    os.chdir("/")
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        guard = _Guard(folder, address)
    except (ZerostartError, OSError) as error:
        os.write(told, str(error).encode())
        os._exit(1)
    os.write(told, b"ready")
    os.close(told)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    with contextlib.suppress(BaseException):
        guard.run()
    os._exit(0)


class _Guard:
    """Listens, and looks at the folder."""

    def __init__(self, folder: Path, address: str) -> None:
        if not is_own(folder):
            raise WriteError(f"{folder} is not this user's own")
        self._folder = folder
        self._lock = os.open(folder / GUARD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        until = time.monotonic() + 2
        while True:  # somebody may just look whether it is locked
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        self._inode = os.fstat(self._lock).st_ino
        self._readers = 0
        self._listener: socket.socket | None = None
        listening = ""
        if address:
            where = Address.of(address, PEERS)
            if isinstance(where.place, str):
                raise ConfigError(f"{address}: a guard listens at tcp://HOST:PORT")
            self._where = where
            self._key()
            self._listener = _listening(where)
            listening = str(Address("AF_INET", self._listener.getsockname()[:2]))
        write_json(folder / KEEPER, {"pid": os.getpid(), "address": listening})

    def _key(self) -> Key:
        # Asked anew each time: the next job that keeps here may have another secret.
        return key_of(str(terms_of(self._folder).get("secret", "")), self._where, PEERS)

    def run(self) -> None:
        """Until the folder is gone, or its time has come."""
        if self._listener is not None:
            threading.Thread(target=self._accept, name="zerostart-keeper", daemon=True).start()
        while self._is_there():
            if is_over(self._folder):
                remove(self._folder)
                return
            remove_superseded(self._folder)
            without_owner(self._folder)
            time.sleep(_TICK)

    def _is_there(self) -> bool:
        try:
            return (self._folder / GUARD).stat().st_ino == self._inode
        except OSError:
            return False

    def _accept(self) -> None:
        assert self._listener is not None, "it listens"
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)
                continue
            if self._readers >= MOST_READERS:
                raw.close()
                continue
            self._readers += 1
            try:
                # A machine that vanishes says nothing: what it has open ends within two minutes.
                for option, value in (
                    (socket.TCP_KEEPIDLE, 60),
                    (socket.TCP_KEEPINTVL, 15),
                    (socket.TCP_KEEPCNT, 4),
                ):
                    raw.setsockopt(socket.IPPROTO_TCP, option, value)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(
                    target=self._welcome, args=(raw,), name="zerostart-keeper-reader", daemon=True
                ).start()
            except (OSError, RuntimeError):  # it has gone, or no thread can be had: of one reader alone
                raw.close()
                self._readers -= 1

    def _welcome(self, raw: socket.socket) -> None:
        channel = Channel(Connection(raw.detach()), "somebody who reads", PATIENCE)
        try:
            _Reading(self._folder, channel).run(self._key())
        except (ZerostartError, OSError, ValueError, TypeError):
            pass  # of one reader, who sees the end of the connection
        finally:
            channel.close()
            self._readers -= 1


class _Opened:
    """A version that is read: its files, open once for all who read it."""

    _all: ClassVar[dict[str, _Opened]] = {}
    _lock = threading.Lock()

    def __init__(self, version: Version) -> None:
        self.version = version
        self.files: dict[str, int] = {}
        self._readers = 0
        self._lease = Lease(version.path)
        try:
            for name in version.document["files"]:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                self.files[name] = os.open(version.path / name, flags)
        except BaseException:
            self._close()
            raise

    @classmethod
    def of(cls, version: Version) -> _Opened:
        """For a further reader. Raises OSError where it is gone."""
        with cls._lock:
            found = cls._all.get(str(version.path))
            if found is None:
                found = cls._all[str(version.path)] = cls(version)
            found._readers += 1
            return found

    def leave(self) -> None:
        """One reader less."""
        with self._lock:
            self._readers -= 1
            if not self._readers:
                del self._all[str(self.version.path)]
                self._close()

    def _close(self) -> None:
        for handle in self.files.values():
            os.close(handle)
        self._lease.close()


class _Reading:
    """One who reads."""

    def __init__(self, folder: Path, channel: Channel) -> None:
        self._folder, self._channel = folder, channel
        self._opened: _Opened | None = None

    def run(self, key: Key) -> None:
        """Answer until the connection ends; raises what ends it."""
        channel = self._channel
        channel.prove(key, asking=True)
        if channel.receive("hello", timeout=HANDSHAKE).body.get("protocol") != PROTOCOL:
            channel.send(
                "refused", {"why": f"the keeper speaks protocol {PROTOCOL}: install the same zerostart"}
            )
            return
        channel.send("welcome")
        try:
            while True:
                message = channel.receive("versions", "open", "read", timeout=IDLE)
                getattr(self, f"_{message.kind}")(message)
        finally:
            if self._opened is not None:
                self._opened.leave()

    def _versions(self, _: Message) -> None:
        found = versions(self._folder)
        documents = [{**one.document, "path": str(one.path)} for one in found]
        self._channel.send("versions", {"documents": documents}, *(one.spans.to_bytes() for one in found))

    def _open(self, message: Message) -> None:
        asked = message.body.get("path")
        if self._opened is not None:
            raise PeerError("a version is open already")
        for version in versions(self._folder):
            if str(version.path) == asked:
                with contextlib.suppress(OSError):
                    self._opened = _Opened.of(version)
                    self._channel.send("opened")
                    return
        self._channel.send("gone")

    def _read(self, message: Message) -> None:
        name, ranges = message.body.get("file"), message.body.get("ranges")
        opened = self._opened
        if opened is None or not isinstance(name, str) or name not in opened.files:
            raise PeerError("no such file is open")
        version = opened.version
        if not isinstance(ranges, list) or not 0 < len(ranges) <= MOST_RANGES:
            raise PeerError("no ranges, or too many")
        size, total = int(version.document["files"][name]), 0
        for first, length in ranges:
            if type(first) is not int or type(length) is not int or first < 0 or length <= 0:
                raise PeerError("a range that is none")
            total += length
            # Of what other machines have there are holes here, which read as zeros.
            inside = (
                version.spans.covers(first, first + length) if name == WEIGHTS else first + length <= size
            )
            if not inside or total > MOST_BYTES:
                raise PeerError("bytes that are not here, or too many")
        handle = opened.files[name]
        self._channel.send("bytes", {}, b"".join(os.pread(handle, length, first) for first, length in ranges))


def _listening(where: Address) -> socket.socket:
    made = socket.socket(socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(where.place)
        made.listen(128)
    except OSError as error:
        raise ConfigError(f"nobody can listen at {where}: {error.strerror or error}") from error
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
