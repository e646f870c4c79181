"""Test two hosts: load and save, a cut cable.

The hosts are network namespaces, connected by virtual interfaces; this needs root.
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
MAX_SECONDS = 150


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


#: Name of a namespace of these tests, with the id of the process that made it.
OWNER = re.compile(r"^zs(\d+)\w*")


def remove_stale_namespaces() -> None:
    """Remove namespaces of killed test runs, with their processes."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    for line in listed.splitlines():
        owner = OWNER.match(line)
        if owner is None or Path("/proc", owner[1]).exists():
            continue
        remove_namespace(owner[0])


def remove_namespace(name: str) -> None:
    """Kill the processes in a namespace, and delete it."""
    processes = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20)
    for pid in processes.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C in the body, so that namespaces are removed."""

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
    remove_stale_namespaces()
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
        with interrupt_on_sigterm():
            yield names
    finally:
        for name in names:
            remove_namespace(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of both hosts, with a checkpoint."""
    write_checkpoint(tmp_path / "checkpoint", 1.0)
    return tmp_path


def write_checkpoint(path: Path, scale: float) -> None:
    path.mkdir()
    weights = {"weight": torch.arange(64.0 * 64).view(64, 64) * scale, "bias": torch.arange(64.0)}
    save_file(weights, path / "model.safetensors")


def run_on_hosts(
    hosts: tuple[str, str],
    job: str,
    folder: Path,
    *,
    ranks: tuple[int, ...] = (0, 1),
    seconds: float = 60,
    before: Mapping[int, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Run ``two_hosts.py`` with one rank for each host number in ``ranks``; return results."""
    running = []
    for rank, host in enumerate(ranks):
        variables = {"RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": ranks[:rank].count(host)}
        variables |= {
            "LOCAL_WORLD_SIZE": ranks.count(host),
            "MASTER_ADDR": "10.231.7.1",
            "MASTER_PORT": 29500,
        }
        gloo = {"GLOO_SOCKET_IFNAME": f"wire{host}"}
        inherited = {
            k: v
            for k, v in os.environ.items()
            if k not in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")
        }
        call = f'{(before or {}).get(host, ":")} && exec "$0" "$@"'
        running.append(
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", hosts[host], "sh", "-c", call),
                    *(sys.executable, str(SCRIPT), job, str(folder), str(seconds)),
                ],
                env={**inherited, **gloo, **{name: str(value) for name, value in variables.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        meanwhile()
        results = []
        for process in running:
            out, err = process.communicate(timeout=MAX_SECONDS)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            results.append(
                json.loads(lines[-1]) if lines else {"code": process.returncode, "output": err[-3000:]}
            )
            results[-1]["stderr"] = err
        return results
    finally:
        for process in running:
            process.kill()
            process.wait(timeout=20)


@pytest.mark.slow
def test_a_model_is_loaded_and_saved_over_two_hosts(hosts: tuple[str, str], folder: Path) -> None:
    first, second = run_on_hosts(hosts, "whole", folder)
    assert "value" in first, first
    assert first["value"] == second["value"]
    saved = (folder / "saved/model.safetensors").read_bytes()
    from safetensors.torch import load as read

    stored = read((folder / "checkpoint/model.safetensors").read_bytes())
    assert all(torch.equal(tensor, stored[name]) for name, tensor in read(saved).items())


@pytest.mark.slow
def test_a_cut_cable_is_an_error_on_both_sides_within_the_timeout(
    hosts: tuple[str, str], folder: Path
) -> None:
    """A cut closes no socket; one side also loses the store."""

    def cut_cable() -> None:
        start = time.monotonic()
        while len(list(folder.glob("ready*"))) < 2 and time.monotonic() - start < MAX_SECONDS:
            time.sleep(0.1)
        ip("-n", hosts[0], "link", "set", "wire0", "down")
        (folder / "cut").touch()

    for result in run_on_hosts(hosts, "cut", folder, seconds=12, meanwhile=cut_cable):
        assert result.get("error") == "PeerError", result
        assert re.search(r"saving the model|'arguments'", result["text"]), result
        assert result["seconds"] < 60
    assert not (folder / "saved/model.safetensors").exists()
