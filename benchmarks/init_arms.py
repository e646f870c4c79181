"""One rank of one cell of the initialisation benchmark: from a path to an engine of ZeRO stage 1 or 2.

Started by init.py with the usual variables of a distributed launch. Imports, process groups, the class
look-up and a first engine over a model of a few elements come before the clock; the load and
``deepspeed.initialize`` are on it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import CHUNK, back_free_memory, io_counters, memory, model_class

Marks = dict[str, float]
Prepared = Callable[[], Any]


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def watch_masters(marks: Marks) -> None:
    """Note when the optimizer has its flat buffer, and goes on to the fp32 masters; the same in both arms."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    original = DeepSpeedZeroOptimizer.get_data_parallel_partitions

    def partitions(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        marks.setdefault("masters", time.monotonic())
        return found

    DeepSpeedZeroOptimizer.get_data_parallel_partitions = partitions


def engine_over(model: Any, stage: int) -> Any:
    import deepspeed
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))[0]


def warm_up(stage: int) -> None:
    """Start an engine over a model of a few elements: DeepSpeed imports and builds much at its first."""
    import torch

    engine_over(torch.nn.Linear(4, 4).bfloat16(), stage).destroy()


def prepare_stock(checkpoint: Path, stage: int, marks: Marks) -> Prepared:
    import deepspeed
    import torch

    kind = model_class(checkpoint)
    deepspeed.init_distributed(dist_backend="gloo")
    warm_up(stage)
    watch_masters(marks)

    def start() -> Any:
        model = kind.from_pretrained(checkpoint, dtype=torch.bfloat16)
        marks["loaded"] = time.monotonic()
        return engine_over(model, stage)

    return start


def prepare_zerostart(checkpoint: Path, stage: int, marks: Marks, exchange: bool | None = None) -> Prepared:
    import deepspeed

    import zerostart
    import zerostart.engines.deepspeed.flat
    import zerostart.loading.run  # imported by the first load otherwise

    model_class(checkpoint)
    deepspeed.init_distributed(dist_backend="gloo")
    warm_up(stage)
    watch_masters(marks)

    def start() -> Any:
        model = zerostart.load(
            checkpoint, zero_stage=stage, engine_config=config(stage), exchange=exchange, progress=False
        )
        marks["loaded"] = time.monotonic()
        return engine_over(model, stage)

    return start


def prepare_exchange(checkpoint: Path, stage: int, marks: Marks) -> Prepared:
    """Each rank reads a share, and an all-gather fills the rest."""
    return prepare_zerostart(checkpoint, stage, marks, exchange=True)


def prepare_unavoidable(checkpoint: Path, stage: int, marks: Marks) -> Prepared:
    """Read all bytes into fresh memory by the plainest means, and write this rank's masters."""
    import numpy as np
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    files = [(path, path.stat().st_size) for path in sorted(checkpoint.glob("*.safetensors"))]
    total = sum(size for _, size in files) // 2 * 2

    def start() -> Any:
        target = torch.empty(total + 2, dtype=torch.uint8)
        view, done = memoryview(np.asarray(target)), 0
        for path, size in files:
            descriptor = os.open(path, os.O_RDONLY)
            low = 0
            while low < size and done < total:
                count = os.preadv(descriptor, [view[done : min(done + CHUNK, total)]], low)
                low, done = low + count, done + count
            os.close(descriptor)
        marks["loaded"] = marks["masters"] = time.monotonic()
        halves = target[:total].view(torch.bfloat16)
        share = halves.numel() // dist.get_world_size()
        return halves, halves[:share].float()

    return start


ARMS: dict[str, Callable[[Path, int, Marks], Prepared]] = {
    "unavoidable": prepare_unavoidable,
    "zerostart": prepare_zerostart,
    "zerostart-exchange": prepare_exchange,
    "stock": prepare_stock,
}


def digest(engine: Any) -> list[int]:
    """Checksums of the flat buffers and of this rank's masters: the arms must agree."""
    import torch

    o = engine.optimizer
    tensors = [*o.bit16_groups_flat, *o.single_partition_of_fp32_groups]
    return [zlib.crc32(t.detach().contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors]


def model_bytes(engine: Any) -> int:
    """Bytes of the parameters that a rank holds."""
    return sum(p.numel() * p.element_size() for p in engine.module.parameters())


def kept_bytes(checkpoint: Path) -> int:
    """What a rank has at the end of the start: all parameters in bf16, and its share of fp32 masters."""
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    return total + 2 * total // int(os.environ["WORLD_SIZE"])


def measure(arm: str, checkpoint: Path, stage: int, with_digest: bool, as_found: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    marks: Marks = {}
    start = ARMS[arm](checkpoint, stage, marks)
    gc.collect()
    if not as_found:
        back_free_memory(kept_bytes(checkpoint))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, io_before, cpu_before = memory(), io_counters(), time.process_time()
    dist.barrier()
    started = time.monotonic()
    result = start()
    ended = time.monotonic()
    cell: dict[str, Any] = {
        "rank": int(os.environ["RANK"]),
        "seconds": ended - started,
        "to_loaded": marks["loaded"] - started,
        "to_masters": marks["masters"] - started,
        "cpu_seconds": time.process_time() - cpu_before,
        "started": started,
        "masters": marks["masters"],
        "ended": ended,
        "before": before,
        "after": memory(),
        "read_calls_bytes": io_counters()["rchar"] - io_before["rchar"],
        "model_bytes": result[0].nbytes if arm == "unavoidable" else model_bytes(result),
    }
    dist.barrier()
    if with_digest and arm != "unavoidable":
        cell["digest"] = digest(result)
    dist.barrier()
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=list(ARMS))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--as-found", action="store_true")
    options = parser.parse_args()
    cell = measure(options.arm, options.checkpoint, options.stage, options.digest, options.as_found)
    options.result.write_text(json.dumps(cell))
    os._exit(0)  # The engines' own teardown takes seconds and is not what is measured.


if __name__ == "__main__":
    main()
