"""Load one parameter that is far larger than a rank's memory limit.

    python benchmarks/oversized.py [--side 22528] [--ranks 1 2 3] [--memory-limit 33554432] [--cases ...]
                                   [--scratch DIR] [--no-gather] [--out FILE]

Local ranks load a linear layer of ``side`` x ``side`` fp32 elements on each engine and placement; an odd
``side`` gives the last partition padding. The output has for each rank its partition, the peak of anonymous
memory above the level before the load, and their difference. The shard is then compared with the file, and so
is the whole parameter after the engine's own all-gather, which needs memory for it on every rank
(``--no-gather`` skips this).

On NVMe the partition is in a swap file, and the peak includes DeepSpeed's buffer of one partition. If
DeepSpeed's asynchronous I/O cannot be compiled, plain file operations replace it (``tests/file_aio.py``);
the load uses neither. DeepSpeed's pull request 8103 measures the same parameter (2 ranks: peak 3.05 GB
without streaming, 1.10 GB with it, for a partition of 1.02 GB).
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

#: Engine and ``zero_optimization`` of each case; ``complete`` adds values that depend on the ranks.
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
    parser.add_argument("--scratch", type=Path, help="folder for the file")
    parser.add_argument("--gather", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    folders = [str(Path(__file__).parent), str(ROOT)]
    python_path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
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
                rows_by_rank = run_local_ranks(
                    "oversized", [json.dumps(job)], nproc, env={"PYTHONPATH": python_path}
                )
                for rank, row in enumerate(rows_by_rank):
                    rows.append({"case": case, "ranks": nproc, "rank": rank, **row})
                    difference_mib = (row["peak"] - row["partition"]) / 2**20
                    print(
                        f"{case:<30} rank {rank} of {nproc}: partition {row['partition'] / 1e9:.3f} GB, peak "
                        f"{row['peak'] / 1e9:.3f} GB, above it {difference_mib:6.1f} MiB, "
                        f"{row['seconds']:.1f} s, {'identical' if row['identical'] else 'DIFFERENT'}",
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
    """Write a safetensors file of one matrix."""
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
    """Run one rank, and return its figures."""
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
    resolve_engine(engine, 3, None, Mesh(1)).import_library()
    config = {} if engine == "fsdp2" else {"zero_optimization": complete(zero, job)}

    def layer() -> torch.nn.Module:
        return torch.nn.Linear(job["side"], job["side"], bias=False)

    with torch.device("meta"):
        built = layer() if "prebuilt" in job["case"] else layer
    small = {"weight": torch.zeros(3, 3)}  # imports must not be measured
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
    report = zerostart.report(model)
    (shard,) = get_record(model).shards(model).values()
    whole = all(check_gathered(model, job, engine)) if job["gather"] else None
    result = {
        "partition": shard.storage.numel() * shard.storage.element_size(),
        "peak": report.peak_host_bytes,
        "seconds": report.phases["total"],
        "identical": equals_file(shard, Path(job["path"])) and whole is not False,
        "gathered": whole,
    }
    leave_group()
    return result


def complete(zero: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Add the values of ``zero_optimization`` that depend on the ranks and the host."""
    import torch.distributed as dist

    from tests import file_aio

    zero = {"stage": 3, **zero}
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = dist.get_world_size()
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        buffer_size = -(-(job["side"] ** 2) // dist.get_world_size() // 4096) * 4096 + 4096
        folder = str(Path(job["path"]).parent)
        buffers = {"nvme_path": folder, "buffer_count": 1, "buffer_size": buffer_size, "pin_memory": False}
        zero["offload_param"] = {"device": "nvme", **buffers}
        if not file_aio.is_compilable():
            file_aio.install()
    return zero


def check_gathered(model: Any, job: dict[str, Any], engine: str) -> Iterator[bool]:
    """Yield True if the gathered parameter equals the file, twice."""
    (parameter,) = model.parameters()
    for _ in range(2):
        if engine == "fsdp2":
            yield equals_part(parameter.full_tensor().detach().reshape(-1).numpy(), 0, Path(job["path"]))
            continue
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield equals_part(parameter.detach().reshape(-1).numpy(), 0, Path(job["path"]))


def equals_file(shard: Any, path: Path) -> bool:
    """Return True if the shard equals its part of the file, with zero padding."""
    elements = shard.storage.reshape(-1).numpy()
    owned = 0
    for first, count, position in shard.layout.runs():
        owned += count
        if not equals_part(elements[position : position + count], first, path):
            return False
    return owned == shard.layout.owned and not elements[owned:].any()


def equals_part(elements: Any, first: int, path: Path) -> bool:
    """Compare ``elements`` with the file from element ``first`` on, in pieces."""
    import numpy as np

    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    stored = np.memmap(path, dtype=np.float32, mode="r", offset=start)
    for start_of_piece in range(0, len(elements), PIECE):
        piece = elements[start_of_piece : start_of_piece + PIECE]
        if not np.array_equal(piece, stored[first + start_of_piece : first + start_of_piece + len(piece)]):
            return False
    return True


if __name__ == "__main__":
    if "ZEROSTART_STORE" in os.environ:
        from zerostart.cli.launch import worker_main

        worker_main(run)
    main()
