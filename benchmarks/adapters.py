"""Measure the memory of training steps with LoRA on experts that two ranks share.

    python benchmarks/adapters.py [--layers 4 12] [--engines deepspeed fsdp2] [--out FILE]

Each cell takes two steps of AdamW on 128 tokens in fresh processes, and is sampled as in load.py. ``kept``
lets autograd keep the experts' weights with adapters added, as it does without zerostart's hooks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

from arms import deepspeed_config, memory, start_gloo
from cells import ROOT, benchmark_checkpoint, run_cell, warm
from table import MIB, machine

ENGINES, RANKS = ("deepspeed", "fsdp2"), 2


def main() -> None:
    options = arguments()
    if options.result:
        options.result.write_text(json.dumps(train(options.engines[0], options.checkpoint, options.keep)))
        os._exit(0)  # skips the engines' teardown, which takes seconds
    rows = []
    for layers in options.layers:
        checkpoint = benchmark_checkpoint(layers)
        for engine in options.engines:
            for keep in (False, True):
                rows.append({"layers": layers, "engine": engine, "kept": keep})
                rows[-1] |= measure(engine, checkpoint, keep)
                print(rows[-1], flush=True)
    write(rows, options.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of the memory of LoRA on experts.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "adapters.json")
    for name in ("--checkpoint", "--result"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(engine: str, checkpoint: Path, keep: bool) -> dict[str, float]:
    """Run one cell; return bytes of the largest rank."""
    warm(checkpoint)
    arguments = ["--engines", engine, "--checkpoint", checkpoint, *["--keep"] * keep]
    figures = []
    for cell, samples in run_cell("adapters.py", arguments, RANKS, 600):
        peak = max(anonymous for at, anonymous, _ in samples if cell["started"] <= at <= cell["ended"])
        figures.append({**cell["sizes"], "peak": peak - cell["before"]})
    return {name: max(figure[name] for figure in figures) for name in figures[0]}


def train(engine: str, checkpoint: Path, keep: bool) -> dict[str, Any]:
    """Load, add adapters and take two steps, as one rank."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model

    import zerostart

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    start_gloo()
    config = deepspeed_config()
    model: Any = zerostart.load(
        checkpoint,
        engine=engine,
        engine_config=config if engine == "deepspeed" else None,
        expert_parallel=RANKS,
        progress=False,
    )
    gc.collect()
    dist.barrier()
    before, started = memory()["RssAnon"], time.monotonic()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj"], target_parameters=names))
    trained = [p for p in model.train().parameters() if p.requires_grad]
    adapters = sum(map(held_bytes, trained))
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    called = model
    if engine == "deepspeed":
        import deepspeed

        called, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, 32000, (1, 128))
    hooks: Any = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    for _ in range(2):
        with hooks if keep else contextlib.nullcontext():
            loss = called(input_ids=tokens, labels=tokens, use_cache=False).loss
        if engine == "deepspeed":
            called.backward(loss)
            called.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ended = time.monotonic()
    experts = [p for name, p in model.named_parameters() if name.endswith("_proj") and ".layers.0." in name]
    return {
        "before": before,
        "started": started,
        "ended": ended,
        "sizes": {"adapters": adapters, "layer": sum(map(held_bytes, experts))},
    }


def held_bytes(parameter: Any) -> int:
    """Return the bytes of this rank's experts in ``parameter``, or of its factors."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return getattr(local, "ds_numel", local.numel()) * parameter.element_size()


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Print and write the table."""
    lines = [
        "| engine | layers | adapters MiB | experts MiB | peak MiB | peak with copies MiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for recomputed, kept in zip(rows[::2], rows[1::2], strict=True):
        # In fp32: the adapters, their gradients and AdamW's two states.
        sizes = [4 * recomputed["adapters"], recomputed["layer"], recomputed["peak"], kept["peak"]]
        cells = " | ".join(f"{size / MIB:.0f}" for size in sizes)
        lines.append(f"| {recomputed['engine']} | {recomputed['layers']} | {cells} |")
    text = (
        "# LoRA on experts that two ranks share: memory of training\n\n"
        "Qwen3-MoE in bf16, 64 experts in each layer, LoRA of rank 16, two steps of 128 tokens on each\n"
        "rank. The figures are those of the largest rank.\n\n"
        "- adapters: with their gradients and optimizer states.\n"
        "- experts: the rank's experts of one layer.\n"
        "- peak: of anonymous host memory, above the loaded model. Apart from adapters and experts, these\n"
        "  are mostly activations: with 16 tokens instead of 128, four layers took 290 MiB less.\n"
        "- peak with copies: autograd keeps the experts of all layers with adapters added.\n\n"
    )
    text += "\n".join(lines) + "\n"
    print(text)
    out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
