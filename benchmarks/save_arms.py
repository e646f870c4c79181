"""Run one rank of one cell of the save benchmark.

save.py starts it with the usual variables of a distributed launch. Only the save is timed. Every arm ends
with its files on the disk (``fsync``), like zerostart's own writer.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import CHUNK, back_free_memory, memory, model_class, shard_bytes, start_gloo

#: The timed function, and the model or a tensor of as many bytes.
Prepared = tuple[Callable[[], Any], Any]


def load_model(checkpoint: Path, engine: str) -> Any:
    """Load the sharded model with zerostart."""
    import zerostart

    model_class(checkpoint)
    if engine == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    start_gloo()
    return zerostart.load(checkpoint, engine=engine, progress=False)


def prepare_ceiling(direct: bool) -> Callable[[Path, Path], Prepared]:
    """Write and sync this rank's share of the bytes; ``direct`` bypasses the page cache."""

    def prepare(checkpoint: Path, out: Path) -> Prepared:
        start_gloo()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        return raw_write(out, total // ranks, rank, direct)

    return prepare


def raw_write(out: Path, count: int, rank: int, direct: bool = False) -> Prepared:
    """Write and sync ``count`` bytes of existing memory into one file of this rank."""
    import torch

    count = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
    data = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8).random_(0, 255)
    view = memoryview(data.numpy())
    out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
        handle = os.open(out / f"{rank}.bin", flags)
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            assert os.pwrite(handle, part, start) == len(part)
        os.fsync(handle)
        os.close(handle)

    return write, data


def prepare_zerostart(engine: str) -> Callable[[Path, Path], Prepared]:
    def prepare(checkpoint: Path, out: Path) -> Prepared:
        import zerostart
        import zerostart.state.saving.save  # otherwise imported by the first save

        model = load_model(checkpoint, engine)
        return (lambda: zerostart.save(model, out)), model

    return prepare


def prepare_pretrained_zero3(checkpoint: Path, out: Path) -> Prepared:
    """Gather parameters one by one under ZeRO-3; rank 0 collects and saves them."""
    import deepspeed
    import torch

    model = load_model(checkpoint, "deepspeed")

    def save() -> None:
        whole: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if os.environ["RANK"] == "0":
                    whole[name] = parameter.detach().cpu().clone()
        if os.environ["RANK"] == "0":
            model.save_pretrained(out, state_dict=whole)
        sync_files(out)

    return save, model


def prepare_pretrained_fsdp2(checkpoint: Path, out: Path) -> Prepared:
    """Collect a full state dict on rank 0 under FSDP2, saved by the library."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = load_model(checkpoint, "fsdp2")

    def save() -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        if os.environ["RANK"] == "0":
            model.save_pretrained(out, state_dict=whole)
        sync_files(out)

    return save, model


def prepare_dcp(consolidated: bool) -> Callable[[Path, Path], Prepared]:
    """Save with torch's distributed checkpoint: its own or consolidated Hugging Face files."""

    def prepare(checkpoint: Path, out: Path) -> Prepared:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        model = load_model(checkpoint, "fsdp2")

        def save() -> None:
            writer: Any = dcp.FileSystemWriter(out, thread_count=2)
            if consolidated:
                state = get_model_state_dict(model)
                writer = dcp.HuggingFaceStorageWriter(
                    str(out), dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
                )
            dcp.save(get_model_state_dict(model), storage_writer=writer)
            sync_files(out)

        return save, model

    return prepare


ARMS: dict[str, Callable[[Path, Path], Prepared]] = {
    "ceiling": prepare_ceiling(direct=False),
    "ceiling-direct": prepare_ceiling(direct=True),
    "zerostart-deepspeed": prepare_zerostart("deepspeed"),
    "zerostart-fsdp2": prepare_zerostart("fsdp2"),
    "save_pretrained-zero3": prepare_pretrained_zero3,
    "save_pretrained-fsdp2": prepare_pretrained_fsdp2,
    "dcp": prepare_dcp(False),
    "dcp-consolidated": prepare_dcp(True),
}


def sync_files(out: Path) -> None:
    """Sync all files to the disk, each on one rank."""
    import torch.distributed as dist

    dist.barrier()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for path in sorted(p for p in out.rglob("*") if p.is_file())[rank::ranks]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def measure(arm: str, checkpoint: Path, out: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    save, model = ARMS[arm](checkpoint, out)
    gc.collect()
    back_free_memory(256 << 20)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = memory()
    dist.barrier()
    started = time.monotonic()
    save()
    dist.barrier()
    ended = time.monotonic()
    return {
        "rank": int(os.environ["RANK"]),
        "seconds": ended - started,
        "started": started,
        "ended": ended,
        "before": before,
        "after": memory(),
        "shard_bytes": shard_bytes(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=list(ARMS))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--save-to", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    options.result.write_text(json.dumps(measure(options.arm, options.checkpoint, options.save_to)))
    os._exit(0)  # skips the engines' teardown, which takes seconds


if __name__ == "__main__":
    main()
