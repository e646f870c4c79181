"""Compare saving training states, also in the background, and resuming on other ranks.

    python benchmarks/state.py [--layers N] [--ranks 2] [--resume-on 3] [--repeats 3] [--arms ...]

Every cell is a fresh group of processes; the arms alternate. Each save is compared with a plain write and
sync of as many bytes, each resume with a plain read. See README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from cells import ROOT, benchmark_checkpoint, run_cell, warm
from save import peak
from state_arms import LOADS, SAVES
from table import facts, surroundings


def main() -> None:
    options = arguments()
    checkpoint = options.checkpoint or benchmark_checkpoint(options.layers)
    cells: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    for repeat in range(options.repeats):
        for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
            cell = run_arm(arm, checkpoint, options)
            cells[arm].append(cell)
            seconds, plain = cell["seconds"], cell["plain_seconds"]
            print(
                f"{repeat + 1}/{options.repeats}  {arm:<26} {seconds:7.2f} s  plain {plain:7.2f} s",
                flush=True,
            )
    about = facts("state.py")
    text = table(cells, options)
    print(text)
    options.out.write_text(
        json.dumps(about | {"ranks": options.ranks, "on": options.resume_on, "cells": cells}) + "\n"
    )
    head = f"`{about['command']}`, {about['date']}. {surroundings(about)}"
    options.out.with_suffix(".md").write_text(f"{head}\n\n{text}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of training checkpoints.")
    parser.add_argument("--checkpoint", type=Path, help="default: made with `zerostart synth` on first use")
    parser.add_argument("--layers", type=int, default=1, help="layers of the default checkpoint")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--resume-on", type=int, default=3, help="ranks that resume what --ranks have saved")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=[*SAVES, *LOADS], default=[*SAVES, *LOADS])
    parser.add_argument("--limit", type=float, default=600, help="seconds that a cell may take")
    parser.add_argument("--save-to", type=Path, default=ROOT / "build" / "benchmark" / "saved")
    parser.add_argument("--note", default="", help="text above the table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "state.json")
    return parser.parse_args()


def run_arm(arm: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run an arm and its plain counterpart; return the worst rank's figures."""
    shutil.rmtree(options.save_to, ignore_errors=True)
    arguments = ["--checkpoint", checkpoint, "--save-to", options.save_to]
    try:
        if arm in LOADS:
            run_cell("state_arms.py", [LOADS[arm][0], *arguments], options.ranks, options.limit)
            size = size_of(options.save_to)
            warm(options.save_to)  # saves bypass the page cache, and the plain read comes second
            results = run_cell("state_arms.py", [arm, *arguments], options.resume_on, options.limit)
            plain = run_cell("state_arms.py", ["plain-read", *arguments], options.resume_on, options.limit)
        else:
            results = run_cell("state_arms.py", [arm, *arguments], options.ranks, options.limit)
            size = size_of(options.save_to)
            shutil.rmtree(options.save_to)
            arguments += ["--bytes", str(size)]
            plain = run_cell("state_arms.py", ["plain-write", *arguments], options.ranks, options.limit)
    finally:
        shutil.rmtree(options.save_to, ignore_errors=True)
    return {
        "bytes": size,
        "seconds": max(cell["seconds"] for cell, _ in results),
        "plain_seconds": max(cell["seconds"] for cell, _ in plain),
        "peak": max(peak(cell, samples) for cell, samples in results),
        "saves": [cell["saves"] for cell, _ in results if "saves" in cell],
    }


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(cells: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    """Return medians over the repeats, and ratios to the plain counterparts."""
    lines = [
        f"{options.ranks} ranks; resumed on {options.resume_on}; medians of {options.repeats} repeats.",
        *([options.note] if options.note else []),
        "",
        "| arm | GB | seconds | of the plain way | memory added | pause of the first | of later ones |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, repeats in cells.items():
        seconds = statistics.median(cell["seconds"] for cell in repeats)
        over = statistics.median(cell["seconds"] / cell["plain_seconds"] for cell in repeats)
        peak_mib = statistics.median(cell["peak"] for cell in repeats) / 2**20
        first, later = pauses(repeats)
        lines.append(
            f"| `{arm}` | {repeats[0]['bytes'] / 1e9:.2f} | {seconds:.2f} | {over:.2f} x "
            f"| {peak_mib:.0f} MiB | {first} | {later} |"
        )
    return "\n".join(lines) + "\n"


def pauses(repeats: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the pauses by first and later saves, relative to their writing."""
    shares = [[s["blocked"] / s["written"] for s in saves] for cell in repeats for saves in cell["saves"]]
    if not shares:
        return "", ""
    first = statistics.median(share[0] for share in shares)
    later = statistics.median(s for share in shares for s in share[1:])
    return f"{first:.1%}", f"{later:.1%}"


if __name__ == "__main__":
    main()
