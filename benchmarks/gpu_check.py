"""What can only be seen on an accelerator: `make gpu-check`, or plain python with PYTHONPATH=src.

    python benchmarks/gpu_check.py [--out FILE] [--scratch DIR] [--ranks 1,2,4,8] [--only NAME,...] [--list]
                                   [--minutes 20] [--limit 150] [--tiny]

Made for the first hour on a real one. Every check is processes of its own, one a rank; its result is a line
of JSON, written as it ends, with what went wrong if anything did. None stops another, whether it fails, dies
or hangs: at its time limit it is killed, with the stacks of its threads in its line. Nothing needs the
network. For each number of ranks, checks that have not begun after ``--minutes`` are left out, and say so.

Training is held against plain transformers and torch on the host, in fp32: losses within ``TOLERANCE``.
Weights that are loaded, saved, or brought back are equal to the bit. What has ``wrong`` or ``error`` in its
line has failed; ``left_out`` is what this machine cannot show.

``--tiny`` is a dry run, of what takes no time: so it is tried out on the pretend accelerator of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "benchmarks" / "configs"
MiB = 1 << 20
#: Relative, of losses in fp32 beside the host's: kernels add in another order. No TF32 (see ``one_rank``).
TOLERANCE = 1e-4
#: Of pictures, relative to the largest value: some dozen layers, several times over.
PICTURE_TOLERANCE = 1e-2
#: Seconds that the other ranks of a check get once one has ended badly.
GRACE = 15
LEARNING_RATE, STEPS = 1e-3, 3
Result = dict[str, Any]


# --- Checks. Each runs on every rank of a group, with the directory of a checkpoint and one of its own.


def verbs(path: Path, folder: Path, engine: str, stage: int, config: Any = None, **options: Any) -> Result:
    """Load and compare with transformers, train, look, save, and states, one of them beside a step."""
    from transformers import AutoModelForCausalLM

    import zerostart

    start, device = time.perf_counter(), own_device()
    model = zerostart.load(
        path, engine=engine, zero_stage=stage, engine_config=config, progress=False, **options
    )
    made = zerostart.report(model)
    result: Result = {"seconds": made.phases, "read_bytes": made.read_bytes}
    result |= {"peak_device_bytes": made.peak_device_bytes, "peak_host_bytes": made.peak_host_bytes}
    plain = AutoModelForCausalLM.from_pretrained(path)
    expected = plain.state_dict()
    wrong = differing(dict(zerostart.full_tensors(model, rank=None)), expected)
    with zerostart.gathered(model, "model.norm.weight", modifier_rank=0) as whole:
        if dist.get_rank() == 0:
            whole.mul_(2)
    with zerostart.gathered(model, "model.norm.weight", modifier_rank=0) as whole:
        if not torch.equal(whole.cpu(), expected["model.norm.weight"] * 2):
            wrong.append("what gathered() showed of a change")
        if dist.get_rank() == 0:
            whole.div_(2)
    runner, optimizer = prepared(model, engine, config)
    losses = [step(runner, optimizer, device) for _ in range(STEPS)]
    result |= {"losses": losses, "host_losses": host_losses(plain)}
    wrong += far(losses, result["host_losses"])
    if dist.get_world_size() == 1:
        result["stock_losses"] = host_losses(AutoModelForCausalLM.from_pretrained(path).to(device), device)
    zerostart.save(runner, folder / "saved")
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    wrong += [f"{n}, saved" for n in differing(dict(zerostart.full_tensors(runner, rank=None)), saved)]
    own = {} if engine == "deepspeed" else {"optimizer": optimizer}
    before = zerostart.digest(runner)
    zerostart.save_state(folder / "state", runner, **own)
    begun = time.perf_counter()
    handle = zerostart.save_state(folder / "beside", runner, wait=False, **own)
    result["pause_seconds"] = time.perf_counter() - begun
    after = step(runner, optimizer, device)
    handle.wait()
    result["background_seconds"] = handle.seconds
    for state in ("state", "beside"):
        zerostart.load_state(folder / state, runner, **own)
        if zerostart.digest(runner) != before:
            wrong.append(f"what {state} brought back")
        if (again := step(runner, optimizer, device)) != after:
            wrong.append(f"the step from {state} on: {again} for {after}")
    return {**result, "wrong": wrong, "all_seconds": time.perf_counter() - start}


def prepared(model: Any, engine: str, config: Any) -> tuple[Any, Any]:
    """The model as it is trained, and its optimizer."""
    model.train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4)
    if engine != "deepspeed":
        return model, optimizer
    import deepspeed

    runner, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return runner, optimizer


def step(model: Any, optimizer: Any, device: torch.device, batch: int = 0) -> float:
    """One step on a batch of made-up tokens; the loss before it."""
    tokens = (torch.arange(32, device=device).view(2, 16) * (1 + batch)) % 60 + 3
    loss = model(input_ids=tokens, labels=tokens).loss
    if hasattr(model, "backward"):
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def host_losses(model: Any, device: torch.device | None = None) -> list[float]:
    """Of plain torch, on the host or the device where ``model`` is."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4)
    return [step(model, optimizer, device or torch.device("cpu")) for _ in range(STEPS)]


