"""Measure a load with expert parallelism over all ranks, relative to a load without.

    python benchmarks/experts.py [--checkpoint DIR] [--ranks 2] [--repeats 5] [--engines deepspeed fsdp2]

Cells, order and figures are those of load.py; see README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from cells import ROOT, benchmark_checkpoint
from load import run_arm
from table import MIB, PHASES, machine

ENGINES = ("deepspeed", "fsdp2")


def main() -> None:
    options = arguments()
    checkpoint = options.checkpoint or benchmark_checkpoint(options.layers)
    arms = [f"zerostart-{engine}{tail}" for engine in options.engines for tail in ("", "-ep")]
    cells: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in arms}
    for repeat in range(options.repeats):
        for arm in arms if repeat % 2 == 0 else arms[::-1]:
            cells[arm].append(run_arm(arm, checkpoint, options, False))
            slowest = max(cell["seconds"] for cell in cells[arm][-1])
            print(f"repeat {repeat + 1}/{options.repeats}  {arm:<24} {slowest:7.2f} s", flush=True)
    rows = {arm: summary(repeats) for arm, repeats in cells.items()}
    ratios = {
        engine: rows[f"zerostart-{engine}-ep"]["seconds"] / rows[f"zerostart-{engine}"]["seconds"]
        for engine in options.engines
    }
    write(rows, ratios, cells, checkpoint, options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of a load with expert parallelism.")
    parser.add_argument("--checkpoint", type=Path, help="default: made with `zerostart synth` on first use")
    parser.add_argument("--layers", type=int, help="layers of the default checkpoint: 16 are 3.4 GB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--limit", type=float, default=600, help="seconds that a cell may take")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache")
    parser.add_argument("--as-found", action="store_true", help="do not touch free memory before a cell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "experts.json")
    return parser.parse_args()


def summary(repeats: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the repeats of the slowest rank."""
    seconds = [max(rank["seconds"] for rank in ranks) for ranks in repeats]
    return {
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "read_bytes": max(rank["reported"]["read_bytes"] for ranks in repeats for rank in ranks),
        "phases": {
            phase: statistics.median(max(rank["phases"][phase] for rank in ranks) for ranks in repeats)
            for phase in PHASES
        },
    }


def write(
    rows: dict[str, dict[str, Any]],
    ratios: dict[str, float],
    cells: dict[str, list[list[dict[str, Any]]]],
    checkpoint: Path,
    options: argparse.Namespace,
) -> None:
    """Print and write the table, and write every cell."""
    lines = ["| arm | seconds (range) | plan / build / read s | read MiB |", "|---|---:|---:|---:|"]
    for arm, row in rows.items():
        low, high = row["seconds_range"]
        phases = " / ".join(f"{row['phases'][phase]:.2f}" for phase in PHASES)
        spread = f"{row['seconds']:.2f} ({low:.2f}-{high:.2f})"
        lines.append(f"| {arm} | {spread} | {phases} | {row['read_bytes'] / MIB:.0f} |")
    texts = ", ".join(f"{engine} {ratio:.2f}" for engine, ratio in ratios.items())
    text = (
        "\n".join(lines) + f"\n\nTime with expert_parallel={options.ranks} over the time without: {texts}.\n"
    )
    print("\n" + text)
    settings = {"checkpoint": checkpoint.name, "ranks": options.ranks, "repeats": options.repeats}
    document = settings | {"machine": machine(), "ratios": ratios, "summary": rows, "cells": cells}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    head = f"# Experts shared out: {checkpoint.name} on {options.ranks} ranks"
    options.out.with_suffix(".md").write_text(f"{head}\n\nMedians of {options.repeats} repeats.\n\n{text}")


if __name__ == "__main__":
    main()
