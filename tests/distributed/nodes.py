"""Nodes of a job as network namespaces, with a network between them and a slower one to a web server.

Each node has an interface ``fabric`` (10.231.8.N) to the others and ``store`` (10.231.9.N) to the server at
10.231.9.100, which has the files; what a node gets from there a token bucket limits. Needs root.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCRIPT, ORIGIN = Path(__file__).with_name("node_rank.py"), "tests.distributed.origin"
URL = "http://10.231.9.100:8080"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass
class Nodes:
    """Namespaces ``names``, and that of the server."""

    names: list[str]
    origin: str
    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def limit(self, node: int, bits: str) -> None:
        """Let ``node`` get so many bits a second from the server."""
        subprocess.run(
            [
                *("tc", "-n", self.origin, "qdisc", "replace", "dev", f"store{node}", "root", "tbf"),
                *("rate", bits, "burst", "64k", "latency", "200ms"),
            ],
            check=True,
            capture_output=True,
            timeout=20,
        )

    def fabric(self, node: int, state: str) -> None:
        """Cut the node off from the others (``down``), or join it again (``up``)."""
        ip("-n", self.origin, "link", "set", f"fabric{node}", state)

    def start(
        self, what: str, ranks: int, settings: Mapping[str, object], seconds: float = 120
    ) -> list[subprocess.Popen[str]]:
        """``node_rank.py`` with ``ranks`` ranks on each node, node by node."""
        started = []
        for rank in range(ranks * len(self.names)):
            node = rank // ranks
            # A machine is known by the identity of its kernel, which namespaces share.
            identity = self.folder / f"identity{node}"
            identity.write_text(f"node {node}\n")
            own = {"RANK": rank, "WORLD_SIZE": ranks * len(self.names), "LOCAL_RANK": rank % ranks}
            own |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "10.231.8.1", "MASTER_PORT": 29500}
            own |= {"GLOO_SOCKET_IFNAME": "fabric", "XDG_CACHE_HOME": self.folder / f"cache{node}"}
            call = f'mount --bind {identity} /proc/sys/kernel/random/boot_id && exec "$0" "$@"'
            started.append(
                subprocess.Popen(
                    [
                        *("ip", "netns", "exec", self.names[node], "sh", "-c", call),
                        *(sys.executable, str(SCRIPT), what, json.dumps({**settings, "seconds": seconds})),
                    ],
                    env={**os.environ, **{name: str(value) for name, value in own.items()}},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        self.running += started
        return started

    def ended(self, started: list[subprocess.Popen[str]], limit: float = 150) -> list[dict[str, Any]]:
        """What each rank printed, or its exit code and the end of what it wrote."""
        told, until = [], time.monotonic() + limit
        for process in started:
            out, err = process.communicate(timeout=max(1.0, until - time.monotonic()))
            lines = [line for line in out.splitlines() if line.startswith("{")]
            told.append(json.loads(lines[-1]) if lines else {"code": process.returncode})
            told[-1]["said"] = err[-3000:]
        return told

    @contextlib.contextmanager
    def served(self, folder: Path, rate: float = 0.0) -> Iterator[dict[str, int]]:
        """The server with the files of ``folder``; bytes of ranges by path, when the block has ended."""
        sent: dict[str, int] = {}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.origin, sys.executable, "-m", ORIGIN, str(folder), str(rate)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield sent
        out, _ = process.communicate("end\n", timeout=30)
        sent |= json.loads(out)


#: The process that a namespace of these tests belongs to.
OWNER = re.compile(r"^zs(\d+)\w*")


def sweep() -> None:
    """Remove namespaces of test runs that were killed, with what still runs in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    for line in listed.splitlines():
        owner = OWNER.match(line)
        if owner is None or Path("/proc", owner[1]).exists():
            continue
        remove(owner[0])


def remove(name: str) -> None:
    """End what runs in a namespace, and the namespace."""
    left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20)
    for pid in left.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM ends a test run as Ctrl-C does: what it has made is removed."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def made(count: int, folder: Path) -> Iterator[Nodes]:
    """``count`` nodes; the test is skipped where there can be none."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("there is no `ip` or `tc` (iproute2)")
    sweep()
    nodes = Nodes([f"zs{os.getpid()}n{node}" for node in range(count)], f"zs{os.getpid()}o", folder)
    try:
        ip("netns", "add", nodes.origin)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()} (root makes them)")
    try:
        with ended_by_signals():
            _join(nodes)
            yield nodes
    finally:
        for process in nodes.running:
            process.kill()
            process.wait(timeout=20)
        for name in [*nodes.names, nodes.origin]:
            remove(name)


def _join(nodes: Nodes) -> None:
    ip("-n", nodes.origin, "link", "set", "lo", "up")
    for kind, net in (("fabric", 8), ("store", 9)):
        ip("-n", nodes.origin, "link", "add", kind, "type", "bridge")
        ip("-n", nodes.origin, "addr", "add", f"10.231.{net}.100/24", "dev", kind)
        ip("-n", nodes.origin, "link", "set", kind, "up")
    for node, name in enumerate(nodes.names):
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        for kind, net in (("fabric", 8), ("store", 9)):
            peer = f"{kind}{node}"
            ip("-n", nodes.origin, "link", "add", peer, "type", "veth", "peer", kind, "netns", name)
            ip("-n", nodes.origin, "link", "set", peer, "master", kind)
            ip("-n", nodes.origin, "link", "set", peer, "up")
            ip("-n", name, "addr", "add", f"10.231.{net}.{node + 1}/24", "dev", kind)
            ip("-n", name, "link", "set", kind, "up")