def differing(found: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are not in both, or whose tensors are not equal to the bit."""
    names = found.keys() & wanted.keys()
    return sorted(found.keys() ^ wanted.keys()) + [n for n in names if not torch.equal(found[n], wanted[n])]


def far(found: Sequence[float], wanted: Sequence[float]) -> list[str]:
    pairs = zip(found, wanted, strict=True)
    # In this order: of a loss that is no number nothing is true.
    return [
        f"loss {n}: {a} for {b}" for n, (a, b) in enumerate(pairs) if not abs(a - b) <= TOLERANCE * abs(b)
    ]


def rates(path: Path, folder: Path, megabytes: int = 64) -> Result:
    """The bus, from page-locked memory of torch's and of ours, and from memory that is not locked."""
    from zerostart.transfer import page_locked

    nbytes, device = megabytes * MiB, own_device()
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    hosts = {
        "torch's page-locked": torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True),
        "registered": page_locked(nbytes, device),
        "pageable": torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
    }
    result: Result = {"device": str(torch.get_device_module(device).get_device_name(device))}
    result["registered_is_pinned"] = hosts["registered"].is_pinned()
    for name, host in hosts.items():
        for way, (to, source) in {"to": (there, host), "from": (host, there)}.items():
            rate = copied(to, source) / 1e9
            result[f"{name}, {way} the device"] = f"{rate:.1f} GB/s"
    return result


def sums(path: Path, folder: Path, megabytes: int = 256) -> Result:
    """Sums of digests on the device beside the host's, of any place and length; and how fast they are."""
    from zerostart.checkpoint.digest import Digests

    device, wrong = own_device(), []
    torch.manual_seed(0)
    data = torch.randint(-128, 128, (70 * MiB,), dtype=torch.int8)
    data[: 2 * MiB] = -128
    there = data.to(device)

    def digest(given: torch.Tensor, cuts: Sequence[int]) -> str:
        made = Digests([("t", "I8", given.shape)])
        for low, high in itertools.pairwise(cuts):
            made.add("t", low, given[low:high])
        return made.summed()["t"]

    expected = digest(data, [0, data.numel()])
    every = [(n * 1024,) for n in range(1, 40)] + [(5, 1000, 1003), (1, 20_000, 3 * MiB), (MiB + 1024,)]
    for cuts in every:
        places = [0, *cuts, data.numel()]
        if digest(there, places) != expected:
            wrong.append(f"the digest of pieces that end at {cuts}")
    square, found = data[: 64 * MiB].view(8192, 8192), {}
    for name, given in (("host", square), ("device", square.to(device))):
        made = Digests([("t", "I8", given.shape)])
        for low, high in ((0, 300), (300, 4396), (4396, 8192)):
            made.add_rows("t", low, 8192, given[:, low:high])
        found[name] = made.summed()["t"]
    wrong += [] if found["device"] == found["host"] else ["the digest of columns"]
    torch.use_deterministic_algorithms(True)
    try:
        if digest(there, [0, data.numel()]) != expected:
            wrong.append("the digest in deterministic mode")
    finally:
        torch.use_deterministic_algorithms(False)
    many = torch.zeros(megabytes * MiB, dtype=torch.int8, device=device)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        digest(many, range(0, many.numel() + 1, 8 * MiB))
        taken.append(time.perf_counter() - start)
    return {"GB_per_second": many.numel() / min(taken) / 1e9, "wrong": wrong}


def copied(to: torch.Tensor, source: torch.Tensor, times: int = 4) -> float:
    """Bytes a second of a copy, the fastest way."""
    device = source.device if to.device.type == "cpu" else to.device
    to.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        to.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(device)
    return times * to.nbytes / (time.perf_counter() - start)


