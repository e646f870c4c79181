"""Compare ways to move weights from trainer ranks into workers on one host.

    python benchmarks/refit.py [--layers 21] [--repeats 3] [--only ARM ...] [--out FILE]

Two trainer ranks have FSDP2 in bf16. Each of two workers has half of a Qwen3 with fused parameters and a
loader like an engine's. Arms alternate, each in fresh processes. The first push is a separate figure,
because it also sets up later ones. Seconds are from the trainers' call until both workers have the weights.
CPU seconds are those of all four processes; other programs on the machine change them less.

- ``ours``: ``zerostart.refit``, with digests of the received weights;
- ``raw``: the trainers copy as many bytes into shared memory, and the workers copy them out: no names, no
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
    parser.add_argument("--layers", type=int, default=21, help="layers of a Qwen3-1.7B: 21 are 3.4 GB")
    parser.add_argument("--vocabulary", type=int, default=CONFIG["vocab_size"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_process(options)
        return
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.only}
    for repeat in range(options.repeats):
        for arm in options.only if repeat % 2 == 0 else options.only[::-1]:
            results[arm].append(run_arm(arm, options))
            print(f"repeat {repeat + 1}/{options.repeats}  {arm:<12} {results[arm][-1]}", flush=True)
    print("\n" + table(results))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(results, options))


def run_arm(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one arm in fresh processes; return seconds and peaks of memory."""
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


def anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class Barrier:
    """Barrier of all four processes, by a store."""

    def __init__(self, store: Any, number: int) -> None:
        self.store, self.number, self.count = store, number, 0

    def wait(self) -> None:
        self.count += 1
        key = f"meet-{self.count}"
        if self.store.add(key, 1) == TRAINERS + WORKERS:
            self.store.set(f"{key}-done", b"1")
        self.store.wait([f"{key}-done"])


def run_process(options: argparse.Namespace) -> None:
    arm, number, address = options.role
    port, folder = address.split(":", 1)
    store = dist.TCPStore("127.0.0.1", int(port), None, False, timeout=timedelta(seconds=500))
    torch.set_num_threads(1)
    config = {**CONFIG, "num_hidden_layers": options.layers, "vocab_size": options.vocabulary}
    barrier = Barrier(store, int(number))
    side = trainer if int(number) < TRAINERS else worker
    push, nbytes = side(arm, int(number), Path(folder), config, store)
    before, seconds, cpu_seconds, added, report = anonymous_bytes(), [], [], 0, None
    for _ in range(PUSHES):
        barrier.wait()
        start, cpu = time.perf_counter(), time.process_time()
        highest, report = peak_memory(push)
        cpu_seconds.append(time.process_time() - cpu)
        added = max(added, highest - before)
        barrier.wait()
        seconds.append(time.perf_counter() - start)
    moved_bytes = getattr(report, "moved_bytes", nbytes)
    result = {"bytes": nbytes, "seconds": seconds, "cpu": cpu_seconds, "beside": added, "moved": moved_bytes}
    (Path(folder) / f"{number}.json").write_text(json.dumps(result))
    barrier.wait()
    sys.stdout.flush()
    os._exit(0)


