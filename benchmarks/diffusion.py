"""Compare DiffSynth-Studio's ``load_model`` with zerostart's on a Wan transformer.

    python benchmarks/diffusion.py [--layers 30] [--ranks 2] [--repeats 3] [--out FILE]

``make build/diffsynth`` installs DiffSynth. Weights are random. Each cell is a fresh group of processes; the
arms alternate. Only the call of ``load_model`` is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import back_free_memory, io_counters, memory, prepare_ceiling, shard_bytes, start_gloo
from cells import ROOT, Samples, run_cell, warm

#: Configuration of the released 1.3B; ``--layers`` may reduce its layers.
WAN: dict[str, Any] = {
    "has_image_input": False, "patch_size": [1, 2, 2], "in_dim": 16, "dim": 1536, "ffn_dim": 8960,
    "freq_dim": 256, "text_dim": 4096, "out_dim": 16, "num_heads": 12, "eps": 1e-6,
}  # fmt: skip
#: A ceiling reads a rank's bytes into fresh memory with plain system calls.
ARMS = (
    *("diffsynth-zero3", "zerostart-zero3", "ceiling-zero3"),
    *("diffsynth-zero2", "zerostart-zero2", "ceiling-zero2"),
)
MIB = 1 << 20


def main() -> None:
    options = arguments()
    if options.arm:
        run_arm(options)
        return
    folder, busy = checkpoint(options.layers), os.getloadavg()[0]
    warm(folder)
    cells: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    for repeat in range(options.repeats):
        for arm in options.arms if repeat % 2 == 0 else reversed(options.arms):
            arguments_of_cell = ["--arm", arm, "--layers", str(options.layers)]
            ranks = run_cell("diffusion.py", arguments_of_cell, options.ranks, 900)
            cells[arm].append(worst(ranks))
            print(arm, cells[arm][-1], flush=True)
    text = table(cells, folder, options, busy)
    options.out.with_suffix(".md").write_text(text)
    options.out.write_text(json.dumps(cells, indent=1) + "\n")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "diffusion.json")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def checkpoint(layers: int) -> Path:
    """Return a folder with ``wan.safetensors`` in bf16, written on first use."""
    folder = ROOT / "build" / "benchmark" / f"wan_{layers}_layers"
    if not (folder / "wan.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = f"import sys; sys.argv = ['x']; import diffusion; diffusion.write({layers})"
        if os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", command], _with_path()):
            raise SystemExit("the checkpoint could not be written")
    return folder


def _with_path() -> dict[str, str]:
    folder = str(Path(__file__).parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}


def write(layers: int) -> None:
    """Write random weights in DiffSynth's layout."""
    import torch
    from safetensors.torch import save_file

    kind = wan_class()
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in kind(**WAN, num_layers=layers).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {n: (torch.randn(s, generator=generator) * 0.02).bfloat16() for n, s in shapes.items()}
    save_file(tensors, ROOT / "build" / "benchmark" / f"wan_{layers}_layers" / "wan.safetensors")


def wan_class() -> Any:
    """Import DiffSynth's class like the tests."""
    sys.path.insert(0, str(ROOT))
    from tests.diffusion.oracle import import_diffsynth

    import_diffsynth()
    from diffsynth.models.wan_video_dit import WanModel

    return WanModel


def prepare(library: str, stage: str, path: Path, layers: int) -> Callable[[], Any]:
    """Return an arm's timed function, which returns a model or bytes."""
    if library == "ceiling":
        if stage == "2":  # each rank has the whole model
            os.environ.update(RANK="0", WORLD_SIZE="1")
        return prepare_ceiling(path.parent)
    import torch

    kind = wan_class()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(stage)}}
    settings["bf16"] = {"enabled": True}
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    import zerostart

    deepspeed.init_distributed("gloo")
    zero_config = HfDeepSpeedConfig(settings)
    if library == "zerostart":
        zerostart.enable(progress=False)
    from diffsynth.core.loader import load_model

    def load() -> Any:
        assert zero_config is not None  # transformers has only a weak reference
        # Pipelines use the disk map; without it, weights are a mapping that is read at first use.
        config = {**WAN, "num_layers": layers}
        return load_model(kind, str(path), config, torch.bfloat16, "cpu", use_disk_map=True)

    return load


def run_arm(options: argparse.Namespace) -> None:
    """Run one rank of one cell, and write its result."""
    import torch
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    library, _, stage = options.arm.partition("-zero")
    path = checkpoint(options.layers) / "wan.safetensors"
    start_gloo()
    load = prepare(library, stage, path, options.layers)
    gc.collect()
    back_free_memory(path.stat().st_size * 5 // 4 // (size if stage == "3" else 1))
    dist.barrier()
    before, read = memory(), io_counters()
    started = time.monotonic()
    model = load()
    ended = time.monotonic()
    dist.barrier()
    whole = stage == "2" and library != "ceiling"
    shard = sum(p.nbytes for p in model.parameters()) if whole else shard_bytes(model)
    result = {
        "seconds": ended - started, "started": started, "ended": ended, "anonymous": before["RssAnon"],
        "mapped": before["RssFile"] + before["RssShmem"], "shard": shard,
        "read": io_counters()["rchar"] - read["rchar"],
    }  # fmt: skip
    options.result.write_text(json.dumps(result))
    os._exit(0)  # skips the engines' teardown, which takes seconds


def worst(ranks: list[tuple[dict[str, Any], Samples]]) -> dict[str, float]:
    """Return the slowest rank's seconds, and the largest memory and bytes of any rank."""
    peaks = []
    for result, samples in ranks:
        during = [(a, m) for t, a, m in samples if result["started"] <= t <= result["ended"]]
        level = result["anonymous"] + result["mapped"]
        peaks.append((max((a + m for a, m in during), default=level) - level - result["shard"]) / MIB)
    return {
        "seconds": max(result["seconds"] for result, _ in ranks),
        "above_shard_mib": max(peaks),
        "shard_mib": max(result["shard"] for result, _ in ranks) / MIB,
        "read_mib": max(result["read"] for result, _ in ranks) / MIB,
    }


def table(
    cells: dict[str, list[dict[str, float]]], folder: Path, options: argparse.Namespace, busy: float
) -> str:
    size = (folder / "wan.safetensors").stat().st_size
    lines = [
        f"{options.layers} layers, {size / 1e9:.2f} GB in bf16, {options.ranks} ranks, medians of "
        f"{options.repeats}; the slowest rank, and the one that has most. The load average before was "
        f"{busy:.1f} on {os.cpu_count()} cores.",
        "",
        "| arm | seconds | peak above shard, MiB | shard, MiB | read by calls, MiB |",
        "|---|---|---|---|---|",
    ]
    for arm, rows in cells.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        lines.append(
            f"| `{arm}` | {middle['seconds']:.2f} | {middle['above_shard_mib']:.0f} | "
            f"{middle['shard_mib']:.0f} | {middle['read_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
