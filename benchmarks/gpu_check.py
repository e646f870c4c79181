"""Checks for an accelerator: `make gpu-check`, or plain python with PYTHONPATH=src.

    python benchmarks/gpu_check.py [--out FILE] [--scratch DIR] [--ranks 1,2,4,8] [--only NAME;...] [--list]
                                   [--minutes 20] [--limit 150] [--tiny]

Each check runs in fresh processes, one for each rank, and writes one line of JSON. A check that fails, dies
or hangs does not stop the others: at its time limit it is killed, and its line has the stacks of its
threads. No check needs the network. For each number of ranks, checks that have not begun after ``--minutes``
are left out.

Losses are compared with plain transformers and torch on the host in fp32, within ``TOLERANCE``. Loaded, saved
and resumed weights must be equal bit for bit. A line with ``wrong`` or ``error`` has failed; ``left_out`` is
the reason why this machine cannot run a check.

``--tiny`` runs a few quick checks on tiny models, as the tests do on their pretend accelerator.
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
#: Relative difference of fp32 losses from the host's, as kernels sum in another order. TF32 is off.
TOLERANCE = 1e-4
#: Difference of pictures, relative to the largest value; some dozen layers run several times.
PICTURE_TOLERANCE = 1e-2
#: Seconds that the other ranks of a check get after the first failure.
GRACE_SECONDS = 15
LEARNING_RATE, STEPS = 1e-3, 3
Result = dict[str, Any]


# --- Checks. Each runs on every rank of a group, with a checkpoint's directory and an empty directory.


def check_verbs(
    path: Path, folder: Path, engine: str, stage: int, config: Any = None, **options: Any
) -> Result:
    """Load, gather, train, save and resume; compare each with transformers."""
    from transformers import AutoModelForCausalLM

    import zerostart

    start, device = time.perf_counter(), own_device()
    model = zerostart.load(
        path, engine=engine, zero_stage=stage, engine_config=config, progress=False, **options
    )
    report = zerostart.report(model)
    result: Result = {"seconds": report.phases, "read_bytes": report.read_bytes}
    result |= {"peak_device_bytes": report.peak_device_bytes, "peak_host_bytes": report.peak_host_bytes}
    plain = AutoModelForCausalLM.from_pretrained(path)
    expected = plain.state_dict()
    lines = differing_names(dict(zerostart.full_tensors(model, rank=None)), expected)
    with zerostart.gathered(model, "model.norm.weight", modifier_rank=0) as whole:
        if dist.get_rank() == 0:
            whole.mul_(2)
    with zerostart.gathered(model, "model.norm.weight", modifier_rank=0) as whole:
        if not torch.equal(whole.cpu(), expected["model.norm.weight"] * 2):
            lines.append("a change in gathered()")
        if dist.get_rank() == 0:
            whole.div_(2)
    runner, optimizer = prepare_training(model, engine, config)
    losses = [step(runner, optimizer, device) for _ in range(STEPS)]
    result |= {"losses": losses, "host_losses": plain_losses(plain)}
    lines += differing_losses(losses, result["host_losses"])
    if dist.get_world_size() == 1:
        result["stock_losses"] = plain_losses(AutoModelForCausalLM.from_pretrained(path).to(device), device)
    zerostart.save(runner, folder / "saved")
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    lines += [f"{n}, saved" for n in differing_names(dict(zerostart.full_tensors(runner, rank=None)), saved)]
    optimizer_option = {} if engine == "deepspeed" else {"optimizer": optimizer}
    before = zerostart.digest(runner)
    zerostart.save_state(folder / "state", runner, **optimizer_option)
    save_start = time.perf_counter()
    handle = zerostart.save_state(folder / "background", runner, wait=False, **optimizer_option)
    result["pause_seconds"] = time.perf_counter() - save_start
    after = step(runner, optimizer, device)
    handle.wait()
    result["background_seconds"] = handle.seconds
    for state in ("state", "background"):
        zerostart.load_state(folder / state, runner, **optimizer_option)
        if zerostart.digest(runner) != before:
            lines.append(f"values loaded from {state}")
        if (repeated := step(runner, optimizer, device)) != after:
            lines.append(f"the step after loading {state}: {repeated} for {after}")
    return {**result, "wrong": lines, "all_seconds": time.perf_counter() - start}


def prepare_training(model: Any, engine: str, config: Any) -> tuple[Any, Any]:
    """Return the model or DeepSpeed engine, and its optimizer."""
    model.train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4)
    if engine != "deepspeed":
        return model, optimizer
    import deepspeed

    runner, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return runner, optimizer


def step(model: Any, optimizer: Any, device: torch.device, batch: int = 0) -> float:
    """Train one step on synthetic tokens; return its loss."""
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


def plain_losses(model: Any, device: torch.device | None = None) -> list[float]:
    """Train with plain torch on ``device``, by default the host; return the losses."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4)
    return [step(model, optimizer, device or torch.device("cpu")) for _ in range(STEPS)]