def large(path: Path, folder: Path, engine: str) -> Result:
    """Bytes of a size that counts, twice; stock beside it, and a raw copy of as many bytes.

    The checkpoint has just been written, so it is in the page cache if that has room.
    """
    from transformers import AutoModelForCausalLM

    import zerostart
    from zerostart.transfer import page_locked

    device, result = own_device(), Result()
    for turn in ("first", "second"):
        before = torch.accelerator.memory_allocated(device)
        model = zerostart.load(path, engine=engine, progress=False)
        made = zerostart.report(model)
        result[turn] = {"seconds": made.phases, "peak_device_bytes": made.peak_device_bytes}
        result[turn] |= {"peak_host_bytes": made.peak_host_bytes, "read_bytes": made.read_bytes}
        result[turn]["device_bytes"] = torch.accelerator.memory_allocated(device) - before
        read = made.read_bytes
        del model
        freed()
    rate = copied(torch.empty(256 * MiB, dtype=torch.uint8, device=device), page_locked(256 * MiB, device))
    result["raw_copy_seconds"] = read / rate
    if dist.get_world_size() == 1:
        for name, onto in (("to the device", {}), ("with a device map", {"device_map": {"": device}})):
            start = time.perf_counter()
            whole = AutoModelForCausalLM.from_pretrained(path, **onto).to(device)
            torch.accelerator.synchronize(device)
            result[f"stock, {name}, seconds"] = time.perf_counter() - start
            del whole
            freed()
    return result


def freed() -> None:
    gc.collect()
    torch.accelerator.empty_cache()


def races(path: Path, folder: Path, turns: int = 4) -> Result:
    """Loads, background saves and offloaded activations on a busy device: missing waits show."""
    import zerostart

    device, wrong = own_device(), list[str]()
    first: Any = None
    for turn in range(turns):
        busy(device)
        model = zerostart.load(path, engine="fsdp2", progress=False)
        digest = zerostart.digest(model)
        first = first or digest
        if digest != first:
            wrong.append(f"load {turn}")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        step(model, optimizer, device)
        before = zerostart.digest(model)
        busy(device)
        handle = zerostart.save_state(folder / str(turn), model, optimizer=optimizer, wait=False)
        step(model, optimizer, device)
        handle.wait()
        zerostart.load_state(folder / str(turn), model, optimizer=optimizer)
        if zerostart.digest(model) != before:
            wrong.append(f"state {turn}")
        if (found := checkpointed(device, True)) != checkpointed(device, False):
            wrong.append(f"activations {turn}: a gradient of {found}")
    return {"wrong": wrong}


def checkpointed(device: torch.device, offload: bool) -> float:
    """A gradient through three functions whose arguments wait on the host, or do not."""
    import zerostart

    weight = torch.linspace(-1, 1, 256 * 256, device=device).view(256, 256).requires_grad_()
    x = torch.linspace(0, 1, 256 * 256, device=device).view(256, 256).requires_grad_()
    y: Any = x
    for _ in range(3):
        if offload:
            busy(device)
        y = zerostart.gradient_checkpoint(lambda given: torch.tanh(given @ weight), y, offload=offload)
    y.sum().backward()
    assert weight.grad is not None
    return float(weight.grad.double().sum().item())


def elsewhere(path: Path, folder: Path, engine: str) -> Result:
    """Load the files of a trained model into both engines, and refit a model of the other engine."""
    import zerostart

    other = "fsdp2" if engine == "deepspeed" else "deepspeed"
    config = {**BATCH, "zero_optimization": {"stage": 3}} if engine == "deepspeed" else None
    model = zerostart.load(path, engine=engine, engine_config=config, progress=False)
    runner, optimizer = prepared(model, engine, config)
    step(runner, optimizer, own_device())
    wanted, wrong = zerostart.digest(runner), list[str]()
    zerostart.save(runner, folder / "saved")
    for way in (engine, other):
        again = zerostart.load(folder / "saved", engine=way, zero_stage=3, progress=False)
        if zerostart.digest(again) != wanted:
            wrong.append(f"what {way} loads of what was saved")
    follower = zerostart.load(path, engine=other, zero_stage=3, progress=False)
    with zerostart.refit(runner, follower) as refitter:
        refitter.push()
        if zerostart.digest(follower) != wanted:
            wrong.append(f"what a model on {other} took over")
        step(runner, optimizer, own_device(), 1)
        refitter.push()
    if zerostart.digest(follower) != zerostart.digest(runner):
        wrong.append("what it took over after another step")
    return {"wrong": wrong, "verified_tensors": zerostart.verify(folder / "saved").tensors}


def busy(device: torch.device) -> None:
    """Some tenths of a second of work in front of whatever comes."""
    if device.type == "cuda":
        torch.cuda._sleep(500_000_000)
    else:
        torch.ones(64, 64, device=device).mul_(2)


def fused(path: Path, folder: Path) -> Result:
    """torch's fused AdamW on FSDP2, beside the host."""
    from transformers import AutoModelForCausalLM

    import zerostart

    device = own_device()
    model: Any = zerostart.load(path, engine="fsdp2", progress=False)
    options = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4, **options)
    losses = [step(model.train(), optimizer, device) for _ in range(STEPS)]
    wanted = host_losses(AutoModelForCausalLM.from_pretrained(path))
    return {"losses": losses, "host_losses": wanted, "wrong": far(losses, wanted)}


