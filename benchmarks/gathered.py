"""What the watch for lost edits costs ``GatheredParameters``, of 128 MiB.

One of DeepSpeed's own ``zero.Init`` is gathered and partitioned again while no model of zerostart lives, and
while one does; then one that zerostart loaded, while it is not watched, and while it is. Turns alternate; the
median counts. ``torchrun --nproc-per-node 2 benchmarks/gathered.py`` writes ``results/gathered.md``.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from zerostart.upstream.deepspeed.zero3 import gathering as deepspeed_edits

TURNS = 12
RESULT = Path(__file__).parent / "results" / "gathered.md"
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 13, 1 << 12))


def seconds(parameter: nn.Parameter) -> float:
    dist.barrier()
    began = time.perf_counter()
    with deepspeed.zero.GatheredParameters(parameter):
        pass
    return time.perf_counter() - began


def main() -> None:
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        stock = One()
    taken: dict[str, list[float]] = {}
    is_watched = deepspeed_edits._is_watched
    for _ in range(TURNS):
        seconds(stock.weight)  # the first after memory was given back is slow
        taken.setdefault("stock, no loaded model lives", []).append(seconds(stock.weight))
        ours = zerostart.load(None, model=One(), zero_stage=3, progress=False)
        seconds(stock.weight)
        taken.setdefault("stock, a loaded model lives", []).append(seconds(stock.weight))
        deepspeed_edits._is_watched = lambda _: False
        seconds(ours.weight)
        taken.setdefault("loaded, not watched", []).append(seconds(ours.weight))
        deepspeed_edits._is_watched = is_watched
        seconds(ours.weight)
        taken.setdefault("loaded, watched", []).append(seconds(ours.weight))
        del ours
    if dist.get_rank() == 0:
        medians = {name: statistics.median(values) for name, values in taken.items()}
        first, lives, bare, watched = medians.values()
        rows = [
            f"| {name} | {1000 * medians[name]:.0f} | {1000 * min(values):.0f} to {1000 * max(values):.0f} |"
            for name, values in taken.items()
        ]
        RESULT.write_text(
            f"# A gather of 128 MiB, {dist.get_world_size()} ranks, gloo\n\n"
            f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, {os.cpu_count()} cores, "
            f"{TURNS} turns; milliseconds. `torchrun --nproc-per-node {dist.get_world_size()} "
            "benchmarks/gathered.py`\n\n| parameter | median | range |\n|---|---|---|\n"
            + "\n".join(rows)
            + f"\n\nA loaded model beside it: {lives / first:.2f} times. "
            f"Watched: {watched / bare:.2f} times.\n"
        )
        print(RESULT.read_text())


main()
