"""A restart from weights in memory beside a load of files from the page cache, on one host.

    python benchmarks/keep.py [--layers 12] [--repeats 3] [--ranks 4] [--out FILE]

A job of ZeRO-3 on ``--ranks`` ranks loads a Qwen3 in bf16, keeps it, and is killed. Then fresh jobs load it,
alternating: from memory and from the files in the page cache, on as many ranks and on half of them, as ZeRO-3
and as FSDP2. ``served`` reads the kept model through its guard on loopback, as another machine would, and
``save`` is a save to a directory in memory beside ``keep``. Seconds are of the call, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NAME, SECRET = "benchmark-keep", "benchmark"
MiB = 1 << 20


def rank_main(told: dict[str, Any]) -> None:
    """One rank of a job."""
    import torch
    import torch.distributed as dist

    import zerostart

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = {"progress": False, **told["options"]}
    dist.barrier()
    begun = time.perf_counter()
    model = zerostart.load(told["source"], **options)
    seconds = {"load": time.perf_counter() - begun}
    if told["keep"]:
        for round_ in ("first", "again"):
            dist.barrier()
            kept = zerostart.keep(model, NAME, address="tcp://127.0.0.1:0", secret=SECRET)
            seconds[f"keep {round_}"] = kept.seconds
            place = Path(told["keep"]) / round_
            dist.barrier()
            begun = time.perf_counter()
            zerostart.save(model, place)
            seconds["save"] = time.perf_counter() - begun
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
        seconds["address"] = kept.addresses[0]
    every: list[Any] = [None] * dist.get_world_size()
    report = zerostart.report(model)
    dist.all_gather_object(every, (seconds, report.phases["read"], report.read_bytes, report.peak_host_bytes))
    if dist.get_rank() == 0:
        most = {key: max(one[0][key] for one in every) for key in seconds}
        found = {"seconds": most, "read": max(one[1] for one in every), "bytes": sum(one[2] for one in every)}
        print("RESULT", json.dumps({**found, "peak": max(one[3] for one in every)}), flush=True)
    dist.barrier()
    if told["keep"]:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def job(ranks: int, source: str, options: dict[str, Any], keep: str = "") -> dict[str, Any]:
    """What rank 0 of a fresh job tells."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = json.dumps({"source": source, "options": options, "keep": keep})
    started = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ZEROSTART_PEER_SECRET": SECRET}
        command = [sys.executable, __file__, "--rank", told]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=580)[0] for process in started]
    line = next((line for line in texts[0].splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"a job of {ranks} ranks failed: {texts}")
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def main() -> None:
    """Run all arms, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "keep")
    parser.add_argument("--rank")
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(json.loads(arguments.rank))
        return
    from zerostart.checkpoint.kept import folder as kept

    folder = Path(tempfile.mkdtemp(prefix="zerostart-keep-", dir=os.environ.get("TMPDIR")))
    memory = Path(tempfile.mkdtemp(prefix="zerostart-keep-", dir="/dev/shm"))
    try:
        config = {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "zerostart", "synth", folder / "config.json", folder / "model"]
        subprocess.run(command, check=True)
        zero, fsdp = {"engine": "deepspeed", "zero_stage": 3}, {"engine": "fsdp2"}
        first = job(arguments.ranks, str(folder / "model"), zero, str(memory))
        address = first["seconds"].pop("address").removeprefix("tcp://")
        sources = {"memory": f"peer:///{NAME}", "page cache": str(folder / "model")}
        # Through the guard: asked as if in the memory of another machine.
        rows: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.repeats):
            for ranks in (arguments.ranks, arguments.ranks // 2):
                for engine, options in (("ZeRO-3", zero), ("FSDP2", fsdp)):
                    for place, source in sources.items():
                        found = job(ranks, source, options)
                        rows.setdefault(f"{place}, {engine} on {ranks}", []).append(found)
        (version,) = kept.versions(kept.folder_of(NAME))
        document = {**version.document, "memory": "another machine"}
        kept.write_json(version.path / kept.DOCUMENT, document)
        for _ in range(arguments.repeats):
            found = job(arguments.ranks // 2, f"peer://{address}/{NAME}", fsdp)
            rows.setdefault(f"served on loopback, FSDP2 on {arguments.ranks // 2}", []).append(found)
        write(arguments, first, rows)
    finally:
        kept.remove(kept.folder_of(NAME))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def write(
    arguments: argparse.Namespace, first: dict[str, Any], rows: dict[str, list[dict[str, Any]]]
) -> None:
    """The figures as JSON and as a page."""
    import deepspeed
    import torch
    import transformers

    nbytes = max(row[0]["bytes"] for row in rows.values())
    versions = ", ".join(
        f"{module.__name__} {module.__version__}" for module in (torch, transformers, deepspeed)
    )
    table = [
        "| from, as, ranks | load, s (median; all) | its reading, s | bytes read | peak of a rank |",
        "|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        seconds = [one["seconds"]["load"] for one in found]
        each = ", ".join(f"{value:.2f}" for value in seconds)
        read = statistics.median(one["read"] for one in found)
        table.append(
            f"| {name} | {statistics.median(seconds):.2f} ({each}) | {read:.2f} | {found[0]['bytes']} | "
            f"{max(one['peak'] for one in found) / MiB:.0f} MiB |"
        )
    kept = ", ".join(f"{name} {value:.2f} s" for name, value in first["seconds"].items() if name != "load")
    command = f"python benchmarks/keep.py --layers {arguments.layers} --ranks {arguments.ranks}"
    page = f"""# Restart from memory

`{command} --repeats {arguments.repeats}`, {versions}.
A Qwen3 in bf16, {nbytes / 1e9:.2f} GB read by all ranks together, on 2 cores.
The job before was ZeRO-3 on {arguments.ranks} ranks, and was killed. All arms alternate, each in
fresh processes.
*Peak* is `peak_host_bytes` of the load, the shards included.

{chr(10).join(table)}

Writing, on {arguments.ranks} ranks of ZeRO-3, the slowest: {kept}
(`save`: the same weights to a directory in `/dev/shm`).
"""
    arguments.out.with_suffix(".md").write_text(page)
    arguments.out.with_suffix(".json").write_text(json.dumps({"first": first, "rows": rows}, indent=1) + "\n")
    print(page)


if __name__ == "__main__":
    main()
