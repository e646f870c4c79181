"""Check the report of a load and `full_tensors` on real ranks."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.identity.parallel import Layout, Training
from tests.parity import Trace, batches, checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints, minilm_path
from zerostart import errors
from zerostart.distributed.machine import seconds_since_start
from zerostart.live.model import _first_step
from zerostart.live.report import Report

ENGINES = ("deepspeed", "fsdp2")
PHASES = ("plan", "compile", "build", "read")
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_report(engine: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe", torch.bfloat16, sharded=True)
    for text, report in run_ranks(report_of_load, 2, path, engine):
        for name in ("missing", "unexpected", "mismatched", "initialised"):
            assert list(report[name]) == []
        assert "model.layers.0.mlp.experts.gate_up_proj" in report["converted"]
        assert report["phases"].keys() == {*PHASES, "total"}
        assert all(seconds >= 0 for seconds in report["phases"].values())
        assert sum(report["phases"][phase] for phase in PHASES) <= report["phases"]["total"] * 1.001
        assert report["start_seconds"] > 0
        assert report["read_bytes"] > 0
        assert report["peak_device_bytes"] == 0
        assert isinstance(report["peak_host_bytes"], int)
        assert len(text.splitlines()) > 2
        for phase in PHASES:
            assert phase in text


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_report_has_the_time_of_the_first_step(engine: str, folder: Path) -> None:
    path = checkpoint("olmo2", folder)
    for before, after, age in run_ranks(report_of_steps, 2, path, Layout(engine)):
        assert before.first_step_seconds == 0
        assert before.start_seconds < after.first_step_seconds < age
        assert "first optimizer step ended" in str(after)
        assert "first optimizer step" not in str(before)


def test_report_of_a_model_that_was_not_loaded() -> None:
    with pytest.raises(zerostart.ZerostartError):
        zerostart.report(nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_reads_only_its_bytes_as_counted_by_the_kernel(engine: str) -> None:
    size = (minilm_path() / "model.safetensors").stat().st_size
    for counted, report in run_ranks(load_and_count, 2, minilm_path(), engine):
        assert report["read_bytes"] <= 1.01 * size / 2
        assert counted <= 1.01 * size / 2
        assert report["read_bytes"] <= counted


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_memory_is_bounded(engine: str) -> None:
    """Cast MiniLM to bf16: the peak is the shard and the limit for staging."""
    size = (minilm_path() / "model.safetensors").stat().st_size
    options = {"memory_limit": 4 * MIB, "dtype": torch.bfloat16}
    for _, report in run_ranks(report_of_load, 2, minilm_path(), engine, options):
        shard = size // 2 // 2
        assert shard * 0.9 < report["peak_host_bytes"] < shard + 4 * MIB + 24 * MIB  # 24 MiB for Python


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_full_tensors(engine: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3")
    first, second, third = run_ranks(full_tensors_of, 3, path, engine)
    expected = first["expected"]
    for result in (first, second, third):
        assert result["names"] == list(expected)  # the unsharded model's names in order, tied ones too
        assert result["all"] == expected
        assert result["types"] == {"cpu", torch.float32}
        assert isinstance(result["error"], errors.ConfigError)
    assert first["on rank 0"] == expected
    assert first["on rank 2"] == dict.fromkeys(expected)
    assert second["on rank 0"] == second["on rank 2"] == dict.fromkeys(expected)
    assert third["on rank 2"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_without_a_process_group(engine: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.float32)
    losses = run_ranks(loss_without_group, 1, path, engine, process_group=False)[0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def report_of_load(
    path: Path, engine: str, options: dict[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    model = zerostart.load(path, engine=engine, progress=False, **(options or {}))
    report = zerostart.report(model)
    names = ("missing", "unexpected", "mismatched", "initialised", "converted", "phases")
    names += ("start_seconds", "read_bytes", "peak_host_bytes", "peak_device_bytes")
    assert dataclasses.is_dataclass(report)
    return str(report), {name: getattr(report, name) for name in names}


def report_of_steps(path: Path, layout: Layout) -> tuple[Report, Report, float]:
    _first_step.cache_clear()  # earlier tests in this process have taken steps
    training, trace, (first, second, *_) = Training(path, layout), Trace(), batches(1)
    before = zerostart.report(training.model)
    training.step(first[0], trace)
    after = zerostart.report(training.model)
    training.step(second[0], trace)
    assert zerostart.report(training.model) == after
    training.close()
    return before, after, seconds_since_start()


def load_and_count(path: Path, engine: str) -> tuple[int, dict[str, Any]]:
    report_of_load(path, engine)  # so that imports are not counted
    gc.collect()
    before = bytes_read_so_far()
    report = report_of_load(path, engine)[1]
    return bytes_read_so_far() - before, report


def bytes_read_so_far() -> int:
    line = next(x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar"))
    return int(line.split()[1])


def full_tensors_of(path: Path, engine: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(path).state_dict()
    model = zerostart.load(path, engine=engine, progress=False)
    everywhere = list(zerostart.full_tensors(model, rank=None))
    result: dict[str, Any] = {
        "expected": {name: tensor.tolist() for name, tensor in whole.items()},
        "names": [name for name, _ in everywhere],
        "all": {name: tensor.tolist() for name, tensor in everywhere},
        "types": {kind for _, t in everywhere for kind in (t.device.type, t.dtype)},
        "on rank 0": tensors_as_lists(zerostart.full_tensors(model)),
        "on rank 2": tensors_as_lists(zerostart.full_tensors(model, rank=2)),
    }
    try:
        tensors_as_lists(zerostart.full_tensors(model, rank=3))
    except errors.ZerostartError as error:
        result["error"] = error
    return result


def tensors_as_lists(pairs: Any) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.tolist() for name, tensor in pairs}


def loss_without_group(path: Path, engine: str) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM

    assert not dist.is_initialized()
    tokens = torch.arange(3, 35).view(2, 16)
    plain = AutoModelForCausalLM.from_pretrained(path)
    expected = plain(input_ids=tokens, labels=tokens).loss.item()
    model: Any = zerostart.load(path, engine=engine, progress=False)
    if engine == "deepspeed":
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        model, *_ = deepspeed.initialize(model=model, config=config)
        model.eval()
    return model(input_ids=tokens, labels=tokens).loss.item(), expected