def peak_memory(work: Callable[[], object]) -> tuple[int, object]:
    """Return the peak of anonymous memory while ``work`` runs, and its result."""
    import threading

    highest, stop = anonymous_bytes(), threading.Event()

    def sample() -> None:
        nonlocal highest
        while not stop.wait(0.02):
            highest = max(highest, anonymous_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    result = work()
    stop.set()
    thread.join()
    return highest, result


def make_group(store: Any, number: int) -> Any:
    """Return a gloo group of trainer rank 0 and the workers."""
    rank = 0 if number == 0 else number - TRAINERS + 1
    return dist.ProcessGroupGloo(dist.PrefixStore("b", store), rank, WORKERS + 1, timedelta(seconds=500))


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
            offset = nbytes // TRAINERS * number
            for local in locals_:
                memory[offset : offset + local.numel()].copy_(local)
                offset += local.numel()
            store.add("raw", 1)

        return copy, nbytes
    if arm == "reload":

        def reload() -> None:
            zerostart.save(model, folder / "saved")
            store.add("saved", 1)

        return reload, nbytes
    group = make_group(store, number) if number == 0 else None

    def full_tensors() -> Iterator[torch.Tensor | None]:
        whole = None
        if arm == "gather":
            # All tensors at once, like a gathered state dict.
            whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
            yield from whole if number == 0 else ()
            return
        for parameter in model.parameters():
            full = parameter.full_tensor()  # type: ignore[attr-defined]
            yield full if number == 0 else None

    def send() -> None:
        for tensor in full_tensors():
            if tensor is not None and group is not None:
                group.broadcast([tensor.detach()]).wait()

    return send, nbytes


def worker(
    arm: str, number: int, folder: Path, config: dict[str, Any], store: Any
) -> tuple[Callable[[], object], int]:
    from tests.refit.workers import Engine

    rank = number - TRAINERS
    engine = Engine(config, rank, WORKERS, torch.bfloat16)
    views = [parameter.data.view(-1).view(torch.uint8) for parameter in engine.parameters()]
    nbytes = sum(tensor.numel() for tensor in views)
    if arm == "ours":
        from zerostart import serving

        receiver = serving.Receiver(engine, name=f"tp{rank}")
        connection = serving.Connection(receiver, f"unix://{folder}/workers")
        return connection.follow, nbytes
    if arm == "raw":
        count = 0

        def copy() -> None:
            nonlocal count
            count += TRAINERS
            while store.add("raw", 0) < count:
                time.sleep(0.002)
            with (folder / "raw").open("r+b") as file:
                memory = map_file(file) if raw is None else raw
            offset = 0
            for tensor in views:
                size = min(tensor.numel(), memory.numel() - offset)
                tensor[:size].copy_(memory[offset : offset + size])
                offset += size

        raw: Any = None

        def map_file(file: Any) -> torch.Tensor:
            nonlocal raw
            whole = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
            raw = whole[rank * (whole.numel() - nbytes) :]
            return raw

        return copy, nbytes
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

        return load, nbytes
    import transformers

    group = make_group(store, number)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("qwen3", **config), dtype=torch.bfloat16
        )

    def receive() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in shapes.named_parameters():
            tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
            group.broadcast([tensor]).wait()
            yield name, tensor

    return lambda: engine.load_weights(receive()), nbytes


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    head = ["arm", "seconds", "range", "first push", "GB/s", "of raw", "CPU seconds", "of raw", "moved"]
    head += ["beside a trainer", "beside a worker"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm, runs in results.items():

        def median_of(key: str, other_arm: str = arm) -> float:
            return statistics.median(run[key] for run in results[other_arm])

        seconds = [run["seconds"] for run in runs]
        raw = "raw"
        ratios = [
            f"{median_of(k) / median_of(k, raw):.2f}" if results.get(raw) else ""
            for k in ("seconds", "cpu_seconds")
        ]
        peaks_mib = [max(run[key] for run in runs) >> 20 for key in ("trainer_beside", "worker_beside")]
        lines.append(
            f"| {arm} | {median_of('seconds'):.2f} | {min(seconds):.2f} to {max(seconds):.2f} | "
            f"{median_of('first_seconds'):.2f} | {runs[0]['bytes'] / median_of('seconds') / 1e9:.2f} | "
            f"{ratios[0]} | {median_of('cpu_seconds'):.2f} | {ratios[1]} | "
            f"{runs[0]['moved'] / runs[0]['bytes']:.1%} | {peaks_mib[0]} MiB | {peaks_mib[1]} MiB |"
        )
    return "\n".join(lines)


def page(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> str:
    nbytes = next(iter(results.values()))[0]["bytes"]
    largest_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    command = "python benchmarks/refit.py " + " ".join(sys.argv[1:])
    return (
        f"# Weights into workers\n\n{nbytes / 1e9:.2f} GB in bf16, {TRAINERS} trainer ranks (FSDP2) to "
        f"{WORKERS} workers (tensors cut in two), {os.cpu_count()} cores for all of them, torch "
        f"{torch.__version__}; the best of the later pushes of each of {options.repeats} runs, median and "
        f"range over runs. Other programs shared the machine: CPU seconds of the four processes are told "
        f"beside. `{command}`.\n\n``of raw`` is by the raw copy. What a process takes "
        f"beside what it holds is anonymous memory; an image in shared memory is none (largest "
        f"process {largest_mib} MiB).\n\n{table(results)}\n"
    )


if __name__ == "__main__":
    main()
