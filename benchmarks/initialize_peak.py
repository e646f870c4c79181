"""Peak memory of a rank from the load through ``deepspeed.initialize``: placements of ZeRO-3, shared tensors.

    python benchmarks/initialize_peak.py [--checkpoint DIR] [--large] [--ranks 2] [--placements ...]

Every cell is a fresh group of processes, in which a small model has gone the same way before. Figures are
anonymous memory above the level before the load, in MiB and in bytes for each element of a share: at its
highest in the load, at its highest through ``initialize``, and what stays after it. The worst rank counts.
Beside them is the most that ``zerostart.plan`` says of the load and ``initialize``. The default checkpoint
has 80 million bf16 parameters, a ``--large`` one 452 million. ``tensors`` is ZeRO-2 in fp32 with
``autotp_size`` ranks that share tensors, which stock cuts out of a whole model of 1.8 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ARMS = ("zerostart", "stock")
HOST = {"device": "cpu", "pin_memory": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "accelerator": {},
    "offload-param": {"offload_param": HOST},
    "offload-optimizer": {"offload_optimizer": HOST},
    "offload-both": {"offload_param": HOST, "offload_optimizer": HOST},
    "tensors": {"stage": 2},
}
GROUPS = ("one", "two")


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory through deepspeed.initialize.")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--large", action="store_true", help="a checkpoint of 452 million parameters")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--placements", nargs="+", choices=list(PLACEMENTS), default=list(PLACEMENTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--groups", choices=GROUPS, default="one", help="optimizer groups, as by weight decay"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        arm, placement = options.worker.split(":")
        config = config_of(placement, options.ranks)
        print(json.dumps(measure(arm, config, options.checkpoint, options.groups)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or made_checkpoint(Path(folder) / "checkpoint", options.large)
        rows = [
            {"placement": placement, "arm": arm, **cell(arm, placement, checkpoint, options)}
            for placement in options.placements
            for arm in options.arms
        ]
        for row in rows:
            row["forecast"] = forecast(row["placement"], checkpoint, options.ranks)
    print("| placement | arm | load, MiB | through initialize | forecast | stays | bytes an element |")
    print("|---|---|---:|---:|---:|---:|---|")
    for row in rows:
        each = ", ".join(f"{row[key] / row['elements']:.1f}" for key in ("load", "peak", "stays"))
        shown = " | ".join(f"{row[key] / 2**20:.0f}" for key in ("load", "peak", "forecast", "stays"))
        print(f"| {row['placement']} | {row['arm']} | {shown} | {each} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def config_of(placement: str, ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration; of ranks that share tensors they all do."""
    shares = placement == "tensors"
    zero = {"stage": 3, "reduce_bucket_size": 1_000_000, **PLACEMENTS[placement]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": not shares},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"tensor_parallel": {"autotp_size": ranks}} if shares else {}),
    }


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """What ``load`` and ``plan`` are told of a configuration."""
    import torch

    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    stage = config["zero_optimization"]["stage"]
    return {"engine_config": config, "zero_stage": stage, "dtype": dtype, "exchange": False}


def forecast(placement: str, checkpoint: Path, ranks: int) -> int:
    """The most of any rank, until the engine is there."""
    import zerostart

    told = zerostart.plan(checkpoint, ranks, optimizer="adamw", **options_of(config_of(placement, ranks)))
    until = ("load", "initialize")
    return max(r.memory[p].host_bytes + r.memory[p].device_bytes for r in told.ranks for p in until)


def made_checkpoint(path: Path, large: bool) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 24_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    if large:
        sizes = {**sizes, "vocab_size": 32_000, "hidden_size": 1536, "intermediate_size": 6144}
        sizes, heads = {**sizes, "num_hidden_layers": 10}, {**heads, "head_dim": 96}
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=False, **sizes, **heads)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def cell(arm: str, placement: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The worst rank of one fresh group of processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--worker", f"{arm}:{placement}", "--checkpoint", str(checkpoint)]
    command += ["--groups", options.groups, "--ranks", str(options.ranks)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks)}
    ranks = []
    for rank in range(options.ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(options.ranks)}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **shared, **own}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = []
    for process in ranks:
        output, _ = process.communicate(timeout=600)
        if process.returncode:
            sys.exit(f"{arm}, {placement}: a rank ended with status {process.returncode}")
        found.append(json.loads(output.splitlines()[-1]))
    return {key: max(result[key] for result in found) for key in found[0]}


def measure(arm: str, config: dict[str, Any], checkpoint: Path, groups: str) -> dict[str, int]:
    """On a rank: bytes above the level before the load."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import zerostart
    from zerostart.transfer import PeakMeter

    dist.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo")
    device, given = torch.device("cpu"), options_of(config)
    warm_up(config, checkpoint)
    before = anonymous()
    with PeakMeter(device) as through:
        with PeakMeter(device) as load:
            if arm == "zerostart":
                model = zerostart.load(checkpoint, progress=False, **given)
            else:
                from transformers.integrations import HfDeepSpeedConfig

                keep = HfDeepSpeedConfig(config)
                model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=given["dtype"])
                del keep
        parts: list[list[Any]] = [list(model.parameters())]
        if groups == "two":
            wide = {p: len(getattr(p, "ds_shape", p.shape)) > 1 for p in model.parameters()}
            parts = [[p for p in wide if wide[p]], [p for p in wide if not wide[p]]]
        optimizer = torch.optim.AdamW([{"params": part} for part in parts])
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        elements = sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())
    stays = anonymous() - before
    assert engine is not None
    return {"load": load.host_bytes, "peak": through.host_bytes, "stays": stays, "elements": elements}


def warm_up(config: dict[str, Any], checkpoint: Path) -> None:
    """Import and make what a process has once, whatever the size of the model."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import zerostart

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
        layer = torch.nn.Linear(8, 8, bias=False)
    weights = {"weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    config = {key: value for key, value in config.items() if key != "tensor_parallel"}
    model = zerostart.load(weights, model=layer, progress=False, **options_of(config))
    optimizer = torch.optim.AdamW(model.parameters())
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


if __name__ == "__main__":
    main()
