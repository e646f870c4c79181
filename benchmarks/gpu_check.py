"""What can only be seen on an accelerator: `make gpu-check`, or plain python with PYTHONPATH=src.

    python benchmarks/gpu_check.py [--out FILE] [--scratch DIR] [--ranks 1,2,4,8] [--only NAME,...] [--tiny]

Made for the first hour on a real one. Every check is a process a rank of its own; its result is a line of
JSON, written as it ends, with what went wrong if anything did; none stops another, and nothing needs the
network. ``--tiny`` leaves out what takes long: so it is tried out on the pretend accelerator of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
LARGE = ROOT / "benchmarks" / "configs" / "qwen3_moe_3.4gb.json"
MiB = 1 << 20
#: Seconds for one check.
LIMIT = 150
Result = dict[str, Any]


def verbs(path: Path, folder: Path, engine: str, stage: int, config: Any = None, **options: Any) -> Result:
    """Load and compare with transformers, train, save, states, and one in the background beside a step."""
    from transformers import AutoModelForCausalLM

    import zerostart

    start = time.perf_counter()
    model = zerostart.load(
        path, engine=engine, zero_stage=stage, engine_config=config, progress=False, **options
    )
    made, device = zerostart.report(model), torch.device(kind(), torch.accelerator.current_device_index())
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    seen = dict(zerostart.full_tensors(model, rank=None))
    result: Result = {"seconds": made.phases, "read_bytes": made.read_bytes}
    result |= {"peak_device_bytes": made.peak_device_bytes, "peak_host_bytes": made.peak_host_bytes}
    result["wrong"] = sorted(expected.keys() ^ seen.keys())
    result["wrong"] += [n for n in seen.keys() & expected.keys() if not torch.equal(seen[n], expected[n])]
    model.train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    runner: Any = model
    if engine == "deepspeed":
        import deepspeed

        runner, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = [step(runner, optimizer, device) for _ in range(3)]
    zerostart.save(runner, folder / "saved")
    own = {} if engine == "deepspeed" else {"optimizer": optimizer}
    before = zerostart.digest(runner)
    handle = zerostart.save_state(folder / "state", runner, wait=False, **own)
    after = step(runner, optimizer, device)
    handle.wait()
    zerostart.load_state(folder / "state", runner, **own)
    if zerostart.digest(runner) != before:
        result["wrong"].append("what the state brought back")
    again = step(runner, optimizer, device)
    result |= {"losses": [*losses, after, again], "step_after_state_is_the_same": after == again}
    result |= {"pause": handle.seconds, "all_seconds": time.perf_counter() - start}
    return result


def step(model: Any, optimizer: Any, device: torch.device) -> float:
    tokens = torch.arange(32, device=device).view(1, 32) % 60 + 3
    loss = model(input_ids=tokens, labels=tokens).loss
    if hasattr(model, "backward"):
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def rates(path: Path, folder: Path, megabytes: int = 256) -> Result:
    """The bus, from page-locked memory of torch's and of ours, and from memory that is not locked."""
    from zerostart.transfer import page_locked

    nbytes, device = megabytes * MiB, torch.device(kind(), torch.accelerator.current_device_index())
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    hosts = {
        "torch's page-locked": torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True),
        "registered": page_locked(nbytes),
        "pageable": torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
    }
    result: Result = {"registered_is_pinned": hosts["registered"].is_pinned()}
    for name, host in hosts.items():
        for way, (to, source) in {"to": (there, host), "from": (host, there)}.items():
            to.copy_(source, non_blocking=True)
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            for _ in range(4):
                to.copy_(source, non_blocking=True)
            torch.accelerator.synchronize(device)
            result[f"{name}, {way} the device"] = (
                f"{4 * nbytes / (time.perf_counter() - start) / 1e9:.1f} GB/s"
            )
    return result


def large(path: Path, folder: Path, engine: str) -> Result:
    """3.4 GB twice (the first warms the cache), and stock beside it."""
    from transformers import AutoModelForCausalLM

    import zerostart

    result: Result = {}
    for turn in ("cold", "warm"):
        model = zerostart.load(path, engine=engine, progress=False)
        made = zerostart.report(model)
        result[turn] = {"seconds": made.phases, "peak_device_bytes": made.peak_device_bytes}
        result[turn] |= {"peak_host_bytes": made.peak_host_bytes, "read_bytes": made.read_bytes}
        del model
        torch.accelerator.empty_cache()
    if dist.get_world_size() == 1:
        start = time.perf_counter()
        AutoModelForCausalLM.from_pretrained(path).to(kind())
        torch.accelerator.synchronize()
        result["stock_seconds"] = time.perf_counter() - start
    return result


def races(path: Path, folder: Path) -> Result:
    """Loads and background saves while the device is kept busy: a wait that is missing gives wrong bytes."""
    import zerostart

    device = torch.device(kind(), torch.accelerator.current_device_index())
    wrong = []
    for turn in range(4):
        busy(device)
        model = zerostart.load(path, engine="fsdp2", progress=False)
        digest = zerostart.digest(model)
        if turn == 0:
            first = digest
        if digest != first:
            wrong.append(f"load {turn}")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step(model, optimizer, device)
        before = zerostart.digest(model)
        busy(device)
        handle = zerostart.save_state(folder / str(turn), model, optimizer=optimizer, wait=False)
        step(model, optimizer, device)
        handle.wait()
        zerostart.load_state(folder / str(turn), model, optimizer=optimizer)
        if zerostart.digest(model) != before:
            wrong.append(f"state {turn}")
    return {"wrong": wrong}


