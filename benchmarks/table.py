"""Summarise a benchmark, and write its result files."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

Cells = dict[str, list[list[dict[str, Any]]]]  # by arm: repeats of ranks
PACKAGES = ("zerostart", "torch", "transformers", "deepspeed", "safetensors")
PHASES = ("plan", "build", "read")
MIB = 1 << 20


def summarise(cells: Cells) -> dict[str, dict[str, Any]]:
    """Return for each arm the medians over repeats of the slowest or largest rank."""
    summary = {}
    for arm, repeats in cells.items():
        seconds = [max(rank["seconds"] for rank in ranks) for ranks in repeats]
        row: dict[str, Any] = {
            "seconds": statistics.median(seconds),
            "seconds_range": [min(seconds), max(seconds)],
            "shard_bytes": max(rank["shard_bytes"] for rank in repeats[0]),
        }
        for kind in ("anonymous", "mapped", "resident", "high_water"):
            row[kind] = int(statistics.median(max(rank["peak"][kind] for rank in ranks) for ranks in repeats))
        for name in ("read_calls_bytes", "storage_bytes"):
            row[name] = int(statistics.median(max(rank[name] for rank in ranks) for ranks in repeats))
        row["over_shard"] = int(
            statistics.median(
                max(rank["peak"]["resident"] - rank["shard_bytes"] for rank in ranks) for ranks in repeats
            )
        )
        row["read_over_share"] = statistics.median(
            max(rank["read_calls_bytes"] / rank["shard_bytes"] for rank in ranks) for ranks in repeats
        )
        if "phases" in repeats[0][0]:
            row["phases"] = {
                phase: statistics.median(max(rank["phases"][phase] for rank in ranks) for ranks in repeats)
                for phase in PHASES
            }
        summary[arm] = row
    add_ratios(summary)
    return summary


def add_ratios(summary: dict[str, dict[str, Any]]) -> None:
    ceiling = summary.get("ceiling")
    peers = {"zerostart-deepspeed": "stock-deepspeed", "zerostart-fsdp2": "native-fsdp2"}
    for arm, row in summary.items():
        if ceiling:
            row["of_ceiling"] = row["seconds"] / ceiling["seconds"]
            if "phases" in row:
                row["read_of_ceiling"] = row["phases"]["read"] / ceiling["seconds"]
        if arm in peers and peers[arm] in summary:
            row["faster_than_peer"] = summary[peers[arm]]["seconds"] / row["seconds"]


def markdown(summary: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table with one line for each arm."""
    head = (
        "| arm | seconds (range) | x ceiling | plan / build / read s | read x ceiling | faster than peer "
        "| resident MiB | anonymous | mapped | above shard MiB | read by calls MiB | x shard |"
    )
    lines = [head, "|---" + "|---:" * 11 + "|"]
    for arm, row in summary.items():
        phases = row.get("phases")
        low, high = row["seconds_range"]
        fields = [
            arm,
            f"{row['seconds']:.2f} ({low:.2f}-{high:.2f})",
            ratio(row, "of_ceiling"),
            " / ".join(f"{phases[phase]:.2f}" for phase in PHASES) if phases else "",
            ratio(row, "read_of_ceiling"),
            ratio(row, "faster_than_peer"),
            *(f"{row[kind] / MIB:.0f}" for kind in ("resident", "anonymous", "mapped", "over_shard")),
            f"{row['read_calls_bytes'] / MIB:.0f}",
            f"{row['read_over_share']:.3f}",
        ]
        lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines)


def ratio(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}" if name in row else ""


def machine() -> dict[str, Any]:
    """Describe the machine without identifying it."""
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "processor": model[0].split(":", 1)[1].strip() if model else platform.machine(),
        "memory_gib": round(int(memory["MemTotal"].split()[0]) / (1 << 20), 1),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "transparent_hugepages": hugepages(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def hugepages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().split("[")[1].split("]")[0] if path.exists() else "absent"


def facts(script: str) -> dict[str, Any]:
    """Return date, command and machine of the figures."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{script}", *public_arguments(sys.argv[1:])]),
        "machine": machine(),
    }


def surroundings(facts: dict[str, Any]) -> str:
    """Describe the machine of `facts` in a sentence."""
    about = facts["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    return (
        f"{about['cores']} cores ({about['processor']}), {about['memory_gib']} GiB, Linux {about['kernel']}, "
        f"transparent huge pages {about['transparent_hugepages']}, Python {about['python']}, {packages}."
    )


def write_results(
    summary: dict[str, dict[str, Any]],
    cells: Cells,
    agreement: dict[str, bool],
    checkpoint: Path,
    options: argparse.Namespace,
) -> None:
    """Print the table, and write it as Markdown next to the JSON file ``options.out``."""
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    about: dict[str, Any] = facts("load.py") | {
        "checkpoint": checkpoint.name,
        "checkpoint_bytes": size,
        "ranks": options.ranks,
        "repeats": options.repeats,
        "cold": options.cold,
        "same_weights_as_peer": agreement,
    }
    table = markdown(summary)
    print("\n" + table)
    print(f"same weights as the peer on every rank: {agreement}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(about | {"summary": summary, "cells": cells}, indent=1) + "\n")
    cache = (
        "files dropped from the page cache of this (virtual) machine"
        if options.cold
        else ("files in the page cache")
    )
    options.out.with_suffix(".md").write_text(
        f"# Loading {checkpoint.name}: {size / 1e9:.2f} GB on {options.ranks} ranks\n\n"
        f"{about['date']}, `{about['command']}`. Medians of {options.repeats} fresh groups of processes, "
        f"alternating; slowest rank; {cache}.\n\n"
        f"{surroundings(about)}\n\n"
        f"{table}\n\nSame weights as the peer, rank by rank: {agreement}.\n"
    )


def public_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments without this machine's folders."""
    return [Path(a).name if "/" in a else a for a in arguments]
