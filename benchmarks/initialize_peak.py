"""Peak memory of a rank from the load through ``deepspeed.initialize``, for placements of ZeRO-3.

    python benchmarks/initialize_peak.py [--checkpoint DIR] [--ranks 2] [--placements ...] [--json FILE]

Every cell is a fresh group of processes, in which a small model has gone the same way before. Figures are
anonymous memory above the level before the load, in MiB and in bytes for each element of a share: at its
highest in the load, at its highest through ``initialize``, and what stays after it. The worst rank counts.
The default checkpoint has 80 million bf16 parameters.
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
}
GROUPS = ("one", "two")


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory through deepspeed.initialize.")
    parser.add_argument("--checkpoint", type=Path)
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
        print(json.dumps(measure(arm, PLACEMENTS[placement], options.checkpoint, options.groups)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or made_checkpoint(Path(folder) / "checkpoint")
        rows = [
            {"placement": placement, "arm": arm, **cell(arm, placement, checkpoint, options)}
            for placement in options.placements
            for arm in options.arms
        ]
    print(
        "| placement | arm | load, MiB | through initialize | stays | bytes an element: load, peak, stays |"
    )
    print("|---|---|---:|---:|---:|---|")
    for row in rows:
        sizes = [row[key] for key in ("load", "peak", "stays")]
        each = ", ".join(f"{size / row['elements']:.1f}" for size in sizes)
        shown = " | ".join(f"{size / 2**20:.0f}" for size in sizes)
        print(f"| {row['placement']} | {row['arm']} | {shown} | {each} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def made_checkpoint(path: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 24_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=False, **sizes, **heads)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def cell(arm: str, placement: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The worst rank of one fresh group of processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--worker", f"{arm}:{placement}", "--checkpoint", str(checkpoint)]
    command += ["--groups", options.groups]
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


def measure(arm: str, zero: dict[str, Any], checkpoint: Path, groups: str) -> dict[str, int]:
    """On a rank: bytes above the level before the load."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import zerostart
    from zerostart.transfer import PeakMeter

    dist.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    device = torch.device("cpu")
    warm_up(config, checkpoint)
    before = anonymous()
    with PeakMeter(device) as through:
        with PeakMeter(device) as load:
            if arm == "zerostart":
                model = zerostart.load(checkpoint, engine_config=config, progress=False)
            else:
                from transformers.integrations import HfDeepSpeedConfig

                keep = HfDeepSpeedConfig(config)
                model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
                del keep
        elements = sum(p.ds_tensor.ds_numel for p in model.parameters())
        parts: list[list[Any]] = [list(model.parameters())]
        if groups == "two":
            norms = [p for p in model.parameters() if len(p.ds_shape) == 1]
            parts = [[p for p in model.parameters() if len(p.ds_shape) > 1], norms]
        optimizer = torch.optim.AdamW([{"params": part} for part in parts])
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
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
    model = zerostart.load(weights, model=layer, engine_config=config, progress=False)
    optimizer = torch.optim.AdamW(model.parameters())
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


if __name__ == "__main__":
    main()