def deepspeeds_adam(path: Path, folder: Path, offload: bool) -> Result:
    """DeepSpeed's FusedAdam or, for states on the host, its CPUAdam: it compiles them, with nvcc or g++."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    import zerostart

    zero: Result = {"stage": 3}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    adam = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "eps": 1e-4, "weight_decay": 0.01}}
    config = {**BATCH, "zero_optimization": zero, "optimizer": adam}
    model = zerostart.load(path, engine="deepspeed", engine_config=config, progress=False)
    try:
        runner, optimizer, *_ = deepspeed.initialize(model=model.train(), config=config)
    except Exception as error:
        if type(error).__name__ in ("CUDAMismatchException", "MissingCUDAException") or "ninja" in str(error):
            return {"left_out": f"{type(error).__name__}: {error}"[:500]}
        raise
    losses = [step(runner, optimizer, own_device()) for _ in range(STEPS)]
    wanted = host_losses(AutoModelForCausalLM.from_pretrained(path))
    kind = type(getattr(runner.optimizer, "optimizer", runner.optimizer)).__name__
    return {"optimizer": kind, "losses": losses, "host_losses": wanted, "wrong": far(losses, wanted)}


def compiled(path: Path, folder: Path, engine: str) -> Result:
    """torch.compile of the loaded model."""
    from transformers import AutoModelForCausalLM

    import zerostart

    device = own_device()
    if device.type != "cuda":
        return {"left_out": f"torch.compile has no kernels for {device.type}"}
    config = {**BATCH, "zero_optimization": {"stage": 3}} if engine == "deepspeed" else None
    model: Any = zerostart.load(path, engine=engine, engine_config=config, progress=False)
    runner, optimizer = prepared(model, engine, config)
    if engine == "deepspeed":
        runner.compile()
    else:
        runner = torch.compile(runner)
    losses = [step(runner, optimizer, device) for _ in range(STEPS)]
    wanted = host_losses(AutoModelForCausalLM.from_pretrained(path))
    return {"losses": losses, "host_losses": wanted, "wrong": far(losses, wanted)}


def aligned(path: Path, folder: Path, stage: int) -> Result:
    """gpt_oss on DeepSpeed, in bf16, ours and stock: ``torch._grouped_mm`` wants experts at 16 bytes.

    The first run on a GPU stopped here. On one rank DeepSpeed gives views of its one buffer, in which a
    parameter of four elements comes before the experts.
    """
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    import zerostart

    config = {**BATCH, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    if stage < 3:
        config["zero_optimization"]["parameter_alignment"] = True
    result: Result = {}
    for name in ("stock", "ours"):
        said = HfDeepSpeedConfig(config) if name == "stock" and stage == 3 else None
        try:
            if name == "ours":
                model: Any = zerostart.load(
                    path,
                    engine="deepspeed",
                    zero_stage=stage,
                    engine_config=config,
                    dtype=torch.bfloat16,
                    progress=False,
                )
            else:
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            runner, optimizer = prepared(model, "deepspeed", config)
            seen = watched(model)
            result[name] = {"losses": [step(runner, optimizer, own_device()) for _ in range(2)]}
            result[name]["bytes_beside_16"] = sorted(seen - {0})
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        del said
        deepspeed.comm.barrier()
    return {**result, "wrong": ["ours does not train"] if "error" in result["ours"] else []}


def watched(model: torch.nn.Module) -> set[int]:
    """Gets the addresses of experts in each forward, modulo 16."""
    seen: set[int] = set()

    def look(module: torch.nn.Module, _: Any) -> None:
        seen.update(p.data_ptr() % 16 for p in module.parameters(recurse=False) if p.dim() == 3)

    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.register_forward_pre_hook(look)
    return seen


def diffusion(path: Path, folder: Path, engine: str) -> Result:
    """A small pipeline in shards draws what diffusers draws with it, whole, on the host."""
    import diffusers

    import zerostart

    device = own_device()

    def drawn(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt"}
        made = pipe(
            prompt="a cat", generator=torch.Generator().manual_seed(3), max_sequence_length=12, **size
        )
        return torch.as_tensor(made[0]).cpu().float()

    placement = {"transformer": "shard", "vae": "replicate", "text_encoder": "offload"}
    pipe = zerostart.load_pipeline(path, placement, engine=engine, progress=False)
    start = time.perf_counter()
    found = drawn(pipe)
    seconds, wanted = (
        time.perf_counter() - start,
        drawn(diffusers.DiffusionPipeline.from_pretrained(str(path))),
    )
    off = float((found - wanted).abs().max() / wanted.abs().max())
    wrong = [f"a picture, by {off:.1e}"] if not off <= PICTURE_TOLERANCE else []
    return {"device": str(device), "seconds": seconds, "off": off, "wrong": wrong}


def refit(path: Path, folder: Path, transport: str, layers: int = 0) -> Result:
    """Weights of FSDP2 into an engine on the same devices: within the ranks, or in processes of their own.

    Of the checkpoint, where the engine has to have what its own loader makes of a save; or, with ``layers``,
    of so many layers of a Qwen3 of 1.7 billion parameters, whose digests the push compares by itself.
    """
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    import zerostart
    from tests.refit import workers

    device, rank, size = own_device(), dist.get_rank(), dist.get_world_size()
    if layers:
        config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **QWEN3)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.to_empty(device=device)  # values are of no account: drawn where that takes no time
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        fully_shard(model)
    else:
        model = zerostart.load(path, engine="fsdp2", dtype=torch.bfloat16, progress=False)
    sizes = {name: value for name, value in model.config.to_dict().items() if name != "dtype"}
    served, config_path = folder / ("-" if layers else "served"), folder / f"engine.{rank}.json"
    if not layers:
        served.mkdir(exist_ok=True)
    place = rank
    config_path.write_text(json.dumps({**sizes, "device": f"{device.type}:{place}"}))
    engine: Any = None
    target: Any
    worker = None
    options: Result = {}
    result: Result = {"pushes": []}
    try:
        if transport == "within":
            engine = target = workers.Engine(sizes, rank, size, torch.bfloat16).to(device)
        else:
            target = f"unix://{folder / 'socket'}"
            options = {"workers": size, "timeout": 60}
            worker = workers.start(config_path, rank, size, target, served, LOCAL_RANK=str(place))
        with zerostart.refit(model, target, **options) as refitter:
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.data.to_local().mul_(-1.375)
                begun = time.perf_counter()
                report = refitter.push()
                torch.accelerator.synchronize(device)
                seconds = {**report.phases, "whole": time.perf_counter() - begun}
                result["pushes"].append({name: round(value, 4) for name, value in seconds.items()})
            result |= {"transport": report.transport, "bytes": report.owned_bytes, "untaken": report.untaken}
            result |= {"moved_bytes": report.moved_bytes, "peak_host_bytes": report.peak_host_bytes}
            result["peak_device_bytes"] = report.peak_device_bytes
        said = worker.communicate(timeout=60)[0] if worker is not None else "served 3"
    finally:
        if worker is not None:
            worker.kill()
    wrong = [] if "served 3" in said else [f"a worker: {said[-500:]}"]
    if layers:
        there = torch.empty(256 * MiB, dtype=torch.uint8, device=device)
        beside = {"device": torch.empty_like(there), "host": torch.empty_like(there, device="cpu")}
        beside["host"] = beside["host"].pin_memory()
        return {**result, "GB_per_second": {name: copied(to, there) / 1e9 for name, to in beside.items()}}
    zerostart.save(model, folder / "saved")
    expected = workers.loaded(sizes, rank, size, folder / "saved", torch.bfloat16)
    if engine is not None:
        found = {name: tensor.cpu() for name, tensor in engine.state_dict().items()}
    else:
        found = torch.load(served / f"tp{rank}-3.pt", map_location="cpu")
    return {**result, "wrong": wrong + differing(found, expected)}


# --- Checks that start commands of zerostart, in one process without a group.


def train_from_yaml(path: Path, folder: Path, size: int, engine: str) -> Result:
    """``zerostart train`` on a text, with states in the background, and the same run on the host."""
    from tests.documents.folders import write_character_tokenizer

    shutil.copytree(path, folder / "model")
    write_character_tokenizer(folder / "model")
    (folder / "text.txt").write_text("the cat sat on the mat, and the dog sat on the cat. " * 40)
    train = {"steps": 4, "batch_size": 2, "learning_rate": LEARNING_RATE, "mixed_precision": "no"}
    values = {
        "model": {"source": "model"},
        "task": {
            "name": "tests.training.language:CausalLanguage",
            "source": "text.txt",
            "sequence_length": 16,
        },
        "engine": {"name": engine},
        "train": {**train, "checkpoint_blocks": "offload"},
        "checkpoint": {"every": 2, "background": True},
        "output": {"directory": "out"},
    }
    (folder / "run.yaml").write_text(json.dumps(values))
    return beside_the_host(folder, ["train"], size, [])


def diffusion_from_yaml(path: Path, folder: Path, size: int, engine: str) -> Result:
    """``zerostart config``, ``cache`` and ``train`` of a LoRA of FLUX, and the same on the host."""
    from tests.documents.folders import make_folders
    from tests.tiny import TinyCheckpoints

    shutil.copytree(path, folder / "model")
    make_folders(folder, {"pictures": "pictures:12"}, TinyCheckpoints(folder / "tiny"))
    command(folder, ["config", "flux", "run.yaml", "--engine", engine, "--lora"], on_host=True)
    values = {"model.source": "model", "media.source": "pictures/metadata.csv", "media.height": 16}
    values |= {
        "media.width": 16,
        "train.steps": 4,
        "train.learning_rate": LEARNING_RATE,
        "train.batch_size": 2,
    }
    values |= {
        "train.mixed_precision": "no",
        "lora.rank": 4,
        "ema.decay": 0.9,
        "samples.prompts": '["a cat"]',
    }
    values |= {"samples.steps": 2, "samples.height": 16, "samples.width": 16}
    words = [f"{name}={value}" for name, value in values.items()]
    return beside_the_host(folder, ["cache", "train"], size, words)


ADOPTED = """
import json, os, sys
from pathlib import Path
from tests.accelerator.scenes import run_script
from tests.integrations import scripts
path, out, library, kind, adopt = json.loads(sys.argv[1])
stages = {"zero2": {"zero_optimization": {"stage": 2}}, "zero3": {}}
launched = scripts.fsdp2() if kind == "fsdp2" else scripts.zero3(Path(out, "config"), **stages[kind])
found = run_script(Path(path), Path(out), library, launched, adopt)
if os.environ["RANK"] == "0":
    Path(out, "found.json").write_text(json.dumps({key: found[key] for key in ("losses", "norms")}))