def differing_names(actual: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """List names that are missing on one side, or have other bits."""
    names = actual.keys() & expected.keys()
    wrong = [n for n in names if not torch.equal(actual[n], expected[n])]
    return sorted(actual.keys() ^ expected.keys()) + wrong


def differing_losses(actual: Sequence[float], expected: Sequence[float]) -> list[str]:
    pairs = zip(actual, expected, strict=True)
    # Written with `not`, because comparisons with NaN are false.
    return [
        f"loss {n}: {a} for {b}" for n, (a, b) in enumerate(pairs) if not abs(a - b) <= TOLERANCE * abs(b)
    ]


def check_rates(path: Path, folder: Path, megabytes: int = 64) -> Result:
    """Measure copies from torch's and our page-locked memory, and from pageable memory."""
    from zerostart.transfer import page_locked

    nbytes, device = megabytes * MiB, own_device()
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    hosts = {
        "torch's page-locked": torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True),
        "registered": page_locked(nbytes, device),
        "pageable": torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
    }
    result: Result = {"device": str(torch.get_device_module(device).get_device_name(device))}
    result["registered_is_pinned"] = hosts["registered"].is_pinned()
    for name, host in hosts.items():
        for way, (to, source) in {"to": (on_device, host), "from": (host, on_device)}.items():
            rate = copy_rate(to, source) / 1e9
            result[f"{name}, {way} the device"] = f"{rate:.1f} GB/s"
    return result


