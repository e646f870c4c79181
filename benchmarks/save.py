"""Compare ways to save a sharded model, and write the results.

    python benchmarks/save.py [--layers N] [--ranks 2] [--repeats 3] [--arms ...] [--out FILE]

Every cell is a fresh group of processes; the arms alternate. Saved files are deleted after each cell. The
figure of a cell is that of its slowest rank. See README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from cells import ROOT, Samples, benchmark_checkpoint, run_cell
from save_arms import ARMS
from table import facts, surroundings


def main() -> None:
    options = arguments()
    checkpoint = options.checkpoint or benchmark_checkpoint(options.layers)
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    cells: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in options.arms}
    for repeat in range(options.repeats):
        for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
            ranks = run_arm(arm, checkpoint, options, repeat == 0)
            cells[arm].append(ranks)
            slowest = max(cell["seconds"] for cell in ranks)
            print(f"repeat {repeat + 1}/{options.repeats}  {arm:<24} {slowest:7.2f} s", flush=True)
    about = facts("save.py")
    text = table(cells, total, options)
    print(text)
    options.out.write_text(
        json.dumps(about | {"bytes": total, "ranks": options.ranks, "cells": cells}, indent=1) + "\n"
    )
    head = f"`{about['command']}`, {about['date']}. {surroundings(about)}"
    options.out.with_suffix(".md").write_text(f"{head}\n\n{text}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of saving a sharded model.")
    parser.add_argument("--checkpoint", type=Path, help="default: made with `zerostart synth` on first use")
    parser.add_argument("--layers", type=int, help="layers of the default checkpoint: 16 are 3.4 GB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--limit", type=float, default=600, help="seconds that a cell may take")
    parser.add_argument("--save-to", type=Path, default=ROOT / "build" / "benchmark" / "saved")
    parser.add_argument("--note", default="", help="text above the table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "save.json")
    return parser.parse_args()


def run_arm(arm: str, checkpoint: Path, options: argparse.Namespace, check: bool) -> list[dict[str, Any]]:
    """Run one cell; return one record for each rank, and compare files if ``check``."""
    shutil.rmtree(options.save_to, ignore_errors=True)
    arguments = [arm, "--checkpoint", checkpoint, "--save-to", options.save_to]
    try:
        results = run_cell("save_arms.py", arguments, options.ranks, options.limit)
        if check and arm.startswith("zerostart"):
            compare(checkpoint, options.save_to)
    finally:
        shutil.rmtree(options.save_to, ignore_errors=True)
    for cell, samples in results:
        cell["peak"] = peak(cell, samples)
    return [cell for cell, _ in results]


def peak(cell: dict[str, Any], samples: Samples) -> int:
    """Return the peak of anonymous memory above the level before the save."""
    during = [anonymous for at, anonymous, _ in samples if cell["started"] <= at <= cell["ended"]]
    return max([*during, cell["after"]["RssAnon"]]) - cell["before"]["RssAnon"]


def compare(checkpoint: Path, saved: Path) -> None:
    """Exit unless every saved tensor has the checkpoint's bytes."""
    import torch
    from safetensors import safe_open

    def files_by_name(folder: Path) -> dict[str, Any]:
        files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        return {name: file for file in files for name in file.keys()}  # noqa: SIM118  # not a dict

    saved_files, original_files = files_by_name(saved), files_by_name(checkpoint)
    if saved_files.keys() != original_files.keys():
        sys.exit(f"the names differ: {sorted(saved_files.keys() ^ original_files.keys())[:6]}")
    for name, file in original_files.items():
        actual, expected = (f.get_tensor(name).view(torch.uint8) for f in (saved_files[name], file))
        if not torch.equal(actual, expected):
            sys.exit(f"{name} has other bytes than it was loaded from")


def table(cells: dict[str, list[list[dict[str, Any]]]], total: int, options: argparse.Namespace) -> str:
    """Return medians over the repeats: seconds, rate, ratio to the ceiling, peak memory."""
    lines = [
        f"{total / 1e9:.2f} GB on {options.ranks} ranks; medians of {options.repeats} repeats.",
        *([options.note] if options.note else []),
        "",
        "| arm | seconds | GB/s | of the ceiling | memory added |",
        "|---|---|---|---|---|",
    ]
    seconds = {
        arm: statistics.median(max(c["seconds"] for c in cell) for cell in c) for arm, c in cells.items()
    }
    for arm, repeats in cells.items():
        peak_bytes = statistics.median(max(cell["peak"] for cell in ranks_) for ranks_ in repeats)
        over = f"{seconds[arm] / seconds['ceiling']:.2f} x" if "ceiling" in seconds else ""
        rate = total / seconds[arm] / 1e9
        lines.append(f"| `{arm}` | {seconds[arm]:.2f} | {rate:.2f} | {over} | {peak_bytes / 2**20:.0f} MiB |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