def busy(device: torch.device) -> None:
    """Half a second of work in front of whatever comes."""
    if device.type == "cuda":
        torch.cuda._sleep(1_000_000_000)
    else:
        torch.ones(64, 64, device=device).mul_(2)


def fused(path: Path, folder: Path) -> Result:
    """The fused optimizer, and torch.compile, on FSDP2."""
    import zerostart

    device = torch.device(kind(), torch.accelerator.current_device_index())
    model: Any = zerostart.load(path, engine="fsdp2", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    result: Result = {"fused": [step(model, optimizer, device) for _ in range(3)]}
    if device.type == "cuda":
        result["compiled"] = [step(torch.compile(model), optimizer, device) for _ in range(2)]
    return result


def checks(tiny: bool) -> Iterator[tuple[str, str, Callable[..., Result], Mapping[str, Any]]]:
    """Name, checkpoint, function and its arguments, most telling first."""
    batch = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    yield "fsdp2 3", "qwen3", verbs, {"engine": "fsdp2", "stage": 3}
    for stage in (3,) if tiny else (3, 2, 1):
        config = {**batch, "zero_optimization": {"stage": stage}}
        yield f"deepspeed {stage}", "qwen3", verbs, {"engine": "deepspeed", "stage": stage, "config": config}
    yield "rates", "qwen3", rates, {"megabytes": 2 if tiny else 256}
    yield "races", "qwen3", races, {}
    if tiny:
        return
    yield "fsdp2 offload", "qwen3", verbs, {"engine": "fsdp2", "stage": 3, "config": "offload"}
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    config = {**batch, "zero_optimization": zero}
    yield "deepspeed 3 offload", "qwen3", verbs, {"engine": "deepspeed", "stage": 3, "config": config}
    config = {**batch, "zero_optimization": {"stage": 3}}
    for name in ("qwen3_moe", "mixtral", "gpt_oss"):
        yield f"fsdp2 {name}", name, verbs, {"engine": "fsdp2", "stage": 3}
        yield f"deepspeed {name}", name, verbs, {"engine": "deepspeed", "stage": 3, "config": config}
    yield "fused and compiled", "qwen3", fused, {}
    yield "large fsdp2", "large", large, {"engine": "fsdp2"}
    yield "large deepspeed", "large", large, {"engine": "deepspeed"}


def kind() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None, "an accelerator is here"
    return device.type


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks on an accelerator.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.jsonl")
    parser.add_argument(
        "--scratch", type=Path, help="where checkpoints are made; default: a temporary folder"
    )
    parser.add_argument("--ranks", help="numbers of ranks; default: 1, 2, 4, 8 as far as there are devices")
    parser.add_argument("--only", help="names of checks")
    parser.add_argument("--tiny", action="store_true", help="a dry run: a few checks, on tiny models")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a rank of one check
    options = parser.parse_args()
    if options.one:
        one_rank(**json.loads(options.one))
        return
    if not torch.accelerator.is_available():
        sys.exit("no accelerator here")
    count = torch.accelerator.device_count()
    ranks = [int(n) for n in options.ranks.split(",")] if options.ranks else [1, 2, 4, 8]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch, options.out.open("w") as out:
        facts = {"accelerator": kind(), "devices": count, "python": platform.python_version()}
        write(out, {"facts": {**facts, "torch": torch.__version__}})
        for size in (n for n in ranks if n <= count):
            for name, source, _, _ in checks(options.tiny):
                if options.only and name not in options.only.split(","):
                    continue
                result = run(name, source, size, Path(scratch), options.tiny)
                failed += bool(result.get("error") or result.get("wrong"))
                write(out, {"check": name, "ranks": size, **result})
    print(f"{failed} failed")
    sys.exit(1 if failed else 0)


def write(out: Any, line: Result) -> None:
    text = json.dumps(line)
    out.write(text + "\n")
    out.flush()
    print(text, flush=True)


def run(name: str, source: str, size: int, scratch: Path, tiny: bool) -> Result:
    """One check, on ranks of its own; whatever becomes of them."""
    try:
        path = checkpoint(source, scratch)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        folder = tempfile.mkdtemp(dir=scratch)
        told = json.dumps({"name": name, "path": str(path), "folder": folder, "tiny": tiny})
        common = {**os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", told],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,
            )
            for rank in range(size)
        ]
        deadline = time.monotonic() + LIMIT
        try:
            for process in started:
                process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        found = Path(folder, "result.json")
        codes = [process.returncode for process in started]
        result: Result = json.loads(found.read_text()) if found.exists() else {"error": f"ended with {codes}"}
        return result
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def checkpoint(source: str, scratch: Path) -> Path:
    from zerostart.models.synth import synthesise

    path = scratch / source
    if not path.exists():
        if source == "large":
            synthesise(str(LARGE), path, size=None)
        else:
            synthesise(source, path, size="tiny")
    return path


def one_rank(name: str, path: str, folder: str, tiny: bool) -> None:
    """Body of a rank."""
    (function, arguments), *_ = ((f, a) for known, _, f, a in checks(tiny) if known == name)
    values: dict[str, Any] = dict(arguments)
    if values.get("config") == "offload":
        from torch.distributed.fsdp import CPUOffloadPolicy

        values["config"] = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    try:
        dist.init_process_group(f"cpu:gloo,{kind()}:{dist.get_default_backend_for_device(kind())}")
        result = function(Path(path), Path(folder), **values)
    except Exception:
        result = {"error": traceback.format_exc()[-2000:]}
    target = Path(folder, "result.json")
    # Any rank's failure is the check's; else the first rank's figures are.
    if result.get("error") or (os.environ["RANK"] == "0" and not target.exists()):
        target.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(1 if result.get("error") else 0)


if __name__ == "__main__":
    main()