def check_digests(path: Path, folder: Path, megabytes: int = 256) -> Result:
    """Compare digests on the device with the host's, for many pieces; measure their rate."""
    from zerostart.checkpoint.digest import Digests

    device, lines = own_device(), []
    torch.manual_seed(0)
    data = torch.randint(-128, 128, (70 * MiB,), dtype=torch.int8)
    data[: 2 * MiB] = -128
    on_device = data.to(device)

    def digest(tensor: torch.Tensor, cuts: Sequence[int]) -> str:
        digests = Digests([("t", "I8", tensor.shape)])
        for low, high in itertools.pairwise(cuts):
            digests.add("t", low, tensor[low:high])
        return digests.summed()["t"]

    expected = digest(data, [0, data.numel()])
    cut_lists = [(n * 1024,) for n in range(1, 40)] + [(5, 1000, 1003), (1, 20_000, 3 * MiB), (MiB + 1024,)]
    for cuts in cut_lists:
        bounds = [0, *cuts, data.numel()]
        if digest(on_device, bounds) != expected:
            lines.append(f"the digest of pieces that end at {cuts}")
    square, by_device = data[: 64 * MiB].view(8192, 8192), {}
    for name, tensor in (("host", square), ("device", square.to(device))):
        digests = Digests([("t", "I8", tensor.shape)])
        for low, high in ((0, 300), (300, 4396), (4396, 8192)):
            digests.add_rows("t", low, 8192, tensor[:, low:high])
        by_device[name] = digests.summed()["t"]
    lines += [] if by_device["device"] == by_device["host"] else ["the digest of columns"]
    torch.use_deterministic_algorithms(True)
    try:
        if digest(on_device, [0, data.numel()]) != expected:
            lines.append("the digest in deterministic mode")
    finally:
        torch.use_deterministic_algorithms(False)
    zeros = torch.zeros(megabytes * MiB, dtype=torch.int8, device=device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        digest(zeros, range(0, zeros.numel() + 1, 8 * MiB))
        times.append(time.perf_counter() - start)
    return {"GB_per_second": zeros.numel() / min(times) / 1e9, "wrong": lines}


def copy_rate(to: torch.Tensor, source: torch.Tensor, times: int = 4) -> float:
    """Return the rate of a non-blocking copy, in bytes a second."""
    device = source.device if to.device.type == "cpu" else to.device
    to.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        to.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(device)
    return times * to.nbytes / (time.perf_counter() - start)


def check_large_load(path: Path, folder: Path, engine: str) -> Result:
    """Measure loads of a large checkpoint, stock loads, and a raw copy.

    The checkpoint has just been written, so it is in the page cache if it fits.
    """
    from transformers import AutoModelForCausalLM

    import zerostart
    from zerostart.transfer import page_locked

    device, result = own_device(), Result()
    for turn in ("first", "second"):
        before = torch.accelerator.memory_allocated(device)
        model = zerostart.load(path, engine=engine, progress=False)
        report = zerostart.report(model)
        result[turn] = {"seconds": report.phases, "peak_device_bytes": report.peak_device_bytes}
        result[turn] |= {"peak_host_bytes": report.peak_host_bytes, "read_bytes": report.read_bytes}
        result[turn]["device_bytes"] = torch.accelerator.memory_allocated(device) - before
        read = report.read_bytes
        del model
        free_memory()
    rate = copy_rate(torch.empty(256 * MiB, dtype=torch.uint8, device=device), page_locked(256 * MiB, device))
    result["raw_copy_seconds"] = read / rate
    if dist.get_world_size() == 1:
        for name, onto in (("to the device", {}), ("with a device map", {"device_map": {"": device}})):
            start = time.perf_counter()
            whole = AutoModelForCausalLM.from_pretrained(path, **onto).to(device)
            torch.accelerator.synchronize(device)
            result[f"stock, {name}, seconds"] = time.perf_counter() - start
            del whole
            free_memory()
    return result


def free_memory() -> None:
    gc.collect()
    torch.accelerator.empty_cache()


def check_races(path: Path, folder: Path, turns: int = 4) -> Result:
    """Load, save and offload on a busy device, to detect missing waits."""
    import zerostart

    device, lines = own_device(), list[str]()
    first: Any = None
    for turn in range(turns):
        occupy(device)
        model = zerostart.load(path, engine="fsdp2", progress=False)
        digest = zerostart.digest(model)
        first = first or digest
        if digest != first:
            lines.append(f"load {turn}")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        step(model, optimizer, device)
        before = zerostart.digest(model)
        occupy(device)
        handle = zerostart.save_state(folder / str(turn), model, optimizer=optimizer, wait=False)
        step(model, optimizer, device)
        handle.wait()
        zerostart.load_state(folder / str(turn), model, optimizer=optimizer)
        if zerostart.digest(model) != before:
            lines.append(f"state {turn}")
        if (gradient := checkpointed_gradient(device, True)) != checkpointed_gradient(device, False):
            lines.append(f"activations {turn}: a gradient of {gradient}")
    return {"wrong": lines}


def checkpointed_gradient(device: torch.device, offload: bool) -> float:
    """Return a gradient through three checkpointed functions, with or without offloading."""
    import zerostart

    weight = torch.linspace(-1, 1, 256 * 256, device=device).view(256, 256).requires_grad_()
    x = torch.linspace(0, 1, 256 * 256, device=device).view(256, 256).requires_grad_()
    y: Any = x
    for _ in range(3):
        if offload:
            occupy(device)
        y = zerostart.gradient_checkpoint(lambda t: torch.tanh(t @ weight), y, offload=offload)
    y.sum().backward()
    assert weight.grad is not None
    return float(weight.grad.double().sum().item())


def check_other_engine(path: Path, folder: Path, engine: str) -> Result:
    """Load trained weights on both engines."""
    import zerostart

    other_engine = "fsdp2" if engine == "deepspeed" else "deepspeed"
    config = {**BATCH, "zero_optimization": {"stage": 3}} if engine == "deepspeed" else None
    model = zerostart.load(path, engine=engine, engine_config=config, progress=False)
    runner, optimizer = prepare_training(model, engine, config)
    step(runner, optimizer, own_device())
    expected, lines = zerostart.digest(runner), list[str]()
    zerostart.save(runner, folder / "saved")
    for way in (engine, other_engine):
        loaded = zerostart.load(folder / "saved", engine=way, zero_stage=3, progress=False)
        if zerostart.digest(loaded) != expected:
            lines.append(f"saved weights loaded on {way}")
    return {"wrong": lines, "verified_tensors": zerostart.verify(folder / "saved").tensors}


def occupy(device: torch.device) -> None:
    """Queue some tenths of a second of work on the device."""
    if device.type == "cuda":
        torch.cuda._sleep(500_000_000)
    else:
        torch.ones(64, 64, device=device).mul_(2)


def check_fused_adam(path: Path, folder: Path) -> Result:
    """Compare torch's fused AdamW on FSDP2 with the host."""
    from transformers import AutoModelForCausalLM

    import zerostart

    device = own_device()
    model: Any = zerostart.load(path, engine="fsdp2", progress=False)
    options = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4, **options)
    losses = [step(model.train(), optimizer, device) for _ in range(STEPS)]
    expected = plain_losses(AutoModelForCausalLM.from_pretrained(path))
    return {"losses": losses, "host_losses": expected, "wrong": differing_losses(losses, expected)}


