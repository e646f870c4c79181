"""One parameter that is far bigger than what a rank may take beside its shard.

    python benchmarks/oversized.py [--side 22528] [--ranks 1 2 3] [--memory-limit 33554432] [--cases ...]
                                   [--scratch DIR] [--no-gather] [--out FILE]

A linear layer of ``side`` x ``side`` fp32 elements is loaded by local ranks on each engine and placement; an
odd ``side`` makes the last partition a padded one. For each rank: its partition, the peak of anonymous memory
over the level before the load, and the difference, which is what the load takes beside the partition. The
shard is then compared with the file, in pieces, and so is the whole parameter after the engine's own
all-gather (which takes the whole parameter on every rank, or more; ``--no-gather`` leaves it out).

On NVMe the partition is in a swap file and what counts is memory: DeepSpeed's own buffer, of the size of one
partition. Where its asynchronous input and output cannot be built, plain file operations stand in for it
(``tests/file_aio.py``); the load does not use either.
The same parameter is the case of DeepSpeed's pull request 8103 (2 ranks: 3.05 GB at the peak without
streaming, 1.10 GB with it, for a partition of 1.02 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Engine and ``zero_optimization`` of each case; what depends on the number of ranks is filled in there.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO-3": ("deepspeed", {}),
    "ZeRO-3, offload_param to cpu": ("deepspeed", {"offload_param": {"device": "cpu"}}),
    "ZeRO-3, offload_param to nvme": ("deepspeed", {"offload_param": {"device": "nvme"}}),
    "ZeRO-3, secondary partitions": ("deepspeed", {"zero_hpz_partition_size": 0}),
    "ZeRO-3, prebuilt module": ("deepspeed", {}),
    "FSDP2": ("fsdp2", {}),
}
PIECE = 1 << 22
ROOT = Path(__file__).parents[1]


def main() -> None:
    from zerostart.cli.launch import run_local_ranks

    parser = argparse.ArgumentParser(description="Benchmark of one oversized parameter.")
    parser.add_argument("--side", type=int, default=22528)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--memory-limit", type=int, default=32 << 20)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--scratch", type=Path, help="where the file is made")
    parser.add_argument("--gather", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    own = [str(Path(__file__).parent), str(ROOT)]
    here = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = Path(folder) / "model.safetensors"
        write(path, options.side)
        for case in options.cases:
            for nproc in options.ranks:
                if nproc == 1 and "secondary" in case:
                    continue
                job = {"path": str(path), "side": options.side, "case": case, "limit": options.memory_limit}
                job["gather"] = options.gather
                found = run_local_ranks("oversized", [json.dumps(job)], nproc, env={"PYTHONPATH": here})
                for rank, row in enumerate(found):
                    rows.append({"case": case, "ranks": nproc, "rank": rank, **row})
                    beside = (row["peak"] - row["partition"]) / 2**20
                    print(
                        f"{case:<30} rank {rank} of {nproc}: partition {row['partition'] / 1e9:.3f} GB, peak "
                        f"{row['peak'] / 1e9:.3f} GB, beside it {beside:6.1f} MiB, {row['seconds']:.1f} s, "
                        f"{'identical' if row['identical'] else 'DIFFERENT'}",
                        flush=True,
                    )
    if options.out:
        options.out.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
    if not all(row["identical"] for row in rows):
        sys.exit(1)


def versions() -> dict[str, str]:
    import deepspeed
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }


def write(path: Path, side: int) -> None:
    """A safetensors file of one matrix, written in pieces."""
    import numpy as np

    nbytes = side * side * 4
    entry = {"dtype": "F32", "shape": [side, side], "data_offsets": [0, nbytes]}
    header = json.dumps({"weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, side * side, PIECE):
            count = min(PIECE, side * side - start)
            file.write(random.standard_normal(count, dtype=np.float32).tobytes())


def run(argv: list[str]) -> dict[str, Any]:
    """One rank."""
    import torch

    import zerostart
    from zerostart.cli.launch import join_group, leave_group
    from zerostart.engines import resolve_engine
    from zerostart.geometry.layout import Mesh
    from zerostart.live.model import get_record

    job = json.loads(argv[0])
    engine, zero = CASES[job["case"]]
    torch.set_num_threads(1)
    join_group()
    resolve_engine(engine, 3, None, Mesh(1)).require()
    config = {} if engine == "fsdp2" else {"zero_optimization": completed(zero, job)}

    def layer() -> torch.nn.Module:
        return torch.nn.Linear(job["side"], job["side"], bias=False)

    with torch.device("meta"):
        built = layer() if "prebuilt" in job["case"] else layer
    small = {"weight": torch.zeros(3, 3)}  # Imports are no part of a load.
    plain = {} if (config.get("zero_optimization") or {}).get("offload_param") else config
    zerostart.load(
        small,
        model=lambda: torch.nn.Linear(3, 3, bias=False),
        engine=engine,
        engine_config=plain,
        progress=False,
    )
    model = zerostart.load(
        job["path"],
        model=built,
        engine=engine,
        engine_config=config,
        memory_limit=job["limit"],
        progress=False,
    )
    made = zerostart.report(model)
    (shard,) = get_record(model).shards(model).values()
    whole = all(gathered(model, job, engine)) if job["gather"] else None
    result = {
        "partition": shard.storage.numel() * shard.storage.element_size(),
        "peak": made.peak_host_bytes,
        "seconds": made.phases["total"],
        "identical": identical(shard, Path(job["path"])) and whole is not False,
        "gathered": whole,
    }
    leave_group()
    return result


def completed(zero: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """``zero_optimization`` with what depends on the number of ranks and on the host."""
    import torch.distributed as dist

    from tests import file_aio

    zero = {"stage": 3, **zero}
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = dist.get_world_size()
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        room = -(-(job["side"] ** 2) // dist.get_world_size() // 4096) * 4096 + 4096
        folder = str(Path(job["path"]).parent)
        buffers = {"nvme_path": folder, "buffer_count": 1, "buffer_size": room, "pin_memory": False}
        zero["offload_param"] = {"device": "nvme", **buffers}
        if not file_aio.is_compilable():
            file_aio.install()
    return zero


def gathered(model: Any, job: dict[str, Any], engine: str) -> Iterator[bool]:
    """Whether the parameter is the file's after the engine's all-gather, and when it is gathered again."""
    (parameter,) = model.parameters()
    for _ in range(2):
        if engine == "fsdp2":
            yield equal(parameter.full_tensor().detach().reshape(-1).numpy(), 0, Path(job["path"]))
            continue
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield equal(parameter.detach().reshape(-1).numpy(), 0, Path(job["path"]))


def identical(shard: Any, path: Path) -> bool:
    """Whether the shard has the file's bytes where its layout says, and zeros for padding."""
    own = shard.storage.reshape(-1).numpy()
    owned = 0
    for first, count, place in shard.layout.runs():
        owned += count
        if not equal(own[place : place + count], first, path):
            return False
    return owned == shard.layout.owned and not own[owned:].any()


def equal(mine: Any, first: int, path: Path) -> bool:
    """Whether ``mine`` is what the file has from element ``first`` on; in pieces."""
    import numpy as np

    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    stored = np.memmap(path, dtype=np.float32, mode="r", offset=start)
    for at in range(0, len(mine), PIECE):
        piece = mine[at : at + PIECE]
        if not np.array_equal(piece, stored[first + at : first + at + len(piece)]):
            return False
    return True


if __name__ == "__main__":
    if "ZEROSTART_STORE" in os.environ:
        from zerostart.cli.launch import worker_main

        worker_main(run)
    main()
