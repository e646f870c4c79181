"""DiffSynth-Studio's script for Wan, unchanged, with zerostart and without: the first step, and memory.

    ZEROSTART_DIFFSYNTH=CHECKOUT python benchmarks/diffsynth_scripts.py [--repeats 1] [--out FILE]

``make build/diffsynth`` installs DiffSynth. A cell is a fresh ``accelerate launch`` of two ranks, from a cold
start of Python to the end of the first optimizer step; memory is anonymous, the most of each rank until then.
A cell takes most of a minute on two cores, of which half is imports: four of them a repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import ROOT

sys.path.insert(0, str(ROOT))

from tests.diffusion.script_runs import run, write_data
from tests.diffusion.small_pipelines import PIPELINES, Part, write
from tests.ranks import run_ranks

ARMS = ("stock zero2", "zero2", "stock zero3", "zero3")
#: A transformer of 115 and a text encoder of 110 million parameters.
SIZES: Mapping[str, dict[str, Any]] = {
    "wan_dit": {"dim": 768, "ffn_dim": 3072, "num_heads": 6, "num_layers": 12, "text_dim": 512},
    "wan_text": {
        "dim": 512,
        "dim_attn": 512,
        "dim_ffn": 1024,
        "num_heads": 8,
        "num_layers": 4,
        "vocab": 200_000,
    },
    "wan_vae": {},
}
STEPS = ["--trainable_models", "dit", "--use_gradient_checkpointing"]
MIB = 1 << 20


def sized() -> Mapping[str, Mapping[str, Part]]:
    """The small pipeline of Wan, larger."""
    parts = PIPELINES["wanvideo"]
    return {
        "wanvideo": {
            name: replace(part, family=replace(part.family, config={**part.family.config, **SIZES[name]}))
            for name, part in parts.items()
        }
    }


def made(folder: str) -> None:
    write(folder, sized())


def once(table: Path) -> None:
    """Leave one clip for each rank: one step."""
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:3]))


def main() -> None:
    options = arguments()
    busy = os.getloadavg()[0]
    cells: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        models = Path(scratch, "models")
        models.mkdir()
        run_ranks(made, 1, str(models), timeout=600)
        write_data(models / "data")
        once(models / "data" / "video.csv")
        for repeat in range(options.repeats):
            for arm in ARMS if repeat % 2 == 0 else reversed(ARMS):
                out = Path(scratch, f"{arm}-{repeat}".replace(" ", "-"))
                try:
                    found = run("wanvideo", arm, STEPS, models, out, launched=True, timeout=580)
                except AssertionError as error:
                    print(arm, str(error)[-3500:], flush=True)
                    continue
                first = [steps[0] for steps in found.steps]
                cell = {
                    "seconds": max(step["seconds"] for step in first),
                    **{f"peak of rank {rank}": step["peak"] for rank, step in enumerate(first)},
                    "loss": found.losses[0],
                }
                cells[arm].append(cell)
                print(arm, cell, flush=True)
    text = table(cells, options.repeats, busy)
    options.out.with_suffix(".md").write_text(text)
    options.out.write_text(json.dumps(cells, indent=1) + "\n")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="where models are written; the system's by default")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "diffsynth_scripts.json"
    )
    return parser.parse_args()


def table(cells: Mapping[str, list[dict[str, float]]], repeats: int, busy: float) -> str:
    """Medians, and how busy the machine was with other things."""
    lines = [
        f"Wan's `train.py`, two ranks on {os.cpu_count()} cores, medians of {repeats}; the load average "
        f"before was {busy:.1f}. A transformer of 115 and a text encoder of 110 million parameters, in bf16.",
        "",
        "| route | seconds to the end of the first step | peak of each rank, MiB | its loss |",
        "|---|---|---|---|",
    ]
    for arm, found in cells.items():
        if not found:
            lines.append(f"| {arm} | does not run | | |")
            continue
        seconds = statistics.median(cell["seconds"] for cell in found)
        peaks = [statistics.median(c[f"peak of rank {rank}"] for c in found) / MIB for rank in range(2)]
        shown = ", ".join(f"{peak:.0f}" for peak in peaks)
        lines.append(f"| {arm} | {seconds:.1f} | {shown} | {found[0]['loss']:.5f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
