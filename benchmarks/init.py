"""Compare ways from a checkpoint's path to an engine of ZeRO stage 1 or 2, and write the results down.

    python benchmarks/init.py [--layers N] [--ranks 2] [--stage 2] [--repeats 5] [--busy] [--out FILE]

Every cell is a fresh group of processes; the arms alternate; before each cell all files are read once, so
that they are in the page cache. The figure of a cell is that of its slowest rank. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from cells import ROOT, Samples, busy_cores, made_checkpoint, run_cell, warm
from init_arms import ARMS
from table import machine, public_arguments

MIB = 1 << 20
FIGURES = ("to_loaded", "to_masters", "seconds", "cpu_seconds", "read_calls_bytes", "model_bytes")
Cells = dict[str, list[list[dict[str, Any]]]]


def main() -> None:
    options = arguments()
    checkpoint = options.checkpoint or made_checkpoint(options.layers)
    cells: Cells = {arm: [] for arm in options.arms}
    digests: dict[str, Any] = {}
    with busy_cores() if options.busy else contextlib.nullcontext():
        for repeat in range(options.repeats):
            for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
                ranks = one_cell(arm, checkpoint, options, repeat == 0)
                if "digest" in ranks[0]:
                    digests[arm] = [cell.pop("digest") for cell in ranks]
                cells[arm].append(ranks)
                seconds = [max(cell[name] for cell in ranks) for name in ("to_masters", "seconds")]
                print(
                    f"repeat {repeat + 1}/{options.repeats}  {arm:<20} {seconds[0]:7.2f} s to the masters, "
                    f"{seconds[1]:7.2f} s in all",
                    flush=True,
                )
    agreed = len({json.dumps(found) for found in digests.values()}) <= 1
    write_results(cells, agreed, checkpoint, options)
    if not agreed:
        sys.exit("the arms hold different flat buffers or masters")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of starting an engine of ZeRO stage 1 or 2.")
    parser.add_argument("--checkpoint", type=Path, help="default: made with `zerostart synth` on first use")
    parser.add_argument("--layers", type=int, help="of the default checkpoint: 16 are 3.4 GB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--busy", action="store_true", help="keep every core busy with another process")
    parser.add_argument("--as-found", action="store_true", help="do not touch free memory before a cell")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a cell may take")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "init.json")
    return parser.parse_args()


def one_cell(arm: str, checkpoint: Path, options: argparse.Namespace, digest: bool) -> list[dict[str, Any]]:
    """One record a rank, with the peaks of its memory."""
    warm(checkpoint)
    flags = ["--checkpoint", checkpoint, "--stage", str(options.stage), *["--digest"] * digest]
    flags += ["--as-found"] * options.as_found
    told = run_cell("init_arms.py", [arm, *flags], options.ranks, options.limit)
    for cell, samples in told:
        cell["peak"] = peaks(cell, samples)
    return [cell for cell, _ in told]


def peaks(cell: dict[str, Any], samples: Samples) -> dict[str, int]:
    """Highest anonymous memory above the level before: until the masters are made, and until the end."""
    base = cell["before"]["RssAnon"]
    until = {"masters": cell["masters"], "end": cell["ended"]}
    found = {
        name: max((a for at, a, _ in samples if cell["started"] <= at <= stop), default=base) - base
        for name, stop in until.items()
    }
    found["end"] = max(found["end"], cell["after"]["RssAnon"] - base)
    return found


def summarise(cells: Cells) -> dict[str, dict[str, float]]:
    """By arm: medians over the repeats of the slowest or largest rank."""
    summary = {}
    for arm, repeats in cells.items():
        row = {
            name: statistics.median(max(cell[name] for cell in ranks) for ranks in repeats)
            for name in FIGURES
        }
        for name in ("masters", "end"):
            row[f"peak_{name}"] = statistics.median(max(c["peak"][name] for c in ranks) for ranks in repeats)
        row["peak_masters_of_model"] = row["peak_masters"] / row["model_bytes"]
        summary[arm] = row
    for row in summary.values():
        if "stock" in summary:
            row["faster_to_masters"] = summary["stock"]["to_masters"] / row["to_masters"]
            row["faster"] = summary["stock"]["seconds"] / row["seconds"]
    return summary


def markdown(summary: dict[str, dict[str, float]]) -> str:
    """The table, one line an arm."""
    lines = [
        "| arm | to loaded s | to masters s | in all s | CPU s | faster to masters | faster in all "
        "| peak before masters MiB | x model | peak MiB | read by calls MiB |",
        "|---" + "|---:" * 10 + "|",
    ]
    for arm, row in summary.items():
        fields = [
            arm,
            *(f"{row[name]:.2f}" for name in ("to_loaded", "to_masters", "seconds", "cpu_seconds")),
            *(f"{row[name]:.2f}" if name in row else "" for name in ("faster_to_masters", "faster")),
            f"{row['peak_masters'] / MIB:.0f}",
            f"{row['peak_masters_of_model']:.3f}",
            f"{row['peak_end'] / MIB:.0f}",
            f"{row['read_calls_bytes'] / MIB:.0f}",
        ]
        lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines)


def write_results(cells: Cells, agreed: bool, checkpoint: Path, options: argparse.Namespace) -> None:
    """Print the table, and write the JSON with every cell and its neighbour in markdown."""
    summary = summarise(cells)
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/init.py " + shlex.join(public_arguments(sys.argv[1:])),
        "checkpoint": checkpoint.name,
        "checkpoint_bytes": size,
        "ranks": options.ranks,
        "stage": options.stage,
        "repeats": options.repeats,
        "busy": options.busy,
        "machine": machine(),
        "same_state_as_stock": agreed,
    }
    table = markdown(summary)
    print("\n" + table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts | {"summary": summary, "cells": cells}, indent=1) + "\n")
    packages = ", ".join(f"{name} {number}" for name, number in facts["machine"]["packages"].items())
    options.out.with_suffix(".md").write_text(
        f"# Starting ZeRO stage {options.stage} from {checkpoint.name}: {size / 1e9:.2f} GB on "
        f"{options.ranks} ranks{', all cores busy' if options.busy else ''}\n\n"
        f"{facts['date']}, `{facts['command']}`. Medians of {options.repeats} fresh groups of processes, "
        "alternating; slowest rank; files in the page cache.\n\n"
        f"{facts['machine']['cores']} cores ({facts['machine']['processor']}), "
        f"{facts['machine']['memory_gib']} GiB, Linux {facts['machine']['kernel']}, Python "
        f"{facts['machine']['python']}, {packages}.\n\n"
        f"{table}\n\nThe same flat buffers and masters in all arms, rank by rank: {agreed}.\n"
    )


if __name__ == "__main__":
    main()
