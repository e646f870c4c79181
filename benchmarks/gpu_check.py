"""What can only be seen on an accelerator: `make gpu-check`, or plain python with PYTHONPATH=src.

    python benchmarks/gpu_check.py [--out FILE] [--scratch DIR]

One process, one accelerator, no process group of its own. Loads tiny checkpoints of several layouts and one
of 3.4 GB on each engine that is installed, compares every element with transformers' unsharded load, checks
that shards and buffers are on the device, trains five steps, and notes times and peak memory (of the host
the anonymous part; both above the level before the load).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

import zerostart
from zerostart.models.synth import synthesise
from zerostart.upstream.deepspeed import partition_of

ROOT = Path(__file__).resolve().parent.parent
TINY = ("qwen3", "qwen3_moe", "mixtral", "gpt_oss")
LARGE = ROOT / "benchmarks" / "configs" / "qwen3_moe_3.4gb.json"
MiB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks on an accelerator.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    parser.add_argument(
        "--scratch", type=Path, help="where the checkpoints are made; default: a temporary folder"
    )
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        sys.exit("no accelerator here")
    engines = ["fsdp2", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        for name in TINY:
            path = make(name, Path(scratch) / name, "tiny")
            results += [check(path, engine, train=True) for engine in engines]
        path = make(str(LARGE), Path(scratch) / "large", None)
        # Twice: the first load also warms the page cache and the device.
        results += [check(path, engine, train=False) for engine in engines for _ in range(2)]
    facts = {
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else str(torch.accelerator.current_accelerator()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "engines": engines,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"facts": facts, "results": results}, indent=2) + "\n")
    failed = [r for r in results if r["wrong"] or r["off_device"] or r["over_budget"]]
    print(f"{len(results)} loads, {len(failed)} failed")
    sys.exit(1 if failed else 0)


def make(source: str, out: Path, size: str | None) -> Path:
    synthesise(source, out, size=size)
    return out


def check(path: Path, engine: str, train: bool) -> dict[str, Any]:
    """Load on one engine and compare; returns what was seen."""
    model = zerostart.load(str(path), engine=engine, progress=False)
    made = zerostart.report(model)
    kind = next(k for k in type(model).__mro__ if k.__module__.startswith("transformers."))
    expected = kind.from_pretrained(path).state_dict()
    seen = {name: tensor for name, tensor in zerostart.full_tensors(model) if tensor is not None}
    wrong = sorted(expected.keys() ^ seen.keys())
    wrong += [n for n in seen.keys() & expected.keys() if not torch.equal(seen[n], expected[n])]
    budget = sum(t.numel() * t.itemsize for t in {id(t): t for t in expected.values()}.values()) + 64 * MiB
    result = {
        "checkpoint": path.name,
        "engine": engine,
        "seconds": made.phases,
        "read_bytes": made.read_bytes,
        "peak_device_bytes": made.peak_device_bytes,
        "peak_host_bytes": made.peak_host_bytes,
        "wrong": wrong,
        "off_device": off_device(model),
        "over_budget": made.peak_device_bytes > budget or made.peak_host_bytes > 256 * MiB,
        "losses": losses(model, engine) if train else [],
    }
    print(json.dumps({k: v for k, v in result.items() if k != "off_device"}), flush=True)
    del model
    torch.accelerator.empty_cache()
    return result


def off_device(model: torch.nn.Module) -> list[str]:
    """Names of shards and buffers that are not on the accelerator."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    names = [name for name, buffer in model.named_buffers() if buffer.device.type != kind.type]
    for name, parameter in model.named_parameters():
        state = partition_of(parameter)
        local = state[0] if state else parameter
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.device.type != kind.type:
            names.append(name)
    return names


def losses(model: torch.nn.Module, engine: str) -> list[float]:
    """Five training steps on made-up tokens."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    runner: Any = model
    if engine == "deepspeed":
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }
        runner, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    device = torch.accelerator.current_accelerator()
    tokens = torch.arange(32, device=device).view(1, 32) % 200
    seen = []
    for _ in range(5):
        loss = runner(input_ids=tokens, labels=tokens).loss
        if engine == "deepspeed":
            runner.backward(loss)
            runner.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    return seen


if __name__ == "__main__":
    main()
