"""Run one rank of one cell of the benchmark of training states.

state.py starts it. Every engine trains a step first, so that its optimizer has states. Every save ends with
its files on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import CHUNK, back_free_memory, deepspeed_config, memory, start_gloo
from save_arms import load_model, raw_write, sync_files

#: Timed function; it may return further results of the cell.
Timed = Callable[[], dict[str, Any] | None]


def train_step(checkpoint: Path, engine: str) -> tuple[Any, Any, Callable[[], None]]:
    """Train a step with AdamW; return model or engine, optimizer, and the step."""
    import torch

    model = load_model(checkpoint, engine)
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
    if engine == "deepspeed":
        import deepspeed

        model, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config())
        optimizer = None
    tokens = torch.arange(16)[None]

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        if engine == "deepspeed":
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    return model, optimizer, step


def prepare_state(engine: str) -> Callable[[Path, Path], Timed]:
    def prepare(checkpoint: Path, out: Path) -> Timed:
        import zerostart

        model, optimizer, _ = train_step(checkpoint, engine)

        def save() -> None:
            zerostart.save_state(out / "state", model, optimizer)

        return save

    return prepare


def prepare_background(engine: str) -> Callable[[Path, Path], Timed]:
    """Save three times in the background, and return the seconds of each."""

    def prepare(checkpoint: Path, out: Path) -> Timed:
        import zerostart

        model, optimizer, _ = train_step(checkpoint, engine)

        def save() -> dict[str, Any]:
            seconds = []
            for _ in range(3):
                handle = zerostart.save_state(out / "state", model, optimizer, wait=False)
                handle.wait()
                seconds.append(dict(handle.seconds))
            return {"saves": seconds, "seconds": seconds[-1]["written"]}

        return save

    return prepare


def prepare_save_checkpoint(checkpoint: Path, out: Path) -> Timed:
    """Save with DeepSpeed's ``save_checkpoint``."""
    engine, _, _ = train_step(checkpoint, "deepspeed")

    def save() -> None:
        engine.save_checkpoint(out / "state")
        sync_files(out)

    return save


def prepare_dcp(checkpoint: Path, out: Path) -> Timed:
    """Save with torch's distributed checkpoint on FSDP2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer, _ = train_step(checkpoint, "fsdp2")

    def save() -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, storage_writer=dcp.FileSystemWriter(out / "state"))
        sync_files(out)

    return save


def prepare_resume(engine: str) -> Callable[[Path, Path], Timed]:
    def prepare(checkpoint: Path, out: Path) -> Timed:
        import zerostart

        model, optimizer, _ = train_step(checkpoint, engine)

        def load() -> None:
            zerostart.load_state(out / "state", model, optimizer)

        return load

    return prepare


def prepare_plain_read(checkpoint: Path, out: Path) -> Timed:
    """Read this rank's share of a training state's bytes into existing memory."""
    import torch

    start_gloo()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shares = [(path, path.stat().st_size // ranks) for path in sorted((out / "state").rglob("*.safetensors"))]
    target = torch.ones(sum(size for _, size in shares), dtype=torch.uint8)
    view = memoryview(target.numpy())

    def read() -> None:
        position = 0
        for path, size in shares:
            handle = os.open(path, os.O_RDONLY)
            for start in range(0, size, CHUNK):
                count = min(CHUNK, size - start)
                assert os.preadv(handle, [view[position : position + count]], rank * size + start) == count
                position += count
            os.close(handle)

    return read


def prepare_plain_write(count: int) -> Callable[[Path, Path], Timed]:
    """Write and sync this rank's share of ``count`` bytes in one file."""

    def prepare(checkpoint: Path, out: Path) -> Timed:
        start_gloo()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return raw_write(out, count // ranks, rank)[0]

    return prepare


SAVES: dict[str, Callable[[Path, Path], Timed]] = {
    "save_state-deepspeed": prepare_state("deepspeed"),
    "save_state-fsdp2": prepare_state("fsdp2"),
    "background-deepspeed": prepare_background("deepspeed"),
    "background-fsdp2": prepare_background("fsdp2"),
    "save_checkpoint-deepspeed": prepare_save_checkpoint,
    "dcp-fsdp2": prepare_dcp,
}
#: Arms that resume, with the arm whose files they read.
LOADS: dict[str, tuple[str, Callable[[Path, Path], Timed]]] = {
    "load_state-deepspeed": ("save_state-deepspeed", prepare_resume("deepspeed")),
    "load_state-fsdp2": ("save_state-fsdp2", prepare_resume("fsdp2")),
}
PLAIN = ("plain-read", "plain-write")


def prepare_arm(arm: str, checkpoint: Path, out: Path, count: int) -> Timed:
    """Return an arm's timed function."""
    if arm in PLAIN:
        prepare = prepare_plain_read if arm == "plain-read" else prepare_plain_write(count)
    else:
        prepare = SAVES[arm] if arm in SAVES else LOADS[arm][1]
    return prepare(checkpoint, out)


def measure(arm: str, checkpoint: Path, out: Path, count: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    timed = prepare_arm(arm, checkpoint, out, count)
    back_free_memory(256 << 20)
    dist.barrier()
    before, start = memory(), time.monotonic()
    results = timed() or {}
    dist.barrier()
    ended = time.monotonic()
    cell = {"rank": dist.get_rank(), "started": start, "ended": ended, "seconds": ended - start}
    return {**cell, "before": before, "after": memory(), **results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=[*SAVES, *LOADS, *PLAIN])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--save-to", type=Path, required=True)
    parser.add_argument("--bytes", type=int, default=0, help="bytes that plain-write writes on all ranks")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    cell = measure(options.arm, options.checkpoint, options.save_to, options.bytes)
    options.result.write_text(json.dumps(cell))
    os._exit(0)  # skips the engines' teardown, which takes seconds


if __name__ == "__main__":
    main()
