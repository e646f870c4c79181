"""Two hosts with a network between them: load and save, a cut cable, files that differ.

The hosts are network namespaces, joined by a pair of virtual interfaces; needs root.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).with_name("two_hosts.py")
LIMIT = 150


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


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


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, 10.231.7.1 and 10.231.7.2, with interfaces ``wire0`` and ``wire1``."""
    names = f"zs{os.getpid()}a", f"zs{os.getpid()}b"
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    sweep()
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()} (root makes them)")
    try:
        ip("-n", names[0], "link", "add", "wire0", "type", "veth", "peer", "wire1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.231.7.{number + 1}/24", "dev", f"wire{number}")
            ip("-n", name, "link", "set", f"wire{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        with ended_by_signals():
            yield names
    finally:
        for name in names:
            remove(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What both hosts see, with a checkpoint in it."""
    write(tmp_path / "checkpoint", 1.0)
    return tmp_path


def write(path: Path, scale: float) -> None:
    path.mkdir()
    weights = {"weight": torch.arange(64.0 * 64).view(64, 64) * scale, "bias": torch.arange(64.0)}
    save_file(weights, path / "model.safetensors")


def outcomes(
    hosts: tuple[str, str],
    what: str,
    folder: Path,
    *,
    ranks: tuple[int, ...] = (0, 1),
    seconds: float = 60,
    before: Mapping[int, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Run ``two_hosts.py``, a rank for each number of a host in ``ranks``; what they print."""
    running = []
    for rank, host in enumerate(ranks):
        own = {"RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": ranks[:rank].count(host)}
        own |= {"LOCAL_WORLD_SIZE": ranks.count(host), "MASTER_ADDR": "10.231.7.1", "MASTER_PORT": 29500}
        named = {"GLOO_SOCKET_IFNAME": f"wire{host}"}
        rest = {
            k: v
            for k, v in os.environ.items()
            if k not in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")
        }
        call = f'{(before or {}).get(host, ":")} && exec "$0" "$@"'
        running.append(
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", hosts[host], "sh", "-c", call),
                    *(sys.executable, str(SCRIPT), what, str(folder), str(seconds)),
                ],
                env={**rest, **named, **{name: str(value) for name, value in own.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        meanwhile()
        ended = []
        for process in running:
            out, err = process.communicate(timeout=LIMIT)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            ended.append(
                json.loads(lines[-1]) if lines else {"code": process.returncode, "output": err[-3000:]}
            )
            ended[-1]["said"] = err
        return ended
    finally:
        for process in running:
            process.kill()
            process.wait(timeout=20)


@pytest.mark.slow
def test_a_model_is_loaded_and_saved_over_two_hosts(hosts: tuple[str, str], folder: Path) -> None:
    first, second = outcomes(hosts, "whole", folder)
    assert "value" in first, first
    assert first["value"] == second["value"]
    saved = (folder / "saved/model.safetensors").read_bytes()
    from safetensors.torch import load as read

    kept = read((folder / "checkpoint/model.safetensors").read_bytes())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in read(saved).items())


@pytest.mark.slow
def test_a_cut_cable_is_an_error_on_both_sides_by_the_groups_own_time_out(
    hosts: tuple[str, str], folder: Path
) -> None:
    """Beyond the cut there is neither a rank nor the store; no socket is closed."""

    def cut() -> None:
        begun = time.monotonic()
        while len(list(folder.glob("ready*"))) < 2 and time.monotonic() - begun < LIMIT:
            time.sleep(0.1)
        ip("-n", hosts[0], "link", "set", "wire0", "down")
        (folder / "cut").touch()

    for ended in outcomes(hosts, "cut", folder, seconds=12, meanwhile=cut):
        assert ended.get("error") == "PeerError", ended
        assert "(saving the model)" in ended["text"]
        assert ended["seconds"] < 60
    assert not (folder / "saved/model.safetensors").exists()


@pytest.mark.slow
def test_checkpoints_of_the_hosts_own_that_differ_are_one_error(hosts: tuple[str, str], folder: Path) -> None:
    """At one path each host has files of its own: as large, with other bytes."""
    write(folder / "other", 2.0)
    mount = f"mount --bind {folder / 'other'} {folder / 'checkpoint'}"
    first, second = outcomes(hosts, "differ", folder, before={1: mount})
    assert "error" in first, first
    assert (first["error"], first["text"]) == (second["error"], second["text"])
    assert "model.safetensors" in first["text"]