"""


def adoption(path: Path, folder: Path, size: int, library: str, kind: str) -> Result:
    """A script over the Trainer or accelerate, as it is and inside ``zerostart.enable()``."""
    found = {}
    for name, adopt in (("stock", None), ("ours", {})):
        out = folder / name
        out.mkdir()
        (out / "script.py").write_text(ADOPTED)
        given = json.dumps([str(path), str(out), library, kind, adopt])
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        done = subprocess.run(
            [sys.executable, *launch, str(out / "script.py"), given],
            env={k: v for k, v in os.environ.items() if k not in LAUNCHED},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        found[name] = json.loads((out / "found.json").read_text())
    pairs = [far(found["ours"][key], found["stock"][key]) for key in ("losses", "norms")]
    return {**found, "wrong": [one for pair in pairs for one in pair]}


def beside_the_host(folder: Path, commands: Sequence[str], size: int, words: Sequence[str]) -> Result:
    """Losses of ``run.yaml`` on accelerators and on the host."""
    losses: dict[bool, list[float]] = {}
    result: Result = {"seconds": {}}
    for on_host in (False, True):
        out = "host" if on_host else "out"
        for name in commands:
            start = time.perf_counter()
            own = [*words, f"output.directory={out}", "--nproc", str(size)]
            command(folder, [name, "run.yaml", *own], on_host)
            result["seconds"][f"{name} in {out}"] = time.perf_counter() - start
        lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
        losses[on_host] = [line["loss"] for line in lines if "loss" in line]
    return {
        **result,
        "losses": losses[False],
        "host_losses": losses[True],
        "wrong": far(losses[False], losses[True]),
    }


def command(folder: Path, words: Sequence[str], on_host: bool) -> None:
    """Run a command of zerostart; raises RuntimeError with what it said, if it fails."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}
    own = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    done = subprocess.run(
        [sys.executable, "-c", "from zerostart.cli import main; main()", *words],
        cwd=folder,
        env={**own, **(hidden if on_host else {})},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"zerostart {words[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )


# --- The list.


@dataclass(frozen=True)
class Check:
    """``source``: the checkpoint that is made for it. ``grouped``: whether its ranks have a process group."""

    name: str
    source: str
    function: Callable[..., Result]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = True
    tiny: bool = False
    most: int = 8  # ranks


#: Sizes of a Qwen3; 21 layers of it with a head of its own are 3.4 GB in bf16.
QWEN3: Result = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
BATCH: Result = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
}


