"""Compare ways to bring a checkpoint from the page cache into a sharded model, and write the results down.

    python benchmarks/load.py [--checkpoint DIR] [--ranks 2] [--repeats 5] [--arms ...] [--out FILE]

Every cell is a fresh group of processes; the arms alternate; before each cell all files are read once, so
that they are in the page cache. The figure of a cell is that of its slowest rank. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from arms import ARMS, USUAL
from table import summarise, write_results

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "benchmarks" / "configs" / "qwen3_moe_3.4gb.json"
SAMPLE_SECONDS = 0.005


def main() -> None:
    options = arguments()
    checkpoint = options.checkpoint or made_checkpoint(ROOT / "build" / "benchmark" / CONFIG.stem)
    cells: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in options.arms}
    digests: dict[str, list[Any]] = {}
    for repeat in range(options.repeats):
        order = options.arms if repeat % 2 == 0 else options.arms[::-1]
        for arm in order:
            flags = ["--digest"] * (repeat == 0) + ["--as-found"] * options.as_found
            ranks = run_cell(arm, checkpoint, options.ranks, flags, options.limit)
            if repeat == 0 and "digest" in ranks[0]:
                digests[arm] = [cell.pop("digest") for cell in ranks]
            cells[arm].append(ranks)
            slowest = max(cell["seconds"] for cell in ranks)
            print(f"repeat {repeat + 1}/{options.repeats}  {arm:<20} {slowest:7.2f} s", flush=True)
    agreement = compare_digests(digests)
    summary = summarise(cells)
    write_results(summary, cells, agreement, checkpoint, options.ranks, options.repeats, options.out)
    if any(not agreed for agreed in agreement.values()):
        sys.exit(f"arms of one layout hold different weights: {agreement}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of loading a checkpoint into a sharded model.")
    parser.add_argument("--checkpoint", type=Path, help="default: made with `zerostart synth` on first use")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(USUAL))
    parser.add_argument("--limit", type=float, default=600, help="seconds that a cell may take")
    parser.add_argument("--as-found", action="store_true", help="do not touch free memory before a cell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "load.json")
    return parser.parse_args()


def made_checkpoint(folder: Path) -> Path:
    """The benchmark's checkpoint, written on first use."""
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing the checkpoint of {CONFIG.name} (once)", flush=True)
        command = Path(sysconfig.get_path("scripts")) / "zerostart"
        subprocess.run([command, "synth", CONFIG, folder], check=True)
    return folder


def warm(checkpoint: Path) -> None:
    """Read every file once, in a process's own time, so that it lies in the page cache."""
    buffer = bytearray(8 << 20)
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run_cell(arm: str, checkpoint: Path, ranks: int, flags: list[str], limit: float) -> list[dict[str, Any]]:
    """One fresh group of processes. Returns one record a rank, with the peaks of its memory."""
    warm(checkpoint)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        placeholder.close()
        results = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        processes = [
            start_rank(arm, checkpoint, rank, ranks, port, results[rank], flags) for rank in range(ranks)
        ]
        sampler = Sampler([process.pid for process in processes])
        try:
            codes = [process.wait(timeout=limit) for process in processes]
        finally:
            for process in processes:
                process.kill()
            samples = sampler.stop()
        if any(codes):
            raise SystemExit(f"{arm} failed with exit codes {codes}")
        cells = [json.loads(path.read_text()) for path in results]
    for cell, process in zip(cells, processes, strict=True):
        cell["peak"] = peaks(cell, samples[process.pid])
    return cells


def start_rank(
    arm: str, checkpoint: Path, rank: int, ranks: int, port: int, result: Path, flags: list[str]
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
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
    }
    command = [sys.executable, Path(__file__).with_name("arms.py"), arm]
    command += ["--checkpoint", checkpoint, "--result", result, *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


class Sampler:
    """Samples the resident memory of processes from outside, so that no rank has to share its time."""

    def __init__(self, pids: list[int]) -> None:
        self._samples: dict[int, list[tuple[float, int, int]]] = {pid: [] for pid in pids}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[int, list[tuple[float, int, int]]]:
        """End sampling. Returns by process (time, anonymous bytes, mapped bytes)."""
        self._stopped.set()
        self._thread.join()
        return self._samples

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            for pid, samples in self._samples.items():
                try:
                    text = Path(f"/proc/{pid}/status").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue  # It has ended.
                fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("Rss"))
                if fields:
                    kinds = {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
                    mapped = kinds["RssFile"] + kinds["RssShmem"]
                    samples.append((time.monotonic(), kinds["RssAnon"], mapped))


def peaks(cell: dict[str, Any], samples: list[tuple[float, int, int]]) -> dict[str, int]:
    """Peaks above the level before the load: anonymous, mapped, and both together at one moment."""
    before = cell["before"]
    mapped_before = before["RssFile"] + before["RssShmem"]
    after = cell["after"]
    inside = [(a, m) for at, a, m in samples if cell["started"] <= at <= cell["ended"]]
    inside.append((after["RssAnon"], after["RssFile"] + after["RssShmem"]))
    return {
        "anonymous": max(a for a, _ in inside) - before["RssAnon"],
        "mapped": max(m for _, m in inside) - mapped_before,
        "resident": max(a + m for a, m in inside) - before["RssAnon"] - mapped_before,
        "high_water": after["VmHWM"] - before["RssAnon"] - mapped_before,
        "samples": len(inside),
    }


def compare_digests(digests: dict[str, list[Any]]) -> dict[str, bool]:
    """Whether ours and the peer's hold the same weights on every rank, by engine."""
    pairs = {
        "deepspeed": ("zerostart-deepspeed", "stock-deepspeed"),
        "fsdp2": ("zerostart-fsdp2", "native-fsdp2"),
    }
    return {
        engine: digests[ours] == digests[peer]
        for engine, (ours, peer) in pairs.items()
        if ours in digests and peer in digests
    }


if __name__ == "__main__":
    main()
