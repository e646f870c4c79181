"""Measure the time from the start of the processes to the first step's end.

    python benchmarks/start.py [--ranks 2] [--repeats 3] [--arms ...] [--json FILE]

The model is a Qwen3 of 1.0 GB in fp32 (14 layers), and its files are in the page cache. The step is one of
plain SGD with 8 tokens, so that CPUs do not spend most of the time in it. Each arm, stock or zerostart, runs
in fresh processes. Arms alternate, and every other repeat reverses their order. Figures are medians and
ranges over the repeats of the slowest rank, in total and for each part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from cells import ROOT, run_cell, warm

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "dtype": "float32",
}
ARMS = ("stock-deepspeed", "zerostart-deepspeed", "stock-fsdp2", "zerostart-fsdp2")
PARTS = ("imports", "load", "prepare", "step")
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    # A small bucket, so that a rank takes 3 GB of memory and not 5.
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 50_000_000},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="From the start of the processes to the first step.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path, help="write every cell to this file")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        options.result.write_text(json.dumps(measure(options.arms[0])))
        os._exit(0)  # skips the engines' teardown, which takes seconds
    cells: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    for repeat in range(options.repeats):
        for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
            warm(made_model())
            started = time.monotonic()
            ranks = [rank for rank, _ in run_cell("start.py", ["--arms", arm], options.ranks, 600)]
            slowest = max(ranks, key=lambda rank: rank["step"])
            times = [started, *(slowest[part] for part in PARTS)]
            parts = {part: times[n + 1] - times[n] for n, part in enumerate(PARTS)}
            cells[arm].append({"all": times[-1] - started, **parts})
            print(f"repeat {repeat + 1}  {arm:<20} {cells[arm][-1]['all']:6.2f} s", flush=True)
    print("\n| arm | in all, s | of stock | " + " | ".join(PARTS) + " |")
    print("|---|---:|---:|" + "---:|" * len(PARTS))
    medians = {arm: statistics.median(cell["all"] for cell in cells[arm]) for arm in cells}
    for arm, found in cells.items():
        stock = medians.get(f"stock-{arm.rpartition('-')[2]}")
        ratio = f"{medians[arm] / stock:.2f}" if stock else ""
        spread = f"{min(cell['all'] for cell in found):.2f}-{max(cell['all'] for cell in found):.2f}"
        parts = " | ".join(f"{statistics.median(cell[part] for cell in found):.2f}" for part in PARTS)
        print(f"| {arm} | {medians[arm]:.2f} ({spread}) | {ratio} | {parts} |")
    if options.json:
        options.json.write_text(json.dumps(cells, indent=1) + "\n")


def made_model() -> Path:
    """Return the model's directory, written on first use."""
    folder = ROOT / "build" / "benchmark" / "qwen3_1gb"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        settings = json.loads((ROOT / "benchmarks" / "configs" / "qwen3_16gb.json").read_text())
        config = folder.with_suffix(".json")
        config.write_text(json.dumps(settings | SIZES | {"tie_word_embeddings": True}))
        command = Path(sysconfig.get_path("scripts")) / "zerostart"
        subprocess.run([command, "synth", config, folder], check=True)
    return folder


def measure(arm: str) -> dict[str, float]:
    """Run one rank, and return when each part ended."""
    import torch
    import torch.distributed as dist

    whose, _, engine = arm.partition("-")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    if engine == "deepspeed":
        import deepspeed
    if whose == "stock":
        import transformers
    else:
        import zerostart
    dist.init_process_group("gloo")
    ended = {"imports": time.monotonic()}
    model: Any
    if whose == "zerostart":
        config = DEEPSPEED if engine == "deepspeed" else None
        model = zerostart.load(made_model(), engine=engine, engine_config=config, progress=False)
        if not int(os.environ["RANK"]):
            print(zerostart.report(model), file=sys.stderr)
    elif engine == "deepspeed":
        deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
        active = transformers.integrations.HfDeepSpeedConfig(DEEPSPEED)
        model = transformers.AutoModelForCausalLM.from_pretrained(made_model(), dtype=torch.float32)
        assert active is not None  # transformers has only a weak reference
    else:
        from transformers.distributed import DistributedConfig

        sharded = DistributedConfig(fsdp_size=dist.get_world_size())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            made_model(), dtype=torch.float32, distributed_config=sharded
        )
    ended["load"] = time.monotonic()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    if engine == "deepspeed":
        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED)
        backward, step = model.backward, model.step
    else:
        backward, step = torch.Tensor.backward, optimizer.step
    ended["prepare"] = time.monotonic()
    tokens = torch.arange(8)[None]
    backward(model(input_ids=tokens, labels=tokens).loss)
    step()
    ended["step"] = time.monotonic()
    dist.barrier()
    return ended


if __name__ == "__main__":
    main()
