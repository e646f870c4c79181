"""Compare ways to load a checkpoint into a sharded model, and write the results.

    python benchmarks/load.py [--layers N] [--ranks 2] [--repeats 5] [--cold] [--arms ...] [--out FILE]

Every cell is a fresh group of processes; the arms alternate. Before each cell all files are read into the
page cache, or dropped from it with --cold. The figure of a cell is that of its slowest rank. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from arms import ARMS, DEFAULT_ARMS
from cells import ROOT, Samples, benchmark_checkpoint, evict, run_cell, warm
from table import summarise, write_results


def main() -> None:
    options = arguments()
    checkpoint = options.checkpoint or benchmark_checkpoint(options.layers)
    cells: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in options.arms}
    digests: dict[str, list[Any]] = {}
    for repeat in range(options.repeats):
        for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
            ranks = run_arm(arm, checkpoint, options, repeat == 0)
            if "digest" in ranks[0]:
                digests[arm] = [cell.pop("digest") for cell in ranks]
            cells[arm].append(ranks)
            slowest = max(cell["seconds"] for cell in ranks)
            print(f"repeat {repeat + 1}/{options.repeats}  {arm:<20} {slowest:7.2f} s", flush=True)
    agreement = compare_digests(digests)
    write_results(summarise(cells), cells, agreement, checkpoint, options)
    if any(not agreed for agreed in agreement.values()):
        sys.exit(f"arms of one layout hold different weights: {agreement}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of loading a checkpoint into a sharded model.")
    parser.add_argument("--checkpoint", type=Path, help="default: made with `zerostart synth` on first use")
    parser.add_argument("--layers", type=int, help="layers of the default checkpoint: 16 are 3.4 GB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=DEFAULT_ARMS)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a cell may take")
    parser.add_argument("--as-found", action="store_true", help="do not touch free memory before a cell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "load.json")
    return parser.parse_args()


def run_arm(arm: str, checkpoint: Path, options: argparse.Namespace, digest: bool) -> list[dict[str, Any]]:
    """Run one cell; return one record for each rank, with its memory peaks."""
    resident = evict(checkpoint) if options.cold else warm(checkpoint)
    flags = ["--digest"] * digest + ["--as-found"] * options.as_found
    results = run_cell("arms.py", [arm, "--checkpoint", checkpoint, *flags], options.ranks, options.limit)
    for cell, samples in results:
        cell["peak"] = peaks(cell, samples)
        cell["resident_before"] = resident
    return [cell for cell, _ in results]


def peaks(cell: dict[str, Any], samples: Samples) -> dict[str, int]:
    """Return peaks of anonymous, mapped and all memory above the level before the load."""
    before = cell["before"]
    mapped_before = before["RssFile"] + before["RssShmem"]
    after = cell["after"]
    during = [(a, m) for at, a, m in samples if cell["started"] <= at <= cell["ended"]]
    during.append((after["RssAnon"], after["RssFile"] + after["RssShmem"]))
    return {
        "anonymous": max(a for a, _ in during) - before["RssAnon"],
        "mapped": max(m for _, m in during) - mapped_before,
        "resident": max(a + m for a, m in during) - before["RssAnon"] - mapped_before,
        "high_water": after["VmHWM"] - before["RssAnon"] - mapped_before,
        "samples": len(during),
    }


def compare_digests(digests: dict[str, list[Any]]) -> dict[str, bool]:
    """Compare our weights with the peer's on every rank, by engine."""
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
