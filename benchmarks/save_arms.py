"""One rank of one cell of the save benchmark: load, wait for the others, save on the clock, report.

Started by save.py with the usual variables of a distributed launch. Every arm ends with its files on the disk
(``fsync``), as zerostart's own writer leaves them.
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

#: Given a checkpoint and where to save: what is timed, and the model (None: memory of as many bytes).
Prepared = tuple[Callable[[], Any], Any]


def loaded(checkpoint: Path, engine: str) -> Any:
    """The model, sharded by zerostart; how it came into memory is not on the clock."""
    import zerostart

    model_class(checkpoint)
    if engine == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    start_gloo()
    return zerostart.load(checkpoint, engine=engine, progress=False)


def prepare_ceiling(direct: bool) -> Callable[[Path, Path], Prepared]:
    """Write this rank's share of the bytes from memory that is there, in a file of its own, and sync it.

    ``direct``: round the page cache.
    """

    def prepare(checkpoint: Path, out: Path) -> Prepared:
        start_gloo()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        return raw_write(out, total // ranks, rank, direct)

    return prepare


def raw_write(out: Path, count: int, rank: int, direct: bool = False) -> Prepared:
    """Write ``count`` bytes of memory that is there into a file of this rank's own, and sync it."""
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
        import zerostart.state.saving.save  # imported by the first save otherwise

        model = loaded(checkpoint, engine)
        return (lambda: zerostart.save(model, out)), model

    return prepare


def prepare_pretrained_zero3(checkpoint: Path, out: Path) -> Prepared:
    """The usual way under ZeRO-3: parameters are gathered one by one, rank 0 collects and saves them."""
    import deepspeed
    import torch

    model = loaded(checkpoint, "deepspeed")

    def save() -> None:
        whole: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if os.environ["RANK"] == "0":
                    whole[name] = parameter.detach().cpu().clone()
        if os.environ["RANK"] == "0":
            model.save_pretrained(out, state_dict=whole)
        synced(out)

    return save, model


def prepare_pretrained_fsdp2(checkpoint: Path, out: Path) -> Prepared:
    """The usual way under FSDP2: a full state dict on rank 0, saved by the library."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = loaded(checkpoint, "fsdp2")

    def save() -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        if os.environ["RANK"] == "0":
            model.save_pretrained(out, state_dict=whole)
        synced(out)

    return save, model


def prepare_dcp(consolidated: bool) -> Callable[[Path, Path], Prepared]:
    """Torch's distributed checkpoint: its own files, or Hugging Face ones that are then put together."""

    def prepare(checkpoint: Path, out: Path) -> Prepared:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        model = loaded(checkpoint, "fsdp2")

        def save() -> None:
            writer: Any = dcp.FileSystemWriter(out, thread_count=2)
            if consolidated:
                state = get_model_state_dict(model)
                writer = dcp.HuggingFaceStorageWriter(
                    str(out), dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
                )
            dcp.save(get_model_state_dict(model), storage_writer=writer)
            synced(out)

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


def synced(out: Path) -> None:
    """Bring all files to the disk, each by one rank."""
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
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
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
    os._exit(0)  # The engines' own teardown takes seconds and is not what is measured.


if __name__ == "__main__":
    main()