def check_deepspeed_adam(path: Path, folder: Path, offload: bool) -> Result:
    """Train with DeepSpeed's FusedAdam or CPUAdam, which it compiles with nvcc or g++."""
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
    expected = plain_losses(AutoModelForCausalLM.from_pretrained(path))
    optimizer_kind = type(getattr(runner.optimizer, "optimizer", runner.optimizer)).__name__
    return {
        "optimizer": optimizer_kind,
        "losses": losses,
        "host_losses": expected,
        "wrong": differing_losses(losses, expected),
    }


def check_compile(path: Path, folder: Path, engine: str) -> Result:
    """Train the loaded model under torch.compile."""
    from transformers import AutoModelForCausalLM

    import zerostart

    device = own_device()
    if device.type != "cuda":
        return {"left_out": f"torch.compile has no kernels for {device.type}"}
    config = {**BATCH, "zero_optimization": {"stage": 3}} if engine == "deepspeed" else None
    model: Any = zerostart.load(path, engine=engine, engine_config=config, progress=False)
    runner, optimizer = prepare_training(model, engine, config)
    if engine == "deepspeed":
        runner.compile()
    else:
        runner = torch.compile(runner)
    losses = [step(runner, optimizer, device) for _ in range(STEPS)]
    expected = plain_losses(AutoModelForCausalLM.from_pretrained(path))
    return {"losses": losses, "host_losses": expected, "wrong": differing_losses(losses, expected)}


def check_alignment(path: Path, folder: Path, stage: int) -> Result:
    """Train gpt_oss on DeepSpeed in bf16; ``torch._grouped_mm`` needs experts aligned to 16 bytes.

    On one rank stock DeepSpeed's views of its buffer are not aligned: a parameter of four elements precedes
    the experts.
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
        zero_config = HfDeepSpeedConfig(config) if name == "stock" and stage == 3 else None
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
            runner, optimizer = prepare_training(model, "deepspeed", config)
            remainders = watch_expert_addresses(model)
            result[name] = {"losses": [step(runner, optimizer, own_device()) for _ in range(2)]}
            result[name]["bytes_beside_16"] = sorted(remainders - {0})
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        del zero_config
        deepspeed.comm.barrier()
    return {**result, "wrong": ["ours does not train"] if "error" in result["ours"] else []}


def watch_expert_addresses(model: torch.nn.Module) -> set[int]:
    """Return a set that collects the experts' addresses modulo 16 in each forward."""
    remainders: set[int] = set()

    def record(module: torch.nn.Module, _: Any) -> None:
        remainders.update(p.data_ptr() % 16 for p in module.parameters(recurse=False) if p.dim() == 3)

    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.register_forward_pre_hook(record)
    return remainders