def checks() -> Iterator[Check]:
    """Most telling first."""

    def deepspeed(stage: int, **zero: Any) -> Result:
        return {
            "engine": "deepspeed",
            "stage": stage,
            "config": {**BATCH, "zero_optimization": {"stage": stage, **zero}},
        }

    yield Check("fsdp2 3", "qwen3", verbs, {"engine": "fsdp2", "stage": 3}, tiny=True)
    yield Check("deepspeed 3", "qwen3", verbs, deepspeed(3), tiny=True)
    yield Check("rates", "qwen3", rates, tiny=True)
    yield Check("sums", "qwen3", sums)
    yield Check("races", "qwen3", races, tiny=True)
    for transport in ("within", "shared_memory"):
        yield Check(f"refit {transport}", "qwen3", refit, {"transport": transport})
        yield Check(f"large refit {transport}", "qwen3", refit, {"transport": transport, "layers": 21})
    yield Check("train from YAML, fsdp2", "qwen3", train_from_yaml, {"engine": "fsdp2"}, grouped=False)
    for stage in (2, 1, 0):
        yield Check(f"deepspeed {stage}", "qwen3", verbs, deepspeed(stage))
        yield Check(f"fsdp2 {stage}", "qwen3", verbs, {"engine": "fsdp2", "stage": stage})
    yield Check("fsdp2 offload", "qwen3", verbs, {"engine": "fsdp2", "stage": 3, "config": "offload"})
    on_host = {"device": "cpu", "pin_memory": True}
    yield Check(
        "deepspeed 3 offload", "qwen3", verbs, deepspeed(3, offload_param=on_host, offload_optimizer=on_host)
    )
    yield Check("deepspeed 2 offload", "qwen3", verbs, deepspeed(2, offload_optimizer=on_host))
    for stage in (3, 2):
        yield Check(f"alignment of gpt_oss, deepspeed {stage}", "gpt_oss", aligned, {"stage": stage})
    for name in ("qwen3_moe", "mixtral", "gpt_oss"):
        yield Check(f"fsdp2 {name}", name, verbs, {"engine": "fsdp2", "stage": 3})
        yield Check(f"deepspeed {name}", name, verbs, deepspeed(3))
    for engine in ("fsdp2", "deepspeed"):
        yield Check(f"elsewhere from {engine}", "qwen3", elsewhere, {"engine": engine})
        yield Check(f"diffusion {engine}", "pipeline:flux", diffusion, {"engine": engine})
        yield Check(f"large {engine}", "config:qwen3_moe_3.4gb", large, {"engine": engine})
        yield Check(f"compiled {engine}", "qwen3", compiled, {"engine": engine})
    yield Check(
        "train from YAML, deepspeed", "qwen3", train_from_yaml, {"engine": "deepspeed"}, grouped=False
    )
    for library, kind in (
        ("trainer", "fsdp2"),
        ("trainer", "zero3"),
        ("accelerate", "zero2"),
        ("peft", "fsdp2"),
    ):
        values = {"library": library, "kind": kind}
        yield Check(f"enable() under {library}, {kind}", "qwen3", adoption, values, grouped=False)
    flux = "LoRA of FLUX from YAML"
    yield Check(flux, "pipeline:flux", diffusion_from_yaml, {"engine": "fsdp2"}, grouped=False)
    yield Check("larger fsdp2", "config:qwen3_16gb", large, {"engine": "fsdp2"})
    yield Check("fused", "qwen3", fused)
    yield Check("DeepSpeed's FusedAdam", "qwen3", deepspeeds_adam, {"offload": False})
    yield Check("DeepSpeed's CPUAdam", "qwen3", deepspeeds_adam, {"offload": True})


