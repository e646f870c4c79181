"""Weights from 2 trainer ranks into 2 workers on one host: ours beside a raw copy and the usual ways.

    python benchmarks/refit.py [--layers 21] [--repeats 3] [--only ARM ...] [--out FILE]

The trainer is FSDP2 in bf16, a worker half of a Qwen3 with fused parameters and a loader as engines have it.
Arms alternate, each in fresh processes; the first push of a process is told apart, as it also makes what
later ones use again. Seconds are from the trainers' call until both workers have the weights; CPU seconds
are those of all four processes meanwhile, which other programs on the machine change less.

- ``ours``: ``zerostart.refit``, with digests of all that was read back;
- ``raw``: as many bytes copied into shared memory by the trainers, and out of it by the workers: no names, no
  layouts, no checks;
- ``gather``: the whole state dict on trainer rank 0, then one broadcast for each tensor, and
  ``load_weights``;
- ``full_tensor``: name by name ``full_tensor()``, a broadcast, and ``load_weights``;
- ``reload``: ``zerostart.save`` into memory (``/dev/shm``), and each worker's load of the files.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ARMS = ("ours", "raw", "gather", "full_tensor", "reload")
TRAINERS = WORKERS = 2
PUSHES = 3
CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights from trainer ranks into workers.")
    parser.add_argument("--layers", type=int, default=21, help="of a Qwen3-1.7B; 21 with a head: 3.4 GB")
    parser.add_argument("--vocabulary", type=int, default=CONFIG["vocab_size"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        part(options)
        return
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.only}
    for repeat in range(options.repeats):
        for arm in options.only if repeat % 2 == 0 else options.only[::-1]:
            found[arm].append(cell(arm, options))
            print(f"repeat {repeat + 1}/{options.repeats}  {arm:<12} {found[arm][-1]}", flush=True)
    print("\n" + table(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(found, options))


def cell(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """One arm in fresh processes: its seconds, and the most that a process took beside what it holds."""
    folder = Path(tempfile.mkdtemp(prefix="bench-refit-", dir="/dev/shm"))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    try:
        processes = []
        for number in range(TRAINERS + WORKERS):
            command = [sys.executable, __file__, "--layers", str(options.layers)]
            command += ["--vocabulary", str(options.vocabulary)]
            command += ["--role", arm, str(number), f"{store.port}:{folder}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            processes.append(subprocess.Popen(command, env=environment))
        codes = [process.wait(560) for process in processes]
        if any(codes):
            raise SystemExit(f"{arm}: exit codes {codes}")
        parts = [json.loads((folder / f"{number}.json").read_text()) for number in range(TRAINERS + WORKERS)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    trainers, workers = parts[:TRAINERS], parts[TRAINERS:]
    return {
        "bytes": trainers[0]["bytes"],
        "first_seconds": round(trainers[0]["seconds"][0], 2),
        "seconds": round(min(trainers[0]["seconds"][1:]), 2),
        "cpu_seconds": round(min(map(sum, zip(*(part["cpu"][1:] for part in parts), strict=True))), 2),
        "moved": trainers[0]["moved"],
        "trainer_beside": max(part["beside"] for part in trainers),
        "worker_beside": max(part["beside"] for part in workers),
    }


def anonymous() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class Meeting:
    """All four processes, by a store."""

    def __init__(self, store: Any, number: int) -> None:
        self.store, self.number, self.count = store, number, 0

    def meet(self) -> None:
        self.count += 1
        key = f"meet-{self.count}"
        if self.store.add(key, 1) == TRAINERS + WORKERS:
            self.store.set(f"{key}-done", b"1")
        self.store.wait([f"{key}-done"])


def part(options: argparse.Namespace) -> None:
    arm, number, where = options.role
    port, folder = where.split(":", 1)
    store = dist.TCPStore("127.0.0.1", int(port), None, False, timeout=timedelta(seconds=500))
    torch.set_num_threads(1)
    config = {**CONFIG, "num_hidden_layers": options.layers, "vocab_size": options.vocabulary}
    meeting = Meeting(store, int(number))
    side = trainer if int(number) < TRAINERS else worker
    push, nbytes = side(arm, int(number), Path(folder), config, store)
    before, seconds, used, beside, report = anonymous(), [], [], 0, None
    for _ in range(PUSHES):
        meeting.meet()
        begun, cpu = time.perf_counter(), time.process_time()
        most, report = peak(push)
        used.append(time.process_time() - cpu)
        beside = max(beside, most - before)
        meeting.meet()
        seconds.append(time.perf_counter() - begun)
    moved = getattr(report, "moved_bytes", nbytes)
    found = {"bytes": nbytes, "seconds": seconds, "cpu": used, "beside": beside, "moved": moved}
    (Path(folder) / f"{number}.json").write_text(json.dumps(found))
    meeting.meet()
    sys.stdout.flush()
    os._exit(0)


def peak(work: Callable[[], object]) -> tuple[int, object]:
    """The most anonymous memory while ``work`` runs, looked at each 20 ms, and what it gives."""
    import threading

    most, stop = anonymous(), threading.Event()

    def look() -> None:
        nonlocal most
        while not stop.wait(0.02):
            most = max(most, anonymous())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    made = work()
    stop.set()
    thread.join()
    return most, made


def groups(store: Any, number: int) -> Any:
    """Trainer rank 0 and the workers, over gloo."""
    place = 0 if number == 0 else number - TRAINERS + 1
    return dist.ProcessGroupGloo(dist.PrefixStore("b", store), place, WORKERS + 1, timedelta(seconds=500))


def trainer(
    arm: str, number: int, folder: Path, config: dict[str, Any], store: Any
) -> tuple[Callable[[], object], int]:
    import transformers
    from torch.distributed.fsdp import fully_shard

    import zerostart

    dist.init_process_group("gloo", store=dist.PrefixStore("t", store), rank=number, world_size=TRAINERS)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("qwen3", **config), dtype=torch.bfloat16
        )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        local = parameter.to_local()  # type: ignore[attr-defined]
        local.view(-1).view(torch.int16).copy_(torch.arange(local.numel()) * 31 + index & 0x3FFF)
    nbytes = sum(parameter.numel() * 2 for parameter in model.parameters())
    locals_ = [parameter.to_local().view(-1).view(torch.uint8) for parameter in model.parameters()]  # type: ignore[attr-defined]
    store.set("nbytes", str(nbytes))
    if arm == "ours":
        refitter = zerostart.refit(model, f"unix://{folder}/workers", workers=WORKERS)

        def push() -> object:
            report = refitter.push()
            if number == 0:
                print(report)
            return report

        return push, nbytes
    if arm == "raw":
        path = folder / "raw"
        if number == 0:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        dist.barrier()
        with path.open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)

        def copy() -> None:
            at = nbytes // TRAINERS * number
            for local in locals_:
                memory[at : at + local.numel()].copy_(local)
                at += local.numel()
            store.add("raw", 1)

        return copy, nbytes
    if arm == "reload":

        def reload() -> None:
            zerostart.save(model, folder / "saved")
            store.add("saved", 1)

        return reload, nbytes
    group = groups(store, number) if number == 0 else None

    def each() -> Iterator[torch.Tensor | None]:
        whole = None
        if arm == "gather":
            # All of it at once, as a gathered state dict is.
            whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
            yield from whole if number == 0 else ()
            return
        for parameter in model.parameters():
            full = parameter.full_tensor()  # type: ignore[attr-defined]
            yield full if number == 0 else None

    def send() -> None:
        for tensor in each():
            if tensor is not None and group is not None:
                group.broadcast([tensor.detach()]).wait()

    return send, nbytes


def worker(
    arm: str, number: int, folder: Path, config: dict[str, Any], store: Any
) -> tuple[Callable[[], object], int]:
    from tests.refit.workers import Engine

    place = number - TRAINERS
    engine = Engine(config, place, WORKERS, torch.bfloat16)
    held = [parameter.data.view(-1).view(torch.uint8) for parameter in engine.parameters()]
    own = sum(tensor.numel() for tensor in held)
    if arm == "ours":
        from zerostart import serving

        receiver = serving.Receiver(engine, name=f"tp{place}")
        connection = serving.Connection(receiver, f"unix://{folder}/workers")
        return connection.follow, own
    if arm == "raw":
        count = 0

        def copy() -> None:
            nonlocal count
            count += TRAINERS
            while store.add("raw", 0) < count:
                time.sleep(0.002)
            with (folder / "raw").open("r+b") as file:
                memory = mapped(file) if raw is None else raw
            at = 0
            for tensor in held:
                size = min(tensor.numel(), memory.numel() - at)
                tensor[:size].copy_(memory[at : at + size])
                at += size

        raw: Any = None

        def mapped(file: Any) -> torch.Tensor:
            nonlocal raw
            whole = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
            raw = whole[place * (whole.numel() - own) :]
            return raw

        return copy, own
    if arm == "reload":
        from safetensors import safe_open

        loads = 0

        def load() -> None:
            nonlocal loads
            loads += TRAINERS
            while store.add("saved", 0) < loads:
                time.sleep(0.002)
            for path in sorted((folder / "saved").glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    engine.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

        return load, own
    import transformers

    group = groups(store, number)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("qwen3", **config), dtype=torch.bfloat16
        )

    def received() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in shapes.named_parameters():
            room = torch.empty(parameter.shape, dtype=parameter.dtype)
            group.broadcast([room]).wait()
            yield name, room

    return lambda: engine.load_weights(received()), own


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    head = ["arm", "seconds", "range", "first push", "GB/s", "of raw", "CPU seconds", "of raw", "moved"]
    head += ["beside a trainer", "beside a worker"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm, runs in found.items():

        def middle(key: str, of: str = arm) -> float:
            return statistics.median(run[key] for run in found[of])

        seconds = [run["seconds"] for run in runs]
        raw = "raw"
        ratios = [
            f"{middle(k) / middle(k, raw):.2f}" if found.get(raw) else "" for k in ("seconds", "cpu_seconds")
        ]
        beside = [max(run[key] for run in runs) >> 20 for key in ("trainer_beside", "worker_beside")]
        lines.append(
            f"| {arm} | {middle('seconds'):.2f} | {min(seconds):.2f} to {max(seconds):.2f} | "
            f"{middle('first_seconds'):.2f} | {runs[0]['bytes'] / middle('seconds') / 1e9:.2f} | "
            f"{ratios[0]} | {middle('cpu_seconds'):.2f} | {ratios[1]} | "
            f"{runs[0]['moved'] / runs[0]['bytes']:.1%} | {beside[0]} MiB | {beside[1]} MiB |"
        )
    return "\n".join(lines)


def page(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    nbytes = next(iter(found.values()))[0]["bytes"]
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    command = "python benchmarks/refit.py " + " ".join(sys.argv[1:])
    return (
        f"# Weights into workers\n\n{nbytes / 1e9:.2f} GB in bf16, {TRAINERS} trainer ranks (FSDP2) to "
        f"{WORKERS} workers (tensors cut in two), {os.cpu_count()} cores for all of them, torch "
        f"{torch.__version__}; the best of the later pushes of each of {options.repeats} runs, median and "
        f"range over runs. Other programs shared the machine: CPU seconds of the four processes are told "
        f"beside. `{command}`.\n\n``of raw`` is by the raw copy. What a process takes "
        f"beside what it holds is anonymous memory; an image in shared memory is none (largest "
        f"process {most} MiB).\n\n{table(found)}\n"
    )


if __name__ == "__main__":
    main()
