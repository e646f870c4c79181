"""Run benchmarks alternately in this checkout and in one of another commit.

    git worktree add ../before COMMIT
    python benchmarks/sides.py ../before [--repeats 3] [--only NAME ...] [--out FILE]

``--only`` names benchmarks (default: all of ``CELLS``). Each cell is the checkout's own script in a fresh
process, with its own ``src`` first in the path; both read the same checkpoints. The table has the median and
the range of each figure on both sides, the ratio of the medians, and whether the ranges overlap. See
README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cells import ROOT, benchmark_checkpoint

#: Function that yields named figures from a benchmark's JSON.
Figures = Callable[[dict[str, Any]], Iterator[tuple[str, float]]]
SIDES = ("before", "after")
#: Arms or cells that both checkouts have, by benchmark.
CELLS = {
    "load": ["zerostart-deepspeed", "zerostart-fsdp2"],
    "save": ["zerostart-deepspeed", "zerostart-fsdp2"],
    "state": ["save_state-deepspeed", "save_state-fsdp2", "load_state-deepspeed", "load_state-fsdp2"],
    "forecast": ["z3-bf16-2", "z2-bf16-2", "fsdp2-bf16-2", "fsdp2-masters-2"],
}


def main() -> None:
    options = arguments()
    results: dict[str, dict[str, list[float]]] = {}
    for repeat in range(options.repeats):
        for name, cells in options.selected.items():
            for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
                for figure, value in run_benchmark(name, cells, ROOT if side == "after" else options.before):
                    sides = results.setdefault(f"{name}: {figure}", {side: [] for side in SIDES})
                    sides[side].append(value)
                print(f"repeat {repeat + 1}/{options.repeats}  {name:<9} {side}", flush=True)
    rows = {figure: summarise(**sides) for figure, sides in results.items()}
    print("\n" + table(rows))
    if options.out:
        options.out.write_text(json.dumps({"figures": rows, "cells": results}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmarks of two checkouts.")
    parser.add_argument("before", type=Path, help="a checkout of another commit, such as a worktree")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS), metavar="NAME")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.before = options.before.resolve()
    if not (options.before / "src" / "zerostart").is_dir():
        parser.error(f"{options.before} is no checkout of zerostart")
    options.selected = {name: CELLS[name] for name in options.only}
    return options


def run_benchmark(name: str, cells: list[str], root: Path) -> list[tuple[str, float]]:
    """Run ``cells`` of a benchmark of the checkout ``root`` once; return the figures."""
    command, figures = BENCHMARKS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run(
            [sys.executable, root / "benchmarks" / f"{name}.py", *command(cells), str(out)],
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return list(figures(json.loads(out.read_text())))


def load_command(cells: list[str]) -> list[str]:
    return ["--repeats", "1", "--checkpoint", str(benchmark_checkpoint()), "--arms", *cells, "--out"]


def load_figures(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the slowest rank's seconds, those of reading, and (total - reading) / reading."""
    for arm, (ranks,) in result["cells"].items():
        slowest = max(ranks, key=lambda rank: rank["seconds"])
        read = slowest["phases"]["read"]
        yield f"{arm}, s", slowest["seconds"]
        yield f"{arm}, read s", read
        yield f"{arm}, all but the read, of the read", (slowest["seconds"] - read) / read


def save_figures(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the slowest rank's seconds, and the largest peak of added memory in MiB."""
    for arm, (ranks,) in result["cells"].items():
        yield f"{arm}, s", max(rank["seconds"] for rank in ranks)
        yield f"{arm}, memory MiB", max(rank["peak"] for rank in ranks) / 2**20


def state_command(cells: list[str]) -> list[str]:
    return ["--repeats", "1", "--checkpoint", str(benchmark_checkpoint(1)), "--arms", *cells, "--out"]


def state_figures(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the slowest rank's seconds, and the largest peak of added memory in MiB."""
    for arm, (cell,) in result["cells"].items():
        yield f"{arm}, s", cell["seconds"]
        yield f"{arm}, memory MiB", cell["peak"] / 2**20


def forecast_command(cells: list[str]) -> list[str]:
    return ["--only", *cells, "--json"]


def forecast_figures(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the measured peak of each phase relative to its forecast."""
    for cell in result["cells"]:
        for phase, forecast in cell["forecast"].items():
            yield f"{cell['cell']}, {phase}, of the forecast", cell["measured"][phase] / forecast


BENCHMARKS: dict[str, tuple[Callable[[list[str]], list[str]], Figures]] = {
    "load": (load_command, load_figures),
    "forecast": (forecast_command, forecast_figures),
    "save": (load_command, save_figures),
    "state": (state_command, state_figures),
}


def summarise(before: list[float], after: list[float]) -> dict[str, Any]:
    """Return medians and ranges of a figure, and whether the ranges overlap."""
    medians = statistics.median(before), statistics.median(after)
    return {
        "before": [medians[0], min(before), max(before)],
        "after": [medians[1], min(after), max(after)],
        "ratio": medians[1] / medians[0] if medians[0] else float("nan"),
        "within": min(after) <= max(before) and min(before) <= max(after),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with one line for each figure."""
    lines = ["| figure | before (range) | after (range) | after / before | ranges overlap |"]
    lines.append("|---|---:|---:|---:|---|")
    for figure, row in rows.items():
        sides = ["{:.3f} ({:.3f}-{:.3f})".format(*row[side]) for side in SIDES]
        overlap = "yes" if row["within"] else "no"
        lines.append(f"| {figure} | {' | '.join(sides)} | {row['ratio']:.3f} | {overlap} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
