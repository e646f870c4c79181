"""TRL's own synchronisation of weights beside ours: two ranks that train and serve in the same processes.

    python benchmarks/refit_trl.py [--layers 21] [--repeats 3] [--out FILE]

Needs TRL. The trainer is FSDP2 in bf16, the engine a Qwen3 whose tensors the two ranks share, with fused
parameters and a loader as engines have it: TRL's colocated mode with ``vllm_tensor_parallel_size=2``. Arms
alternate, each in fresh processes:

- ``trl``: what ``VLLMGeneration.sync_weights`` does: its ``_iter_named_params``, name by name the whole
  tensor on every rank, and ``load_weights`` of each;
- ``ours``: ``zerostart.refit`` with an engine in each rank, digests of all that was read back included;
- ``raw``: each rank's shards copied into shared memory, and what its engine holds copied out of it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from refit import CONFIG, anonymous, peak  # noqa: E402  # beside this file

ARMS, RANKS, SYNCS = ("trl", "ours", "raw"), 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights into engines within the trainer's ranks.")
    parser.add_argument("--layers", type=int, default=21, help="21 with a head: 3.4 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        part(*options.role, layers=options.layers)
        return
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for repeat in range(options.repeats):
        for arm in ARMS if repeat % 2 == 0 else ARMS[::-1]:
            found[arm].append(cell(arm, options.layers))
            print(f"repeat {repeat + 1}/{options.repeats}  {arm:<5} {found[arm][-1]}", flush=True)
    print("\n" + table(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(found, options.repeats))


def cell(arm: str, layers: int) -> dict[str, Any]:
    """One arm in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="bench-refit-trl-", dir="/dev/shm") as folder:
        command = [sys.executable, __file__, "--layers", str(layers), "--role", arm]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        started = [subprocess.Popen([*command, str(rank), folder], env=environment) for rank in range(RANKS)]
        codes = [process.wait(560) for process in started]
        if any(codes):
            raise SystemExit(f"{arm}: exit codes {codes}")
        parts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {
        "bytes": parts[0]["bytes"],
        "first_seconds": round(parts[0]["seconds"][0], 2),
        "seconds": round(min(parts[0]["seconds"][1:]), 2),
        "beside": max(part["beside"] for part in parts),
        "digest": [part["digest"] for part in parts] if arm != "raw" else None,
    }


def part(arm: str, number: str, folder: str, layers: int) -> None:
    """One rank: its shards, its part of the engine, and some synchronisations."""
    import transformers
    from torch.distributed.fsdp import fully_shard

    from tests.refit.workers import Engine

    rank = int(number)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    config = {**CONFIG, "num_hidden_layers": layers}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("qwen3", **config), dtype=torch.bfloat16
        )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        local = parameter.to_local()  # type: ignore[attr-defined]
        local.view(-1).view(torch.int16).copy_(torch.arange(local.numel()) * 31 + index & 0x3FFF)
    engine = Engine(config, rank, RANKS, torch.bfloat16)
    sync = {"trl": by_trl, "ours": by_refit, "raw": by_copy}[arm](model, engine, Path(folder))
    before, seconds, beside = anonymous(), [], 0
    for _ in range(SYNCS):
        dist.barrier()
        begun = time.perf_counter()
        beside = max(beside, peak(sync)[0] - before)
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    digest = sum(int(tensor.data.view(-1).view(torch.int16).long().sum()) for tensor in engine.parameters())
    nbytes = sum(parameter.numel() * 2 for parameter in model.parameters())
    found = {"bytes": nbytes, "seconds": seconds, "beside": beside, "digest": digest}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def by_trl(model: Any, engine: Any, folder: Path) -> Callable[[], object]:
    """TRL's own walk over the parameters, of a ``VLLMGeneration`` that was not started."""
    from trl.generation.vllm_generation import VLLMGeneration

    generation: Any = VLLMGeneration.__new__(VLLMGeneration)
    generation.model = model
    generation.accelerator = SimpleNamespace(device=torch.device("cpu"))
    generation._dist = SimpleNamespace(is_fsdp=True, fsdp_version=2)

    def sync() -> None:
        for name, parameter in generation._iter_named_params():
            engine.load_weights([(name, parameter)])

    return sync


def by_refit(model: Any, engine: Any, folder: Path) -> Callable[[], object]:
    import zerostart

    refitter: Any = zerostart.refit(model, engine)
    return lambda: refitter.push()


def by_copy(model: Any, engine: Any, folder: Path) -> Callable[[], object]:
    locals_ = [parameter.to_local().view(-1).view(torch.uint8) for parameter in model.parameters()]
    held = [parameter.data.view(-1).view(torch.uint8) for parameter in engine.parameters()]
    own = sum(tensor.numel() for tensor in locals_)
    if dist.get_rank() == 0:
        with Path(folder, "raw").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, own * RANKS)
    dist.barrier()
    with Path(folder, "raw").open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), own * RANKS), dtype=torch.uint8)

    def sync() -> None:
        at = own * dist.get_rank()
        for local in locals_:
            memory[at : at + local.numel()].copy_(local)
            at += local.numel()
        dist.barrier()
        at = own * dist.get_rank()
        for tensor in held:
            size = min(tensor.numel(), memory.numel() - at)
            tensor[:size].copy_(memory[at : at + size])
            at += size

    return sync


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    raw = statistics.median(run["seconds"] for run in found["raw"])
    lines = ["| arm | seconds | range | first | of raw | beside a rank |", "|---|---|---|---|---|---|"]
    for arm, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        middle, first = statistics.median(seconds), statistics.median(run["first_seconds"] for run in runs)
        lines.append(
            f"| {arm} | {middle:.2f} | {min(seconds):.2f} to {max(seconds):.2f} | {first:.2f} | "
            f"{middle / raw:.2f} | {max(run['beside'] for run in runs) >> 20} MiB |"
        )
    return "\n".join(lines)


def page(found: dict[str, list[dict[str, Any]]], repeats: int) -> str:
    from importlib.metadata import version

    same = all(run["digest"] == found["trl"][0]["digest"] for arm in ("trl", "ours") for run in found[arm])
    return (
        f"# Weights into engines within the trainer's ranks\n\n{found['raw'][0]['bytes'] / 1e9:.2f} GB in "
        f"bf16, {RANKS} ranks (FSDP2), each with half of an engine, {os.cpu_count()} cores, other programs "
        f"on the machine; the best of the later synchronisations of each of {repeats} runs, median and range "
        f"over runs. `python benchmarks/refit_trl.py` with TRL {version('trl')} and torch "
        f"{torch.__version__}. What a rank takes beside what it holds is anonymous memory.\n\n"
        f"{table(found)}\n\n"
        f"The engines hold the same bytes after `trl` and `ours`: {'yes' if same else 'NO'}.\n"
    )


if __name__ == "__main__":
    main()
