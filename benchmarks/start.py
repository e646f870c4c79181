"""Starts without a checkpoint: peak memory, seconds and bits, of a 1.8 GB model on local ranks.

    python benchmarks/start.py [--ranks 2] [--engines deepspeed-3 ...] [--arms fresh existing] [--json FILE]

``fresh`` is ``load(None, model=config)``, after which every tensor is compared, by its digest, with the
unsharded model after the same seed. ``existing`` is ``load(None, model=module)`` of that model in memory.
Every cell is a fresh group of processes, in which a small model has gone the same way before. Figures are of
the worst rank: anonymous memory above the level before the call, for ``fresh`` less the bytes that the rank
keeps (the shard), for ``existing`` as it is, where that level has the whole module in it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ENGINES = ("deepspeed-3", "deepspeed-2", "fsdp2-3", "fsdp2-0")
ARMS = ("fresh", "existing")
SIZES = {"vocab_size": 32_000, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 10}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 96, "tie_word_embeddings": False}
SMALL = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts without a checkpoint.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(*options.worker.split(":"))))
        return
    rows = []
    print("| engine | arm | model, MiB | kept by a rank, MiB | beyond it, MiB | seconds | as unsharded |")
    print("|---|---|---:|---:|---:|---:|---|")
    for engine in options.engines:
        for arm in options.arms:
            row = cell(engine, arm, options.ranks)
            rows.append({"engine": engine, "arm": arm, "ranks": options.ranks, **row})
            sizes = " | ".join(f"{row[key] / MIB:.0f}" for key in ("model", "kept", "beyond"))
            same = "yes" if row["same"] else "NO"
            print(f"| {engine} | {arm} | {sizes} | {row['seconds']:.1f} | {same} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def cell(engine: str, arm: str, count: int) -> dict[str, Any]:
    """The worst rank of one fresh group of processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--worker", f"{engine}:{arm}"]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    ranks = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **shared, **own}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = []
    for process in ranks:
        output, _ = process.communicate(timeout=900)
        if process.returncode:
            sys.exit(f"{engine}, {arm}: a rank ended with status {process.returncode}")
        found.append(json.loads(output.splitlines()[-1]))
    worst = {key: max(result[key] for result in found) for key in found[0]}
    return worst | {"same": all(result["same"] for result in found)}


def measure(engine: str, arm: str) -> dict[str, Any]:
    """On a rank: bytes and seconds."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    import zerostart
    from zerostart.transfer import PeakMeter

    dist.init_process_group("gloo")
    name, _, stage = engine.partition("-")
    given: dict[str, Any] = {"engine": name, "zero_stage": int(stage), "progress": False}

    def config(**sizes: Any) -> Any:
        return AutoConfig.for_model("qwen3", architectures=["Qwen3ForCausalLM"], **{**HEADS, **sizes})

    def whole(**sizes: Any) -> Any:
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(config(**sizes), dtype=torch.float32)

    zerostart.load(None, model=config(**SMALL) if arm == "fresh" else whole(**SMALL), **given)
    start = whole(**SIZES) if arm == "existing" else config(**SIZES)
    torch.manual_seed(1)
    dist.barrier()
    with PeakMeter(torch.device("cpu")) as meter:
        model = zerostart.load(None, model=start, **given)
    held = zerostart.digest(model)
    report = zerostart.report(model)
    sharded = name == "fsdp2" and stage != "0"
    kept = sum(_held(p, sharded) for p in model.parameters())
    expected = whole(**SIZES)
    same = zerostart.digest(expected) == held
    nbytes = sum(p.numel() * p.element_size() for p in expected.parameters())
    beyond = meter.host_bytes - (kept if arm == "fresh" else 0)
    return {
        "model": nbytes,
        "kept": kept,
        "beyond": beyond,
        "seconds": report.phases["total"],
        "same": same,
    }


def _held(parameter: Any, sharded: bool) -> int:
    local = parameter.to_local() if sharded else getattr(parameter, "ds_tensor", parameter)
    return int(local.numel() * local.element_size())


if __name__ == "__main__":
    main()