# --- Running them.

#: What a launcher sets, and commands that launch ranks of their own must not find.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def kind() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None, "an accelerator is here"
    return device.type


def own_device() -> torch.device:
    return torch.device(kind(), int(os.environ["LOCAL_RANK"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks on an accelerator.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.jsonl")
    parser.add_argument(
        "--scratch", type=Path, help="where checkpoints are made; default: a temporary folder"
    )
    parser.add_argument("--ranks", help="numbers of ranks; default: 1, 2, 4, 8 as far as there are devices")
    parser.add_argument("--only", help="names of checks, with ';' between them")
    parser.add_argument("--list", action="store_true", help="their names, and nothing else")
    parser.add_argument("--minutes", type=float, default=20, help="for one number of ranks")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one check")
    parser.add_argument("--tiny", action="store_true", help="a dry run: a few checks, on tiny models")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a rank of one check
    options = parser.parse_args()
    if options.one:
        one_rank(**json.loads(options.one))
        return
    chosen = [check for check in checks() if check.tiny or not options.tiny]
    if options.only:
        names = options.only.split(";")
        chosen = [check for check in checks() if check.name in names]
        if unknown := set(names) - {check.name for check in chosen}:
            parser.error(f"no check has the name {sorted(unknown)[0]!r}; --list shows all")
    if options.list:
        print("\n".join(check.name for check in chosen))
        return
    if not torch.accelerator.is_available():
        sys.exit("no accelerator here")
    count = torch.accelerator.device_count()
    ranks = [int(n) for n in options.ranks.split(",")] if options.ranks else [1, 2, 4, 8]
    if min(ranks) > count:
        parser.error(f"--ranks {options.ranks}, and devices are {count}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    failed = left_out = 0
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch, options.out.open("w") as out:
        write(out, {"facts": facts(count)})
        for size in (n for n in ranks if n <= count):
            end = time.monotonic() + 60 * options.minutes
            for check in chosen:
                begun = time.monotonic()
                if begun > end:
                    result: Result = {"left_out": f"{options.minutes:g} minutes had passed"}
                else:
                    result = run(check, size, Path(scratch), options.limit)
                failed += bool(result.get("error") or result.get("wrong"))
                left_out += "left_out" in result
                line = {"check": check.name, "ranks": size, **result}
                write(out, {**line, "check_seconds": round(time.monotonic() - begun, 1)})
    print(f"{failed} failed, {left_out} left out")
    sys.exit(1 if failed else 0)


def facts(count: int) -> Result:
    """What the figures were taken on; nothing is begun on a device here."""
    found: Result = {"accelerator": kind(), "devices": count, "python": platform.python_version()}
    for library in ("torch", "transformers", "deepspeed", "accelerate", "diffusers"):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = None
    return found


def write(out: Any, line: Result) -> None:
    text = json.dumps(line)
    out.write(text + "\n")
    out.flush()
    os.fsync(out.fileno())
    print(text, flush=True)


def run(check: Check, size: int, scratch: Path, limit: float) -> Result:
    """One check, on ranks of its own; whatever becomes of them."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        path = checkpoint(check.source, scratch)
        folder = Path(tempfile.mkdtemp(dir=scratch))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        processes = size if check.grouped else 1
        one = {"name": check.name, "path": str(path), "folder": str(folder), "size": size, "limit": limit}
        common = {**environment(), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(processes):
            with (folder / f"log.{rank}").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, __file__, "--one", json.dumps(one)],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                        stdout=log,
                        stderr=log,
                    )
                )
        return awaited(started, folder, limit)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):  # also what it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment() -> dict[str, str]:
    """Of a process that finds this checkout, whatever its working directory."""
    paths = [*(str(ROOT / name) for name in ("src", ".")), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def awaited(started: Sequence[subprocess.Popen[bytes]], folder: Path, limit: float) -> Result:
    """What the ranks have written, or why they have not; not all need to have ended."""
    end = time.monotonic() + limit
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if any(process.returncode for process in started):
            end = min(end, time.monotonic() + GRACE)
        time.sleep(0.05)
    codes = [process.returncode for process in started]
    found = sorted(folder.glob("result.*"), key=lambda file: int(file.suffix[1:]))
    results: list[Result] = [json.loads(file.read_text()) for file in found]
    # Any rank's failure is the check's; else the first rank's figures are.
    failed = [result for result in results if result.get("error")]
    if not failed and codes == [0] * len(started):
        return {**results[0], "wrong": [one for result in results for one in result.get("wrong", [])]}
    said = "\n".join(
        (folder / f"log.{rank}").read_text(errors="replace")[-1500:] for rank in range(len(started))
    )
    ended = f"ended with {codes}" if any(codes) else f"not done after {limit:g} s"
    return {"error": failed[0]["error"] if failed else ended, "log": said}


def checkpoint(source: str, scratch: Path) -> Path:
    """Made in a process of its own, for it may fail as well."""
    path = scratch / source.replace(":", "-")
    if not path.exists():
        command = [sys.executable, __file__, "--one", json.dumps({"make": source, "path": str(path)})]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
        if done.returncode:
            raise RuntimeError(f"no checkpoint of {source}: {done.stderr[-1000:]}")
    return path


def made(source: str, path: Path) -> None:
    from zerostart.models.synth import synthesise

    if source.startswith("pipeline:"):
        from tests.integrations.pipelines.tiny_pipelines import make_pipeline

        make_pipeline(source.removeprefix("pipeline:"), path)
    elif source.startswith("config:"):
        synthesise(str(CONFIGS / f"{source.removeprefix('config:')}.json"), path)
    else:
        synthesise(source, path, size="tiny", dtype="float32")


def is_absent(error: Exception) -> bool:
    """Whether a library is not installed that a check needs; what is in this checkout is always there."""
    own = ("zerostart", "tests", "benchmarks")
    return isinstance(error, ModuleNotFoundError) and (error.name or own[0]).partition(".")[0] not in own


def one_rank(
    path: str, name: str = "", folder: str = "", size: int = 1, limit: float = 0, make: str = ""
) -> None:
    """Body of a rank; or of the process that makes a checkpoint."""
    if make:
        made(make, Path(path))
        return
    faulthandler.dump_traceback_later(max(1.0, limit - 5))  # into its log: where it is when it hangs
    check = next(check for check in checks() if check.name == name)
    values: dict[str, Any] = dict(check.arguments)
    if values.get("config") == "offload":
        from torch.distributed.fsdp import CPUOffloadPolicy

        values["config"] = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    try:
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        if check.grouped:
            dist.init_process_group(f"cpu:gloo,{kind()}:{dist.get_default_backend_for_device(kind())}")
        else:
            values["size"] = size
        result = check.function(Path(path), Path(folder), **values)
    except Exception as error:
        result = {"left_out" if is_absent(error) else "error": traceback.format_exc()[-2000:]}
    Path(folder, f"result.{os.environ['RANK']}").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(1 if result.get("error") else 0)


if __name__ == "__main__":
    main()
