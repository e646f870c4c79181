"""Forecast against measurement: bytes read and peak memory of real ranks, for many configurations.

    python benchmarks/forecast.py [--only NAME ...] [--json FILE] [--table FILE]

Each cell is a group of fresh processes with gloo, forked from one server that has the libraries imported. A
rank loads, hands over to the engine (or makes an optimizer), and trains one step of 16 tokens. Measured is
anonymous memory above the level before the load, at its highest in each phase; the worst rank counts. The
forecast is ``zerostart.plan`` with the same arguments, made beforehand. It leaves out activations, code and
what libraries keep for themselves, so the models are big enough for these not to matter: 119 million
parameters, 238 MB in bf16 and 476 MB in fp32. On the CPU the memory of the device is memory of the host.
glibc is told to give freed blocks back (``MALLOC_MMAP_THRESHOLD_``), so that memory in use is what is seen.
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
#: Blocks from this size on go back to the system when they are freed. By default glibc keeps those below
#: 32 MiB for later, which then look as if they were still in use.
GIVEN_BACK = 1 << 17
MiB = 1 << 20


@dataclass(frozen=True)
class Cell:
    """A configuration: the stored dtype, ranks, and how they load and train."""

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
    #: As `zerostart train` has `model.dtype: bfloat16` on FSDP2: shards in fp32, which are the masters.
    as_trained: bool = False

    def config(self) -> dict[str, Any] | None:
        """The ``engine_config``, which has objects of torch for FSDP2."""
        if self.engine == "fsdp2":
            import torch
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

            made = dict(self.fsdp)
            if made.pop("computes_in_bf16", False):
                reduced = torch.float32 if self.as_trained else None
                made["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
            if made.pop("offloaded", False):
                made["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
            return made
        return {
            "train_micro_batch_size_per_gpu": 1,
            **({"bf16": {"enabled": True}} if self.bf16 else {}),
            "zero_optimization": {"stage": self.stage, **self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def arguments(self) -> dict[str, Any]:
        """What ``load`` and ``plan`` have in common."""
        import torch

        casts = self.engine == "fsdp2" and self.bf16
        return {
            "engine": self.engine,
            "zero_stage": self.stage,
            "engine_config": self.config(),
            "dtype": torch.float32 if self.as_trained else torch.bfloat16 if casts else None,
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
    "fsdp2-trained-2": Cell("bf16", 2, "fsdp2", fsdp={"computes_in_bf16": True}, as_trained=True),
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
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(GIVEN_BACK)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            cell = CELLS[name]
            checkpoint = Path(folder) / cell.stored
            if not checkpoint.exists():
                make_checkpoint(checkpoint, cell.stored)
            rows.append({"cell": name, **compared(cell, checkpoint)})
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "cells": rows}, indent=1) + "\n")
    if options.table:
        options.table.write_text(table(rows))
    wrong = [row["cell"] for row in rows if not row["bytes_equal"] or worst(row) > 0.1]
    print(f"{len(rows)} cells, {len(wrong)} beyond 10 % or with other bytes: {', '.join(wrong)}")


def make_checkpoint(path: Path, stored: str) -> None:
    """A Qwen3 of 119 million random parameters, in a process of its own."""
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


def compared(cell: Cell, checkpoint: Path) -> dict[str, Any]:
    """Forecast and measurement of one cell."""
    import zerostart

    # What the ranks will be told by their launcher, for the forecast to be of this machine.
    made = zerostart.plan(checkpoint, world_size=cell.ranks, optimizer=cell.optimizer, **cell.arguments())
    found = run(cell, checkpoint)
    return {
        "ranks": cell.ranks,
        "bytes_equal": [rank.read_bytes for rank in made.ranks] == [rank["read_bytes"] for rank in found],
        "forecast": {p: max(r.memory[p].host_bytes for r in made.ranks) for p in PHASES},
        "measured": {p: max(rank[p] for rank in found) for p in PHASES},
        "stays": max(rank["stays"] for rank in found),
        "forecast_parts": {p: dict(made.ranks[0].memory[p].host) for p in PHASES},
        "timeline": found[0]["timeline"],
    }


def run(cell: Cell, checkpoint: Path) -> list[dict[str, Any]]:
    """What each rank of one fresh group measures."""
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, cell.ranks + 1, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(cell.ranks):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(cell, checkpoint, rank, store.port, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    found = []
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        if not pipe.poll(TIMEOUT):
            sys.exit(f"rank {rank} has measured nothing in {TIMEOUT} s")
        try:
            found.append(pipe.recv())
        except EOFError:
            sys.exit(f"rank {rank} ended early, with status {process.exitcode}")
    for process in processes:
        process.join()
    return found


def measure(cell: Cell, checkpoint: Path, rank: int, port: int, pipe: Any) -> None:
    """On a rank: peaks by phase, in bytes above the level before the load."""
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
    os._exit(0)  # Engines and groups have nothing more to say, and some wait for each other when they go.


def warm_up(cell: Cell) -> None:
    """Train a step of a few elements on the same engine, which imports and builds much at its first."""
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
    """Peaks of phases above the level at the start."""

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
        def watched() -> Any:
            before = self.now()
            with PeakMeter(torch.device("cpu"), 0.002) as meter:
                yield
            peak = before + meter.host_bytes
            self.peaks[phase] = max(self.peaks.get(phase, 0), peak)
            self.times[part or phase] = (peak, self.now())

        return watched()


def worst(row: dict[str, Any]) -> float:
    """The largest deviation of a measured peak from its forecast."""
    return max(abs(row["measured"][p] / row["forecast"][p] - 1) for p in PHASES)


def line(row: dict[str, Any]) -> str:
    """A row of the table: forecast and measured MiB of each phase."""
    cells = []
    for phase in PHASES:
        told, found = row["forecast"][phase], row["measured"][phase]
        cells.append(f"{told / MiB:.0f} | {found / MiB:.0f} | {found / told - 1:+.1%}")
    read = "equal" if row["bytes_equal"] else "OTHER"
    return f"| {row['cell']} | {row['ranks']} | {read} | {' | '.join(cells)} |"


def table(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
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
    """What it ran on, in words."""
    import deepspeed
    import torch

    return (
        f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__}"
    )


if __name__ == "__main__":
    main()