def check_pipeline(path: Path, folder: Path, engine: str) -> Result:
    """Compare a sharded pipeline's picture with diffusers' on the host."""
    import diffusers

    import zerostart

    device = own_device()

    def draw(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt"}
        output = pipe(
            prompt="a cat", generator=torch.Generator().manual_seed(3), max_sequence_length=12, **size
        )
        return torch.as_tensor(output[0]).cpu().float()

    placement = {"transformer": "shard", "vae": "replicate", "text_encoder": "offload"}
    pipe = zerostart.load_pipeline(path, placement, engine=engine, progress=False)
    start = time.perf_counter()
    actual = draw(pipe)
    seconds = time.perf_counter() - start
    expected = draw(diffusers.DiffusionPipeline.from_pretrained(str(path)))
    error = float((actual - expected).abs().max() / expected.abs().max())
    lines = [f"a picture, by {error:.1e}"] if not error <= PICTURE_TOLERANCE else []
    return {"device": str(device), "seconds": seconds, "off": error, "wrong": lines}


def check_refit(path: Path, folder: Path, transport: str, layers: int = 0) -> Result:
    """Push FSDP2's weights into an engine on the same devices.

    The engine's weights must equal its own load of a save. With ``layers``, use so many layers of a
    Qwen3-1.7B instead; the push itself compares their digests.
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
        model.to_empty(device=device)  # any values; random ones on the device are quick
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
    device_index = rank
    config_path.write_text(json.dumps({**sizes, "device": f"{device.type}:{device_index}"}))
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
            worker = workers.start(config_path, rank, size, target, served, LOCAL_RANK=str(device_index))
        with zerostart.refit(model, target, **options) as refitter:
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.data.to_local().mul_(-1.375)
                start = time.perf_counter()
                report = refitter.push()
                torch.accelerator.synchronize(device)
                seconds = {**report.phases, "whole": time.perf_counter() - start}
                result["pushes"].append({name: round(value, 4) for name, value in seconds.items()})
            result |= {"transport": report.transport, "bytes": report.owned_bytes, "untaken": report.untaken}
            result |= {"moved_bytes": report.moved_bytes, "peak_host_bytes": report.peak_host_bytes}
            result["peak_device_bytes"] = report.peak_device_bytes
        output = worker.communicate(timeout=60)[0] if worker is not None else "served 3"
    finally:
        if worker is not None:
            worker.kill()
    lines = [] if "served 3" in output else [f"a worker: {output[-500:]}"]
    if layers:
        source = torch.empty(256 * MiB, dtype=torch.uint8, device=device)
        targets = {"device": torch.empty_like(source), "host": torch.empty_like(source, device="cpu")}
        targets["host"] = targets["host"].pin_memory()
        return {
            **result,
            "GB_per_second": {name: copy_rate(to, source) / 1e9 for name, to in targets.items()},
        }
    zerostart.save(model, folder / "saved")
    expected = workers.loaded(sizes, rank, size, folder / "saved", torch.bfloat16)
    if engine is not None:
        actual = {name: tensor.cpu() for name, tensor in engine.state_dict().items()}
    else:
        actual = torch.load(served / f"tp{rank}-3.pt", map_location="cpu")
    return {**result, "wrong": lines + differing_names(actual, expected)}


# --- Checks that start commands of zerostart, in one process without a group.


def check_train(path: Path, folder: Path, size: int, engine: str) -> Result:
    """Compare ``zerostart train`` on a text, with background saves, with the host."""
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
    return compare_with_host(folder, ["train"], size, [])


def check_diffusion_train(path: Path, folder: Path, size: int, engine: str) -> Result:
    """Compare ``zerostart config``, ``cache`` and ``train`` of a FLUX LoRA with the host."""
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
    return compare_with_host(folder, ["cache", "train"], size, words)


ADOPTION_SCRIPT = """
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


def check_adoption(path: Path, folder: Path, size: int, library: str, setup: str) -> Result:
    """Run a script of the Trainer or accelerate, stock and with ``zerostart.enable()``."""
    results = {}
    for name, adopt in (("stock", None), ("ours", {})):
        out = folder / name
        out.mkdir()
        (out / "script.py").write_text(ADOPTION_SCRIPT)
        arguments = json.dumps([str(path), str(out), library, setup, adopt])
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        process = subprocess.run(
            [sys.executable, *launch, str(out / "script.py"), arguments],
            env={k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES},
            capture_output=True,
            text=True,
        )
        if process.returncode:
            raise RuntimeError(
                f"{name} ended with {process.returncode}: {(process.stdout + process.stderr)[-2000:]}"
            )
        results[name] = json.loads((out / "found.json").read_text())
    pairs = [differing_losses(results["ours"][key], results["stock"][key]) for key in ("losses", "norms")]
    return {**results, "wrong": [line for pair in pairs for line in pair]}


def compare_with_host(folder: Path, commands: Sequence[str], size: int, words: Sequence[str]) -> Result:
    """Compare the losses of ``run.yaml`` on accelerators with those on the host."""
    losses: dict[bool, list[float]] = {}
    result: Result = {"seconds": {}}
    for on_host in (False, True):
        out = "host" if on_host else "out"
        for name in commands:
            start = time.perf_counter()
            arguments = [*words, f"output.directory={out}", "--nproc", str(size)]
            command(folder, [name, "run.yaml", *arguments], on_host)
            result["seconds"][f"{name} in {out}"] = time.perf_counter() - start
        lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
        losses[on_host] = [line["loss"] for line in lines if "loss" in line]
    return {
        **result,
        "losses": losses[False],
        "host_losses": losses[True],
        "wrong": differing_losses(losses[False], losses[True]),
    }


def command(folder: Path, words: Sequence[str], on_host: bool) -> None:
    """Run a command of zerostart; raises RuntimeError with its output if it fails."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    process = subprocess.run(
        [sys.executable, "-c", "from zerostart.cli import main; main()", *words],
        cwd=folder,
        env={**inherited, **(hidden if on_host else {})},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        output = (process.stdout + process.stderr)[-2000:]
        raise RuntimeError(f"zerostart {words[0]} ended with {process.returncode}: {output}")


# --- The list.


@dataclass(frozen=True)
class Check:
    """A check on the checkpoint ``source``; with ``grouped`` its ranks have a process group."""

    name: str
    source: str
    function: Callable[..., Result]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = True
    tiny: bool = False


#: Sizes of a Qwen3; 21 layers with an untied head are 3.4 GB in bf16.
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
    """Yield the checks, the most important first."""

    def deepspeed(stage: int, **zero: Any) -> Result:
        return {
            "engine": "deepspeed",
            "stage": stage,
            "config": {**BATCH, "zero_optimization": {"stage": stage, **zero}},
        }

    yield Check("fsdp2 3", "qwen3", check_verbs, {"engine": "fsdp2", "stage": 3}, tiny=True)
    yield Check("deepspeed 3", "qwen3", check_verbs, deepspeed(3), tiny=True)
    yield Check("rates", "qwen3", check_rates, tiny=True)
    yield Check("sums", "qwen3", check_digests)
    yield Check("races", "qwen3", check_races, tiny=True)
    for transport in ("within", "shared_memory"):
        yield Check(f"refit {transport}", "qwen3", check_refit, {"transport": transport})
        yield Check(f"large refit {transport}", "qwen3", check_refit, {"transport": transport, "layers": 21})
    yield Check("train from YAML, fsdp2", "qwen3", check_train, {"engine": "fsdp2"}, grouped=False)
    for stage in (2, 1, 0):
        yield Check(f"deepspeed {stage}", "qwen3", check_verbs, deepspeed(stage))
        yield Check(f"fsdp2 {stage}", "qwen3", check_verbs, {"engine": "fsdp2", "stage": stage})
    yield Check("fsdp2 offload", "qwen3", check_verbs, {"engine": "fsdp2", "stage": 3, "config": "offload"})
    on_host = {"device": "cpu", "pin_memory": True}
    yield Check(
        "deepspeed 3 offload",
        "qwen3",
        check_verbs,
        deepspeed(3, offload_param=on_host, offload_optimizer=on_host),
    )
    yield Check("deepspeed 2 offload", "qwen3", check_verbs, deepspeed(2, offload_optimizer=on_host))
    for stage in (3, 2):
        yield Check(f"alignment of gpt_oss, deepspeed {stage}", "gpt_oss", check_alignment, {"stage": stage})
    for name in ("qwen3_moe", "mixtral", "gpt_oss"):
        yield Check(f"fsdp2 {name}", name, check_verbs, {"engine": "fsdp2", "stage": 3})
        yield Check(f"deepspeed {name}", name, check_verbs, deepspeed(3))
    for engine in ("fsdp2", "deepspeed"):
        yield Check(f"elsewhere from {engine}", "qwen3", check_other_engine, {"engine": engine})
        yield Check(f"diffusion {engine}", "pipeline:flux", check_pipeline, {"engine": engine})
        yield Check(f"large {engine}", "config:qwen3_moe_3.4gb", check_large_load, {"engine": engine})
        yield Check(f"compiled {engine}", "qwen3", check_compile, {"engine": engine})
    yield Check("train from YAML, deepspeed", "qwen3", check_train, {"engine": "deepspeed"}, grouped=False)
    for library, setup in (
        ("trainer", "fsdp2"),
        ("trainer", "zero3"),
        ("accelerate", "zero2"),
        ("peft", "fsdp2"),
    ):
        values = {"library": library, "setup": setup}
        yield Check(f"enable() under {library}, {setup}", "qwen3", check_adoption, values, grouped=False)
    flux = "LoRA of FLUX from YAML"
    yield Check(flux, "pipeline:flux", check_diffusion_train, {"engine": "fsdp2"}, grouped=False)
    yield Check("larger fsdp2", "config:qwen3_16gb", check_large_load, {"engine": "fsdp2"})
    yield Check("fused", "qwen3", check_fused_adam)
    yield Check("DeepSpeed's FusedAdam", "qwen3", check_deepspeed_adam, {"offload": False})
    yield Check("DeepSpeed's CPUAdam", "qwen3", check_deepspeed_adam, {"offload": True})


# --- Running them.

#: Variables of a launcher, which commands that launch ranks must not inherit.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def accelerator_kind() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None, "there is no accelerator"
    return device.type


def own_device() -> torch.device:
    return torch.device(accelerator_kind(), int(os.environ["LOCAL_RANK"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks on an accelerator.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.jsonl")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints; default: a temporary folder")
    parser.add_argument(
        "--ranks", help="numbers of ranks; default: those of 1, 2, 4, 8 that have enough devices"
    )
    parser.add_argument("--only", help="names of checks, separated by ';'")
    parser.add_argument("--list", action="store_true", help="print only the names of the checks")
    parser.add_argument("--minutes", type=float, default=20, help="for one number of ranks")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one check")
    parser.add_argument("--tiny", action="store_true", help="only a few quick checks, on tiny models")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a rank of one check
    options = parser.parse_args()
    if options.one:
        run_rank(**json.loads(options.one))
        return
    selected = [check for check in checks() if check.tiny or not options.tiny]
    if options.only:
        names = options.only.split(";")
        selected = [check for check in checks() if check.name in names]
        if unknown := set(names) - {check.name for check in selected}:
            parser.error(f"no check has the name {sorted(unknown)[0]!r}; --list shows all")
    if options.list:
        print("\n".join(check.name for check in selected))
        return
    if not torch.accelerator.is_available():
        sys.exit("no accelerator here")
    count = torch.accelerator.device_count()
    ranks = [int(n) for n in options.ranks.split(",")] if options.ranks else [1, 2, 4, 8]
    if min(ranks) > count:
        parser.error(f"--ranks {options.ranks}, but there are only {count} devices")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    failed = left_out = 0
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch, options.out.open("w") as out:
        write(out, {"facts": facts(count)})
        for size in (n for n in ranks if n <= count):
            end = time.monotonic() + 60 * options.minutes
            for check in selected:
                start = time.monotonic()
                if start > end:
                    result: Result = {"left_out": f"{options.minutes:g} minutes had passed"}
                else:
                    result = run(check, size, Path(scratch), options.limit)
                failed += bool(result.get("error") or result.get("wrong"))
                left_out += "left_out" in result
                line = {"check": check.name, "ranks": size, **result}
                write(out, {**line, "check_seconds": round(time.monotonic() - start, 1)})
    print(f"{failed} failed, {left_out} left out")
    sys.exit(1 if failed else 0)


def facts(count: int) -> Result:
    """Describe the machine and libraries, without initialising a device."""
    result: Result = {
        "accelerator": accelerator_kind(),
        "devices": count,
        "python": platform.python_version(),
    }
    for library in ("torch", "transformers", "deepspeed", "accelerate", "diffusers"):
        try:
            result[library] = version(library)
        except PackageNotFoundError:
            result[library] = None
    return result


def write(out: Any, line: Result) -> None:
    text = json.dumps(line)
    out.write(text + "\n")
    out.flush()
    os.fsync(out.fileno())
    print(text, flush=True)


def run(check: Check, size: int, scratch: Path, limit: float) -> Result:
    """Run one check on fresh ranks, and end them."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        path = checkpoint(check.source, scratch)
        folder = Path(tempfile.mkdtemp(dir=scratch))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        count = size if check.grouped else 1
        job = {"name": check.name, "path": str(path), "folder": str(folder), "size": size, "limit": limit}
        common = {**environment(), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(count):
            with (folder / f"log.{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, "--one", json.dumps(job)],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                        stdout=log,
                        stderr=log,
                    )
                )
        return wait_for_ranks(processes, folder, limit)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # also its child processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment() -> dict[str, str]:
    """Return an environment in which this checkout is importable from any directory."""
    paths = [*(str(ROOT / name) for name in ("src", ".")), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]], folder: Path, limit: float) -> Result:
    """Return the check's result, or an error with the ranks' logs."""
    end = time.monotonic() + limit
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.returncode for process in processes):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    codes = [process.returncode for process in processes]
    files = sorted(folder.glob("result.*"), key=lambda file: int(file.suffix[1:]))
    results: list[Result] = [json.loads(file.read_text()) for file in files]
    # A failure of any rank is the check's; otherwise the first rank's figures count.
    failed = [result for result in results if result.get("error")]
    if not failed and codes == [0] * len(processes):
        return {**results[0], "wrong": [text for result in results for text in result.get("wrong", [])]}
    logs = "\n".join(
        (folder / f"log.{rank}").read_text(errors="replace")[-1500:] for rank in range(len(processes))
    )
    reason = f"ended with {codes}" if any(codes) else f"not done after {limit:g} s"
    return {"error": failed[0]["error"] if failed else reason, "log": logs}


