"""Run one rank of one cell of the load benchmark.

load.py starts it with the usual variables of a distributed launch. Only the load is timed; imports and
process groups come before.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import PEER_ARMS

CHUNK = 8 << 20
Prepared = Callable[[], Any]


def deepspeed_config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }


def prepare_ceiling(checkpoint: Path) -> Prepared:
    """Read this rank's share of the bytes into fresh memory with plain system calls."""
    import numpy as np
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    files = [(path, path.stat().st_size) for path in sorted(checkpoint.glob("*.safetensors"))]
    total = sum(size for _, size in files)
    begin, end = total * rank // ranks, total * (rank + 1) // ranks

    def read() -> Any:
        target = torch.empty(end - begin, dtype=torch.uint8)
        view = memoryview(np.asarray(target))
        done, start = 0, 0
        for path, size in files:
            low, high = max(begin, start), min(end, start + size)
            if low < high:
                descriptor = os.open(path, os.O_RDONLY)
                while low < high:
                    buffer = view[done : done + min(CHUNK, high - low)]
                    count = os.preadv(descriptor, [buffer], low - start)
                    low, done = low + count, done + count
                os.close(descriptor)
            start += size
        return target

    return read


def prepare_stock_deepspeed(checkpoint: Path) -> Prepared:
    """Load by transformers under ZeRO-3, the stock route."""
    import deepspeed
    import torch
    from transformers.integrations import HfDeepSpeedConfig

    kind = model_class(checkpoint)
    deepspeed.init_distributed(dist_backend="gloo")
    active = HfDeepSpeedConfig(deepspeed_config())

    def load() -> Any:
        assert active is not None  # transformers has only a weak reference
        return kind.from_pretrained(checkpoint, dtype=torch.bfloat16)

    return load


def prepare_native_fsdp2(checkpoint: Path) -> Prepared:
    """Load by transformers' own sharding of FSDP2."""
    import torch
    from transformers.distributed import DistributedConfig

    kind = model_class(checkpoint)
    start_gloo()
    ranks = int(os.environ["WORLD_SIZE"])
    return lambda: kind.from_pretrained(
        checkpoint, dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=ranks)
    )


def prepare_zerostart_deepspeed(checkpoint: Path, expert_parallel: int = 1) -> Prepared:
    import deepspeed

    import zerostart
    import zerostart.engines.deepspeed.parallel
    import zerostart.loading.run  # otherwise imported by the first load

    model_class(checkpoint)
    deepspeed.init_distributed(dist_backend="gloo")
    return lambda: zerostart.load(
        checkpoint,
        engine="deepspeed",
        engine_config=deepspeed_config(),
        expert_parallel=expert_parallel,
        progress=False,
    )


def prepare_zerostart_fsdp2(checkpoint: Path, expert_parallel: int = 1) -> Prepared:
    import zerostart
    import zerostart.engines.fsdp2.parallel
    import zerostart.loading.run  # otherwise imported by the first load

    model_class(checkpoint)
    start_gloo()
    return lambda: zerostart.load(checkpoint, engine="fsdp2", expert_parallel=expert_parallel, progress=False)


def share_experts(prepare: Callable[[Path, int], Prepared]) -> Callable[[Path], Prepared]:
    """Return the arm with expert parallelism over all ranks."""
    return lambda checkpoint: prepare(checkpoint, int(os.environ["WORLD_SIZE"]))


ARMS: dict[str, Callable[[Path], Prepared]] = {
    "ceiling": prepare_ceiling,
    "zerostart-deepspeed": prepare_zerostart_deepspeed,
    "stock-deepspeed": prepare_stock_deepspeed,
    "zerostart-fsdp2": prepare_zerostart_fsdp2,
    "native-fsdp2": prepare_native_fsdp2,
    **PEER_ARMS,
    "zerostart-deepspeed-ep": share_experts(prepare_zerostart_deepspeed),
    "zerostart-fsdp2-ep": share_experts(prepare_zerostart_fsdp2),
}
#: Default arms of load.py.
DEFAULT_ARMS = [arm for arm in ARMS if not arm.endswith("-ep")]


def model_class(checkpoint: Path) -> Any:
    """Import and return the class that the checkpoint names."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    return getattr(transformers, config.architectures[0])


def start_gloo() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")


def memory() -> dict[str, int]:
    """Return this process's resident bytes by kind, from /proc/self/status."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem", "VmHWM"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def io_counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def shard_digest(model: Any) -> dict[str, int]:
    """Return a checksum of each parameter's shard; arms of one layout must agree."""
    import torch

    rank = int(os.environ["RANK"])
    digests = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor"):
            size = parameter.ds_tensor.numel()
            owned = min(max(parameter.ds_numel - rank * size, 0), size)  # without the padding
            local = parameter.ds_tensor[:owned]
        else:
            local = parameter.to_local()
        digests[name] = zlib.crc32(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digests


def shard_bytes(result: Any) -> int:
    """Return the bytes of this rank's shards."""
    import torch

    if isinstance(result, torch.Tensor):
        return result.numel()
    if isinstance(result, dict):
        return sum(tensor.nbytes for tensor in result.values())
    locals_ = [getattr(p, "ds_tensor", None) for p in result.parameters()]
    if any(local is not None for local in locals_):
        return sum(local.numel() * local.element_size() for local in locals_)
    return sum(p.to_local().numel() * p.element_size() for p in result.parameters())


def back_free_memory(size: int) -> None:
    """Touch and free ``size`` bytes, in small pages and in huge ones.

    A virtual machine's free pages may have no memory of the host yet; the first touch then costs several
    times the read. So every arm starts from backed pages, of either size: the two use different free blocks.
    """
    for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages.madvise(advice)
            for offset in range(0, size, mmap.PAGESIZE):
                pages[offset] = 1


def measure(arm: str, checkpoint: Path, digest: bool, keep_free_memory: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    load = ARMS[arm](checkpoint)
    start_gloo()
    gc.collect()
    if not keep_free_memory:
        total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        back_free_memory(total * 5 // 4 // int(os.environ["WORLD_SIZE"]))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before, io_before = memory(), io_counters()
    dist.barrier()
    started = time.monotonic()
    result = load()
    ended = time.monotonic()
    after, io_after = memory(), io_counters()
    cell: dict[str, Any] = {
        "rank": int(os.environ["RANK"]),
        "seconds": ended - started,
        "started": started,
        "ended": ended,
        "before": before,
        "after": after,
        "shard_bytes": shard_bytes(result),
        "read_calls_bytes": io_after["rchar"] - io_before["rchar"],
        "storage_bytes": io_after["read_bytes"] - io_before["read_bytes"],
    }
    if arm.startswith("zerostart"):
        import zerostart

        report = zerostart.report(result)
        cell["phases"] = dict(report.phases)
        cell["reported"] = {
            name: getattr(report, name) for name in ("read_bytes", "peak_host_bytes", "peak_device_bytes")
        }
    dist.barrier()
    if digest and arm != "ceiling" and arm not in PEER_ARMS:
        cell["digest"] = shard_digest(result)
    dist.barrier()
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=list(ARMS))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--digest", action="store_true", help="add a checksum of every shard")
    parser.add_argument("--as-found", action="store_true", help="do not touch free memory first")
    options = parser.parse_args()
    cell = measure(options.arm, options.checkpoint, options.digest, options.as_found)
    options.result.write_text(json.dumps(cell))
    os._exit(0)  # skips the engines' teardown, which takes seconds


if __name__ == "__main__":
    main()
