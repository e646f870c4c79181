"""Plan what one rank of a big job saves and resumes, of 671 billion parameters, and write it down.

    python benchmarks/scale.py [--ranks 8 4096] [--engine deepspeed] [--out FILE]

A process for each number of ranks plays the rank in their middle: it plans `zerostart.save` in the original
layout (45 395 tensors of DeepSeek-V3), `save_state` and `load_state` (bf16 weights with fp32 masters and two
moments), as these functions do. No weights are there: shares have no memory, and files hold no data. What the
ranks exchange is counted from what they say to each other, each byte that a rank gets. See README.md.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cells import ROOT

FOLDER = ROOT / "build" / "benchmark"
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Bytes that a rank gets at a meeting (a reduction goes round twice), and of each tensor in one of digests.
HEAD, DIGEST = 2 * 72, 40
#: Ranks of one machine.
MACHINE = 8


def main() -> None:
    options = arguments()
    if options.one:
        print(json.dumps(one(options.one, options.engine)))
        return
    found = []
    for ranks in options.ranks:
        command = [sys.executable, __file__, "--one", str(ranks), "--engine", options.engine]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(told.stdout.splitlines()[-1]))
        print(json.dumps(found[-1], indent=1), flush=True)
    options.out.write_text(json.dumps({"engine": options.engine, "cells": found}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(found))
    print(table(found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rehearsal of one rank's plans in a big job.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4096])
    parser.add_argument("--engine", choices=["deepspeed", "fsdp2"], default="deepspeed")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "scale.json")
    return parser.parse_args()


def one(ranks: int, engine: str) -> dict[str, Any]:
    """What the rank in the middle of ``ranks`` takes, and how much all of it says to the others."""
    import torch

    from zerostart.distributed.machine import files_view
    from zerostart.distributed.world import World
    from zerostart.engines import Shard
    from zerostart.live.report import Clock
    from zerostart.loading.preparation import prepare
    from zerostart.loading.request import Request
    from zerostart.models import state_names

    rank = ranks // 2
    request = Request(source=str(checkpoint()), engine=engine)
    known = prepare(request, request.resolve(ranks, rank), World(0, 1, None), Clock(), True)
    model = known.built.model
    placements = known.engine.placements(model, known.parallelism)

    def share(name: str, dtype: torch.dtype, prefix: str = "") -> Shard:
        layout = placements.layout(name, rank)
        storage = torch.empty(layout.numel, dtype=dtype, device="meta")
        return Shard(prefix + name, layout, storage, lambda _: layout)

    names = [name for name, tensor, _ in state_names(model) if isinstance(tensor, torch.nn.Parameter)]
    weights = [share(name, torch.bfloat16) for name in names]
    state = [
        share(name, torch.float32, f"{kind}/")
        for kind in ("master", *(f"optimizer/{moment}" for moment in MOMENTS))
        for name in names
    ]
    found = {"ranks": ranks, "parameters": sum(p.numel() for p in model.parameters())}
    found["save"] = saved(known, weights)
    found["save_state"] = saved_state(weights, state)
    with sparse(weights, state) as folder:
        found["load_state"] = resumed(folder, weights, state)
    for name, meetings in spoken().items():
        found[name]["meetings"] = meetings
        found[name]["wire_bytes"] += meetings * HEAD
    # Where more than one machine reads, every rank tells on which it is, for either folder.
    if ranks > MACHINE:
        found["load_state"]["wire_bytes"] += 2 * ranks * (8 + len(pickle.dumps(files_view())))
    found["process_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def checkpoint() -> Path:
    """DeepSeek-V3's layout, in files that hold no data; made on first use."""
    folder = FOLDER / "deepseek_v3_sparse"
    if not (folder / "config.json").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [
            Path(sysconfig.get_path("scripts")) / "zerostart",
            "synth",
            "deepseek_v3",
            folder,
            "--sparse",
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def timed(plan: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What ``plan`` gives, and its seconds."""
    begun = time.perf_counter()
    found = plan()
    return found, {"seconds": time.perf_counter() - begun}


def saved(known: Any, weights: list[Any]) -> dict[str, Any]:
    """``zerostart.save``, back into the layout that the model came from."""
    from zerostart.checkpoint.write.shards import plan_shards
    from zerostart.live.model import LoadRecord, LogicalTensor
    from zerostart.recipe import Recipe
    from zerostart.state.saving.contents import contents_of
    from zerostart.state.saving.writing import CHUNK, planned

    recipes = {name: r for name, r in known.origins.parameters.items() if isinstance(r, Recipe)}
    record: Any = LoadRecord(known.catalog, recipes, known.engine, known.parallelism, None, None)  # type: ignore[arg-type]
    live: Any = SimpleNamespace(module=known.built.model, record=record)
    tensors = [LogicalTensor(shard.name, shard.name, shard, True, True) for shard in weights]

    def plan() -> Any:
        contents = contents_of(live, tensors, None)
        return planned(plan_shards(contents.entries), contents.outgoing, CHUNK)[0]

    made, cell = timed(plan)
    count = len(made.layout.tensors)
    return cell | {"tensors": count, "bytes": made.nbytes, "wire_bytes": 2 * DIGEST * count}


def saved_state(weights: list[Any], state: list[Any]) -> dict[str, Any]:
    """``save_state``: both folders."""
    from zerostart.checkpoint.write.shards import plan_shards
    from zerostart.recipe import spelling
    from zerostart.state.saving.writing import CHUNK, plain, planned

    def plan() -> Any:
        folders = []
        for shards in (weights, state):
            entries = [(s.name, spelling(s.storage.dtype), s.layout.shape) for s in shards]
            folders.append(planned(plan_shards(entries), [plain(s.name, s) for s in shards], CHUNK)[0])
        return folders

    made, cell = timed(plan)
    tensors = len(weights) + len(state)
    written = sum(folder.nbytes for folder in made)
    return cell | {"tensors": tensors, "bytes": written, "wire_bytes": 2 * DIGEST * tensors}


@contextmanager
def sparse(weights: list[Any], state: list[Any]) -> Iterator[Path]:
    """The folders of a training checkpoint, in files that hold no data."""
    from zerostart.checkpoint.write.shards import plan_shards
    from zerostart.checkpoint.write.writer import CheckpointWriter
    from zerostart.recipe import spelling

    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    try:
        for name, shards in (("model", weights), ("state", state)):
            entries = [(s.name, spelling(s.storage.dtype), s.layout.shape) for s in shards]
            with CheckpointWriter(folder / name, plan_shards(entries, stem=name), durable=False):
                pass
        yield folder
    finally:
        shutil.rmtree(folder)


def resumed(folder: Path, weights: list[Any], state: list[Any]) -> dict[str, Any]:
    """``load_state``: the headers, which rank 0 reads for all, and the plan of what a rank reads."""
    from zerostart.distributed.world import World
    from zerostart.loading.source import open_source
    from zerostart.state.resuming.load_state import planned_reads

    def plan() -> Any:
        alone = World(0, 1, None)
        catalogs = [open_source(folder / name, alone) for name in ("model", "state")]
        plans = [
            planned_reads(catalog, [(s.name, s.layout, s.storage) for s in shards])[0]
            for catalog, shards in zip(catalogs, (weights, state), strict=True)
        ]
        return catalogs, plans

    (catalogs, plans), cell = timed(plan)
    sent = len(pickle.dumps(catalogs)) + len(pickle.dumps({s.name: "0" * 32 for s in [*weights, *state]}))
    return cell | {
        "tensors": len(weights) + len(state),
        "bytes": sum(p.read_bytes for p in plans),
        "wire_bytes": sent,
    }


def spoken() -> dict[str, int]:
    """How often the ranks meet in a run of a tiny model."""
    import torch

    import zerostart
    from zerostart.distributed.world import World

    met = 0
    kept = World._meet, World.all_gather_object

    def counted(method: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal met
            met += 1  # in all_gather_object by itself: a process that is alone meets nobody there
            return method(*given, **named)

        return call

    World._meet, World.all_gather_object = map(counted, kept)  # type: ignore[method-assign]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        for name, call in {
            "save": lambda: zerostart.save(model, f"{folder}/model"),
            "save_state": lambda: zerostart.save_state(f"{folder}/state", model, optimizer),
            "load_state": lambda: zerostart.load_state(f"{folder}/state", model, optimizer),
        }.items():
            met = 0
            call()
            found[name] = met
    World._meet, World.all_gather_object = kept  # type: ignore[method-assign]
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Each plan's seconds and bytes from the others, by the number of ranks; memory of the processes."""
    peaks = (f"{cell['process_bytes'] / 2**20:.0f} MiB ({cell['ranks']} ranks)" for cell in found)
    lines = [
        f"{found[0]['parameters']:,} parameters; one rank's plans, in a process of their own, which takes at "
        f"most {', '.join(peaks)}, torch and the model on meta included.",
        "",
        "| plan | ranks | tensors | bytes of the rank | seconds | meetings | bytes from the others |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("save", "save_state", "load_state"):
        for cell in found:
            c = cell[name]
            lines.append(
                f"| `{name}` | {cell['ranks']} | {c['tensors']:,} | {c['bytes'] / 1e9:.2f} GB "
                f"| {c['seconds']:.2f} | {c['meetings']} | {c['wire_bytes'] / 1e6:.1f} MB |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