def checkpoint(source: str, scratch: Path) -> Path:
    """Write a checkpoint in a subprocess, because that may fail, too."""
    path = scratch / source.replace(":", "-")
    if not path.exists():
        command = [sys.executable, __file__, "--one", json.dumps({"make": source, "path": str(path)})]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
        if process.returncode:
            raise RuntimeError(f"no checkpoint of {source}: {process.stderr[-1000:]}")
    return path


def write_checkpoint(source: str, path: Path) -> None:
    from zerostart.models.synth import synthesise

    if source.startswith("pipeline:"):
        from tests.integrations.pipelines.tiny_pipelines import make_pipeline

        make_pipeline(source.removeprefix("pipeline:"), path)
    elif source.startswith("config:"):
        synthesise(str(CONFIGS / f"{source.removeprefix('config:')}.json"), path)
    else:
        synthesise(source, path, size="tiny", dtype="float32")


def is_absent(error: Exception) -> bool:
    """Return True for a missing library, False for a missing module of this checkout."""
    own = ("zerostart", "tests", "benchmarks")
    return isinstance(error, ModuleNotFoundError) and (error.name or own[0]).partition(".")[0] not in own


def run_rank(
    path: str, name: str = "", folder: str = "", size: int = 1, limit: float = 0, make: str = ""
) -> None:
    """Run one rank of a check, or write a checkpoint with ``make``."""
    if make:
        write_checkpoint(make, Path(path))
        return
    faulthandler.dump_traceback_later(max(1.0, limit - 5))  # stacks for the log of a hanging rank
    check = next(check for check in checks() if check.name == name)
    values: dict[str, Any] = dict(check.arguments)
    if values.get("config") == "offload":
        from torch.distributed.fsdp import CPUOffloadPolicy

        values["config"] = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    try:
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        if check.grouped:
            dist.init_process_group(
                f"cpu:gloo,{accelerator_kind()}:{dist.get_default_backend_for_device(accelerator_kind())}"
            )
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
