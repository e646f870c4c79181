"""Slices whose elements do not follow each other in the file, beside a plain read of as many bytes.

    python benchmarks/strided.py [--mib 256] [--repeats 7] [--threads N] [--out FILE] [--scratch DIR]

One process, page cache warm. Each case plans one rank's share of a matrix or of a stack of experts and runs
the plan into fresh memory; the ceiling reads the same number of bytes in one piece with plain `preadv` by as
many threads into fresh memory. Cases and ceilings alternate; medians. The weights are compared once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.transfer import Progress, Tuning, execute, tune
from zerostart.transfer.planning import Destination, Plan, PlanOptions, join

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of strided slices.")
    parser.add_argument("--mib", type=int, default=256, help="size of the checkpoint tensor")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="default: what a load would take here")
    parser.add_argument("--scratch", type=Path, help="where the files are made")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = Path(folder) / "model.safetensors"
        for width in (8192, 2048):
            whole = torch.randint(-99, 99, (options.mib * MIB // 2 // width, width)).to(torch.bfloat16)
            save_file({"w": whole}, path)
            tuning = tune(LocalFiles.of([str(path)]), staged_on_device=False)
            tuning = replace(tuning, threads=options.threads or tuning.threads)
            print(tuning.describe())
            for name, plan, expected in cases(whole, open_catalog(path), PlanOptions(tuning.chunk_size)):
                rows.append(measure(name, plan, expected, path, options.repeats, tuning))
                print(
                    f"{rows[-1]['case']:<48} {rows[-1]['mib']:6.0f} MiB  {rows[-1]['gb_per_s']:5.2f} GB/s  "
                    f"ceiling {rows[-1]['ceiling_gb_per_s']:5.2f}  {rows[-1]['share']:4.0%}  "
                    f"of processor time {rows[-1]['cpu_share']:4.0%}",
                    flush=True,
                )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def cases(
    whole: torch.Tensor, catalog: Catalog, options: PlanOptions
) -> list[tuple[str, Plan, torch.Tensor]]:
    shape = tuple(whole.shape)
    source = SymbolicTensor.of("w", shape, whole.dtype)
    out = []
    for world in (2, 4, 8):
        layout = dimension_shard(shape, 1, 1, world)
        expected = whole.chunk(world, 1)[1].reshape(-1)
        out.append((f"{shape} dim 1, 1/{world}", planned(catalog, source, layout, options), expected))
    experts = 8
    stacked = (experts, shape[0] // experts, shape[1])
    turned = source.view(stacked).transpose(1, 2)
    real = whole.view(stacked).transpose(1, 2)
    for world in (1, 2):
        layout = flat_partition(turned.shape, world - 1, world)
        expected = real.reshape(-1)[-layout.numel :]
        out.append(
            (f"{stacked} transposed, flat 1/{world}", planned(catalog, turned, layout, options), expected)
        )
    layout = dimension_shard(turned.shape, 1, 1, 4)
    expected = real.chunk(4, 1)[1].reshape(-1)
    out.append((f"{stacked} transposed, dim 1, 1/4", planned(catalog, turned, layout, options), expected))
    every = source[:, 1::2]
    layout = flat_partition(every.shape, 0, 1)
    out.append(
        (f"{shape} every other column", planned(catalog, every, layout, options), whole[:, 1::2].reshape(-1))
    )
    return out


def planned(catalog: Catalog, source: torch.Tensor, layout: Layout, options: PlanOptions) -> Plan:
    recipe = Recipe(Target("p", tuple(source.shape), source.dtype), source.pieces)
    destination = Destination("p", layout.numel, layout.owned, source.dtype, direct=True)
    return join(catalog, [(recipe, layout, destination)], options)


def measure(
    name: str, plan: Plan, expected: torch.Tensor, path: Path, repeats: int, tuning: Tuning
) -> dict[str, Any]:
    (destination,) = plan.destinations

    def load() -> torch.Tensor:
        storage = torch.empty(destination.numel, dtype=destination.dtype)
        execute(plan, [storage], Progress(0, shown=False), tuning.threads, tuning.reader(plan))
        return storage

    def ceiling() -> torch.Tensor:
        return read_plainly(path, destination.nbytes, tuning.threads)

    assert torch.equal(load()[: expected.numel()], expected)
    seconds: dict[str, list[tuple[float, float]]] = {"load": [], "ceiling": []}
    for repeat in range(repeats):
        for kind, run in (("load", load), ("ceiling", ceiling))[:: 1 if repeat % 2 else -1]:
            seconds[kind].append(timed(run))
    load_s, ceiling_s = (statistics.median(wall for wall, _ in seconds[kind]) for kind in seconds)
    load_cpu, ceiling_cpu = (statistics.median(cpu for _, cpu in seconds[kind]) for kind in seconds)
    return {
        "case": name,
        "mib": destination.nbytes / MIB,
        "read_bytes": plan.read_bytes,
        "reads": len(plan.reads),
        "gb_per_s": destination.nbytes / load_s / 1e9,
        "ceiling_gb_per_s": destination.nbytes / ceiling_s / 1e9,
        "share": ceiling_s / load_s,
        "cpu_share": ceiling_cpu / load_cpu,
    }


def timed(run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Seconds by the clock, and of the processors: those tell more where others use the machine too."""
    started, used = time.perf_counter(), time.process_time()
    result = run()
    seconds = time.perf_counter() - started, time.process_time() - used
    del result
    return seconds


def read_plainly(path: Path, nbytes: int, threads: int) -> torch.Tensor:
    target = torch.empty(nbytes, dtype=torch.uint8)
    view = memoryview(target.numpy())
    offset = path.stat().st_size - nbytes
    descriptor = os.open(path, os.O_RDONLY)
    starts = iter(range(0, nbytes, 8 * MIB))

    def work() -> None:
        for start in starts:  # one byte code of the list's iterator: no lock is needed
            os.preadv(descriptor, [view[start : start + 8 * MIB]], offset + start)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(descriptor)
    return target


if __name__ == "__main__":
    main()
