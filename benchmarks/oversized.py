"""One parameter that is far bigger than what a rank may take beside its shard.

    python benchmarks/oversized.py [--side 22528] [--ranks 1 2 3] [--memory-limit 33554432] [--out FILE]

A linear layer of ``side`` x ``side`` fp32 elements is loaded by local ranks on each engine and placement.
For each rank: its partition, the peak of anonymous memory over the level before the load, and the difference,
which is what the load takes beside the partition. The shard is then compared with the file, in pieces.
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
from pathlib import Path
from typing import Any

#: Engine and configuration of each case.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO-3": ("deepspeed", {}),
    "ZeRO-3, offload_param to cpu": (
        "deepspeed",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
    "FSDP2": ("fsdp2", {}),
}
PIECE = 1 << 22


def main() -> None:
    from zerostart.cli.launch import run_local_ranks

    parser = argparse.ArgumentParser(description="Benchmark of one oversized parameter.")
    parser.add_argument("--side", type=int, default=22528)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--memory-limit", type=int, default=32 << 20)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--scratch", type=Path, help="where the file is made")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    here = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = Path(folder) / "model.safetensors"
        write(path, options.side)
        for case in options.cases:
            for nproc in options.ranks:
                job = {"path": str(path), "side": options.side, "case": case, "limit": options.memory_limit}
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
    import torch.distributed as dist

    import zerostart
    from zerostart import engines
    from zerostart.cli.worker import join_group, leave_group

    job = json.loads(argv[0])
    engine, config = CASES[job["case"]]
    torch.set_num_threads(1)
    join_group()
    engines.require(engine, 3)
    with torch.device("meta"):
        layer = torch.nn.Linear(job["side"], job["side"], bias=False)
    model = zerostart.load(
        job["path"],
        model=layer,
        engine=engine,
        engine_config=config,
        memory_limit=job["limit"],
        progress=False,
    )
    made = zerostart.report(model)
    (shard,) = engines.local_shards(model, made.parallelism, engine, dist.get_rank()).values()
    result = {
        "partition": shard.storage.numel() * shard.storage.element_size(),
        "peak": made.peak_host_bytes,
        "seconds": made.phases["total"],
        "identical": identical(shard, Path(job["path"])),
    }
    leave_group()
    return result


def identical(shard: Any, path: Path) -> bool:
    """Whether the shard has the file's bytes where its layout says, and zeros for padding."""
    import numpy as np

    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    stored = np.memmap(path, dtype=np.float32, mode="r", offset=start)
    own = shard.storage.reshape(-1).numpy()
    owned = 0
    for first, count, place in shard.layout.runs():
        owned += count
        for at in range(0, count, PIECE):
            size = min(PIECE, count - at)
            mine, theirs = own[place + at : place + at + size], stored[first + at : first + at + size]
            if not np.array_equal(mine, theirs):
                return False
    return owned == shard.layout.owned and not own[owned:].any()


if __name__ == "__main__":
    if "ZEROSTART_STATUS_FILE" in os.environ:
        from zerostart.cli.worker import worker_main

        worker_main(run)
    main()
