"""Run cells of a benchmark in fresh processes, with memory samples."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["CONFIG", "PEERS", "ROOT", "Samples", "evict", "benchmark_checkpoint", "run_cell", "warm"]

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "benchmarks" / "configs" / "qwen3_moe_3.4gb.json"
#: Folder of packages for the peers' arms; `make bench` installs them.
PEERS = ROOT / "build" / "peers"
SAMPLE_SECONDS = 0.005

Samples = list[tuple[float, int, int]]  # (time, anonymous bytes, mapped bytes)


def benchmark_checkpoint(layers: int | None = None) -> Path:
    """Return the benchmark's checkpoint with ``layers`` layers, written on first use."""
    settings = json.loads(CONFIG.read_text())
    name = CONFIG.stem if layers in (None, settings["num_hidden_layers"]) else f"qwen3_moe_{layers}_layers"
    folder = ROOT / "build" / "benchmark" / name
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing the checkpoint {name} (once)", flush=True)
        settings["num_hidden_layers"] = layers or settings["num_hidden_layers"]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            config.write(json.dumps(settings))
            config.flush()
            command = Path(sysconfig.get_path("scripts")) / "zerostart"
            subprocess.run([command, "synth", config.name, folder], check=True)
    return folder


def warm(checkpoint: Path) -> None:
    """Read every file once, so that it is in the page cache."""
    buffer = bytearray(8 << 20)
    for path in sorted(checkpoint.rglob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(checkpoint: Path) -> float:
    """Drop every file from the page cache; return the share of pages that remain.

    In a virtual machine this is the guest's cache; the host's cache is not dropped.
    """
    remaining = total = 0
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            resident = _resident(file.fileno(), path.stat().st_size)
        remaining, total = remaining + sum(resident), total + len(resident)
    return remaining / total


def _resident(descriptor: int, size: int) -> bytes:
    """Return one byte for each page, 1 if it is in memory (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return bytes(page & 1 for page in pages)


def run_cell(
    script: str, arguments: Sequence[str | Path], ranks: int, limit: float
) -> list[tuple[dict[str, Any], Samples]]:
    """Run one fresh group of processes; return each rank's result and memory samples."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        placeholder.close()
        results = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        command = [sys.executable, Path(__file__).with_name(script), *arguments]
        processes = [
            subprocess.Popen(
                [*command, "--result", result],
                env=_environment(rank, ranks, port),
                stdout=subprocess.DEVNULL,
            )
            for rank, result in enumerate(results)
        ]
        sampler = _Sampler([process.pid for process in processes])
        try:
            codes = [process.wait(timeout=limit) for process in processes]
        finally:
            for process in processes:
                process.kill()
            samples = sampler.stop()
        if any(codes):
            raise SystemExit(f"{script} {arguments[0]} failed with exit codes {codes}")
        return [
            (json.loads(path.read_text()), samples[process.pid])
            for path, process in zip(results, processes, strict=True)
        ]


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Compile the checkout's own code once, as pip does for the packages that it is compared with.
        "PYTHONDONTWRITEBYTECODE": "",
    }


class _Sampler:
    """Samples the resident memory of processes from outside, without slowing them."""

    def __init__(self, pids: list[int]) -> None:
        self._samples: dict[int, Samples] = {pid: [] for pid in pids}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[int, Samples]:
        """End sampling, and return the samples by process."""
        self._stopped.set()
        self._thread.join()
        return self._samples

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            for pid, samples in self._samples.items():
                try:
                    text = Path(f"/proc/{pid}/status").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue  # the process has ended
                fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("Rss"))
                if fields:
                    kinds = {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
                    mapped = kinds["RssFile"] + kinds["RssShmem"]
                    samples.append((time.monotonic(), kinds["RssAnon"], mapped))
