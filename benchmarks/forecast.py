"""Compare forecasts of bytes read and peak memory with real ranks, for many configurations.

    python benchmarks/forecast.py [--only NAME ...] [--json FILE] [--table FILE]

Each cell is a fresh group of gloo processes, forked from one server that has imported the libraries. A rank
loads, starts the engine (or creates an optimizer), and trains one step of 16 tokens. The measured value is
the peak of anonymous memory in each phase above the level before the load, of the worst rank. The forecast
is ``zerostart.plan`` with the same arguments. It does not count activations, code and caches of libraries,
so the model is large enough for these not to matter: 119 million parameters, 238 MB in bf16 and 476 MB in
fp32. On the CPU, device memory is host memory. ``MALLOC_MMAP_THRESHOLD_`` makes glibc return freed blocks,
so that only memory in use is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "deepspeed", "transformers.models.qwen3.modeling_qwen3", "zerostart.loading.run"]
PHASES = ("load", "initialize", "step")
HOST = {"device": "cpu", "pin_memory": False}
TIMEOUT = 300
#: Minimum bytes of a freed block that glibc returns to the system. By default it keeps blocks below 32 MiB,
#: which would be measured as used.
MMAP_THRESHOLD = 1 << 17
MiB = 1 << 20


@dataclass(frozen=True)
class Cell:
    """A configuration of checkpoint dtype, ranks, engine and training."""

    stored: str
    ranks: int
    engine: str
    stage: int = 3
    optimizer: str = "adamw"
    zero: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    bf16: bool = True
    masters: bool = True
    exchange: bool | None = None
    #: Like `zerostart train` with `model.dtype: bfloat16` on FSDP2: fp32 shards are the masters.
    fp32_shards: bool = False

    def config(self) -> dict[str, Any] | None:
        """Return the ``engine_config``, for FSDP2 with torch's objects."""
        if self.engine == "fsdp2":
            import torch
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

            config = dict(self.fsdp)
            if config.pop("computes_in_bf16", False):
                reduced = torch.float32 if self.fp32_shards else None
                config["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
            if config.pop("offloaded", False):
                config["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
            return config
        return {
            "train_micro_batch_size_per_gpu": 1,
            **({"bf16": {"enabled": True}} if self.bf16 else {}),
            "zero_optimization": {"stage": self.stage, **self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of both ``load`` and ``plan``."""
        import torch

        casts = self.engine == "fsdp2" and self.bf16
        return {
            "engine": self.engine,
            "zero_stage": self.stage,
            "engine_config": self.config(),
            "dtype": torch.float32 if self.fp32_shards else torch.bfloat16 if casts else None,
            "exchange": self.exchange,
        }


SMALL = {"reduce_bucket_size": 1_000_000}
CELLS: dict[str, Cell] = {
    "z3-bf16-1": Cell("bf16", 1, "deepspeed"),
    "z3-bf16-2": Cell("bf16", 2, "deepspeed"),
    "z3-bf16-3": Cell("bf16", 3, "deepspeed"),
    "z3-bf16-4": Cell("bf16", 4, "deepspeed"),
    "z3-bf16-4-bucket": Cell("bf16", 4, "deepspeed", zero=SMALL),
    "z3-fp32-2": Cell("fp32", 2, "deepspeed", bf16=False),
    "z3-masters-2": Cell("fp32", 2, "deepspeed", zero=SMALL),
    "z3-rounded-2": Cell("fp32", 2, "deepspeed", zero=SMALL, masters=False),
    "z3-sgd-2": Cell("bf16", 2, "deepspeed", optimizer="sgd"),
    "z3-offload-param-2": Cell("bf16", 2, "deepspeed", zero={**SMALL, "offload_param": HOST}),
    "z3-offload-optimizer-2": Cell("bf16", 2, "deepspeed", zero={**SMALL, "offload_optimizer": HOST}),
    "z3-offload-both-2": Cell(
        "bf16", 2, "deepspeed", zero={**SMALL, "offload_param": HOST, "offload_optimizer": HOST}
    ),
    "z3-offload-both-fp32-2": Cell(
        "fp32",
        2,
        "deepspeed",
        bf16=False,
        zero={**SMALL, "offload_param": HOST, "offload_optimizer": HOST},
    ),
    "z3-sub-groups-2": Cell("bf16", 2, "deepspeed", zero={**SMALL, "sub_group_size": 10_000_000}),
    "z3-secondary-4": Cell("bf16", 4, "deepspeed", zero={**SMALL, "zero_hpz_partition_size": 2}),
    "z1-bf16-2": Cell("bf16", 2, "deepspeed", 1),
    "z1-fp32-2": Cell("fp32", 2, "deepspeed", 1, bf16=False),
    "z2-bf16-1": Cell("bf16", 1, "deepspeed", 2),
    "z2-bf16-2": Cell("bf16", 2, "deepspeed", 2),
    "z2-bf16-4": Cell("bf16", 4, "deepspeed", 2),
    "z2-fp32-2": Cell("fp32", 2, "deepspeed", 2, bf16=False),
    "z2-masters-2": Cell("fp32", 2, "deepspeed", 2, zero=SMALL),
    "z2-exchange-2": Cell("bf16", 2, "deepspeed", 2, exchange=True),
    "z2-offload-optimizer-2": Cell("bf16", 2, "deepspeed", 2, zero={**SMALL, "offload_optimizer": HOST}),
    "fsdp2-bf16-1": Cell("bf16", 1, "fsdp2"),
    "fsdp2-bf16-2": Cell("bf16", 2, "fsdp2"),
    "fsdp2-bf16-3": Cell("bf16", 3, "fsdp2"),
    "fsdp2-bf16-4": Cell("bf16", 4, "fsdp2"),
    "fsdp2-fp32-2": Cell("fp32", 2, "fsdp2", bf16=False),
    "fsdp2-masters-2": Cell("fp32", 2, "fsdp2", fsdp={"computes_in_bf16": True}),
    "fsdp2-trained-2": Cell("bf16", 2, "fsdp2", fsdp={"computes_in_bf16": True}, fp32_shards=True),
    "fsdp2-sgd-2": Cell("bf16", 2, "fsdp2", optimizer="sgd"),
    "fsdp2-offload-2": Cell("bf16", 2, "fsdp2", fsdp={"offloaded": True}),
    "fsdp2-replicas-4": Cell("bf16", 4, "fsdp2", fsdp={"replicate": 2}),
    "fsdp2-kept-2": Cell("bf16", 2, "fsdp2", fsdp={"reshard_after_forward": False}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast against measurement.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            cell = CELLS[name]
            checkpoint = Path(folder) / cell.stored
            if not checkpoint.exists():
                make_checkpoint(checkpoint, cell.stored)
            rows.append({"cell": name, **measure_cell(cell, checkpoint)})
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "cells": rows}, indent=1) + "\n")
    if options.table:
        options.table.write_text(table(rows))
    wrong = [row["cell"] for row in rows if not row["bytes_equal"] or worst(row) > 0.1]
    print(f"{len(rows)} cells, {len(wrong)} beyond 10 % or with other bytes: {', '.join(wrong)}")


def make_checkpoint(path: Path, stored: str) -> None:
    """Write a Qwen3 of 119 million random parameters, in a subprocess."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_make, args=(path, stored))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("the checkpoint could not be made")


def _make(path: Path, stored: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 12_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=False, **sizes, **heads)
    dtype = torch.bfloat16 if stored == "bf16" else torch.float32
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)


def measure_cell(cell: Cell, checkpoint: Path) -> dict[str, Any]:
    """Return forecast and measurement of one cell."""
    import zerostart

    plan = zerostart.plan(checkpoint, world_size=cell.ranks, optimizer=cell.optimizer, **cell.arguments())
    ranks = run(cell, checkpoint)
    return {
        "ranks": cell.ranks,
        "bytes_equal": [rank.read_bytes for rank in plan.ranks] == [rank["read_bytes"] for rank in ranks],
        "forecast": {p: max(r.memory[p].host_bytes for r in plan.ranks) for p in PHASES},
        "measured": {p: max(rank[p] for rank in ranks) for p in PHASES},
        "stays": max(rank["stays"] for rank in ranks),
        "forecast_parts": {p: dict(plan.ranks[0].memory[p].host) for p in PHASES},
        "timeline": ranks[0]["timeline"],
    }


def run(cell: Cell, checkpoint: Path) -> list[dict[str, Any]]:
    """Run one fresh group; return each rank's measurement."""
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, cell.ranks + 1, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(cell.ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(cell, checkpoint, rank, store.port, sender))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results = []
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        if not pipe.poll(TIMEOUT):
            sys.exit(f"rank {rank} has returned no result in {TIMEOUT} s")
        try:
            results.append(pipe.recv())
        except EOFError:
            sys.exit(f"rank {rank} ended early, with status {process.exitcode}")
    for process in processes:
        process.join()
    return results


def measure(cell: Cell, checkpoint: Path, rank: int, port: int, pipe: Any) -> None:
    """Run on a rank, and send peaks by phase above the level before."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(cell.ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(cell.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    import zerostart

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, cell.ranks + 1, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=cell.ranks)
    if cell.engine == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    warm_up(cell)
    watch = Watch()
    with watch("load"):
        model = zerostart.load(checkpoint, progress=False, fp32_masters=cell.masters, **cell.arguments())
    engine: Any = model
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[cell.optimizer]
    with watch("initialize"):
        optimizer = kind(model.parameters(), lr=1e-3)
        if cell.engine == "deepspeed":
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=cell.config())[0]
    model.train()
    tokens = torch.arange(16).view(1, -1)
    with watch("step", "forward"):
        loss = engine(input_ids=tokens, labels=tokens).loss
    with watch("step", "backward"):
        engine.backward(loss) if cell.engine == "deepspeed" else loss.backward()
    with watch("step", "update"):
        engine.step() if cell.engine == "deepspeed" else optimizer.step()
    read = zerostart.report(model).read_bytes
    pipe.send(
        {"rank": rank, "read_bytes": read, **watch.peaks, "stays": watch.now(), "timeline": watch.times}
    )
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # skips the teardown, which may hang


def warm_up(cell: Cell) -> None:
    """Train a tiny step first, because an engine's first step imports much."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Linear(8, 8)
    if cell.engine == "deepspeed":
        import deepspeed

        model = model.bfloat16() if cell.bf16 else model
        config = {
            **(cell.config() or {}),
            "zero_optimization": {"stage": cell.stage, "reduce_bucket_size": 64},
        }
        optimizer = torch.optim.AdamW(model.parameters())
        model = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    else:
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).sum()
    model.backward(loss) if cell.engine == "deepspeed" else loss.backward()
    model.step() if cell.engine == "deepspeed" else optimizer.step()


class Watch:
    """Meter of memory peaks by phase, above the level at its creation."""

    def __init__(self) -> None:
        from zerostart.transfer.meter import anonymous_bytes

        self._level = anonymous_bytes
        self._start = anonymous_bytes()
        self.peaks: dict[str, int] = {}
        self.times: dict[str, tuple[int, int]] = {}

    def now(self) -> int:
        return self._level() - self._start

    def __call__(self, phase: str, part: str | None = None) -> Any:
        import contextlib

        import torch

        from zerostart.transfer import PeakMeter

        @contextlib.contextmanager
        def measure_phase() -> Any:
            before = self.now()
            with PeakMeter(torch.device("cpu"), 0.002) as meter:
                yield
            peak = before + meter.host_bytes
            self.peaks[phase] = max(self.peaks.get(phase, 0), peak)
            self.times[part or phase] = (peak, self.now())

        return measure_phase()


def worst(row: dict[str, Any]) -> float:
    """Return the largest deviation of a measured peak from its forecast."""
    return max(abs(row["measured"][p] / row["forecast"][p] - 1) for p in PHASES)


def line(row: dict[str, Any]) -> str:
    """Return a row of the table: forecast and measured MiB of each phase."""
    cells = []
    for phase in PHASES:
        forecast, measured = row["forecast"][phase], row["measured"][phase]
        cells.append(f"{forecast / MiB:.0f} | {measured / MiB:.0f} | {measured / forecast - 1:+.1%}")
    read = "equal" if row["bytes_equal"] else "OTHER"
    return f"| {row['cell']} | {row['ranks']} | {read} | {' | '.join(cells)} |"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    head = ["cell", "ranks", "bytes read"]
    for phase in ("load", "through initialize", "first step"):
        head += [f"{phase}: forecast, MiB", "measured, MiB", "difference"]
    deviations = sorted(worst(row) for row in rows)
    lines = [
        "# Forecast against measurement",
        "",
        f"Made by `benchmarks/forecast.py` on {machine()}.",
        "Anonymous memory of the worst rank at its highest in each phase, above the level before the load.",
        "There is no accelerator: device memory is host memory. glibc is told to give freed blocks back",
        "(`MALLOC_MMAP_THRESHOLD_`); otherwise it keeps those below 32 MiB, a few hundred MiB of them here.",
        "",
        f"{len(rows)} configurations; bytes read are equal in {sum(r['bytes_equal'] for r in rows)}, and the",
        f"largest difference of a peak is {deviations[-1]:.1%} (median of the cells' largest: "
        f"{deviations[len(deviations) // 2]:.1%}).",
        "",
        f"| {' | '.join(head)} |",
        f"|---|---:|---|{'---:|' * 9}",
        *map(line, rows),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Describe the machine and libraries."""
    import deepspeed
    import torch

    return (
        f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__}"
    )


if __name__ == "__main__":
    main()
