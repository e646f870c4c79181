"""Forecast masters, states, gradients and parameters against the tensors that real engines hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.loading.forecast.engines_memory import BASE_CONFIG, measure_deepspeed, measure_fsdp2
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.distributed.world import World
from zerostart.engines.forecast import Hardware
from zerostart.live.report import Clock
from zerostart.loading.forecast.memory import moments_of, optimizer_of, parameter_bytes
from zerostart.loading.forecast.reading import owned_by
from zerostart.loading.preparation import prepare
from zerostart.loading.request import Request

BF16 = {"bf16": {"enabled": True}}
HOST = {"device": "cpu", "pin_memory": False}


def forecast_components(
    path: Path, world_size: int, optimizer: str, **options: Any
) -> list[dict[str, dict[str, int]]]:
    """Return the components of each rank at the last moment of each phase.

    The highest moment would not do: for a model this small it may be any.
    """
    request = Request(path, **options)
    engine = request.resolve(world_size)
    model = prepare(request, engine, World(0, 1, None), Clock(), strict=False).built.model
    parallelism = engine.parallelism(model)
    placements = engine.placements(model, parallelism)
    ranks = range(world_size)
    numels = {name: own.numels for name, own in owned_by(model, placements, ranks).items()}
    held_bytes = parameter_bytes(model, placements, parallelism, ranks, numels)
    target = Hardware(accelerator=False, world_size=world_size)
    moments = moments_of(model, engine, placements, held_bytes, 0, optimizer_of(optimizer, None), target)
    last = {moment.phase: moment.on(target).host for moment in moments}
    shape = (world_size,)
    return [
        {p: {n: int(np.broadcast_to(v, shape)[r]) for n, v in sizes.items()} for p, sizes in last.items()}
        for r in ranks
    ]


@pytest.mark.parametrize(
    ("world_size", "half"), [(2, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_zero3_forecast_equals_the_engine(checkpoints: TinyCheckpoints, half: bool, world_size: int) -> None:
    path = checkpoints("qwen3", torch.bfloat16 if half else torch.float32)
    base = {**BASE_CONFIG, **(BF16 if half else {})}
    cases = [
        (3, {**base, "zero_optimization": {"stage": 3, **zero}}, optimizer)
        for zero, optimizer in (
            ({}, "adamw"),
            ({"offload_optimizer": HOST}, "adamw"),
            ({"offload_param": HOST}, "momentum"),
        )
    ]
    measured = run_ranks(measure_deepspeed, world_size, path, cases)
    for number, (_, config, optimizer) in enumerate(cases):
        forecasts = forecast_components(path, world_size, optimizer, engine_config=config)
        for forecast, results in zip(forecasts, measured, strict=True):
            sizes = results[number]
            assert forecast["step"]["optimizer state"] == sizes.pop("optimizer state")
            assert {name: forecast["initialize"][name] for name in sizes} == sizes


@pytest.mark.slow
@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
def test_zero12_forecast_equals_the_engine(checkpoints: TinyCheckpoints, half: bool) -> None:
    path = checkpoints("qwen3", torch.bfloat16 if half else torch.float32)
    base = {**BASE_CONFIG, **(BF16 if half else {})}
    cases = [
        (stage, {**base, "zero_optimization": {"stage": stage, **zero}}, "adamw")
        for stage in (1, 2)
        for zero in ({}, {"offload_optimizer": HOST})
    ]
    measured = run_ranks(measure_deepspeed, 2, path, cases)
    for number, (stage, config, optimizer) in enumerate(cases):
        forecasts = forecast_components(path, 2, optimizer, zero_stage=stage, engine_config=config)
        for forecast, results in zip(forecasts, measured, strict=True):
            sizes = results[number]
            assert forecast["step"]["master weights"] == sizes["master weights"]
            assert forecast["step"]["optimizer state"] == sizes["optimizer state"]
            if "offload_optimizer" in config["zero_optimization"]:
                assert forecast["step"]["gradients"] == sizes["gradients"]
            # The load leaves room for other paddings at the end of a flat buffer.
            assert 0 <= forecast["step"]["parameters"] - sizes["parameters"] <= 8192


@pytest.mark.slow
@pytest.mark.parametrize("experts", [2, 4])
def test_masters_of_experts_at_stage_2(tmp_path: Path, experts: int) -> None:
    """Masters of an expert are sharded only over the ranks that hold it."""
    path = checkpoint("qwen3_moe", tmp_path)
    config = {**BASE_CONFIG, **BF16, "zero_optimization": {"stage": 2}}
    measured = run_ranks(measure_deepspeed, 4, path, [(2, config, "adamw")], experts)
    forecasts = forecast_components(
        path, 4, "adamw", zero_stage=2, engine_config=config, expert_parallel=experts
    )
    for forecast, (sizes,) in zip(forecasts, measured, strict=True):
        assert forecast["step"]["master weights"] == sizes["master weights"]
        assert forecast["step"]["optimizer state"] == sizes["optimizer state"]
        # Room for other paddings at the end of each of two flat buffers.
        assert 0 <= forecast["step"]["parameters"] - sizes["parameters"] <= 2 * 8192


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize(
    ("stored", "dtype", "world_size"),
    [(torch.bfloat16, None, 2), (torch.float32, None, 3), (torch.bfloat16, torch.float32, 1)],
)
def test_fsdp2_forecast_equals_the_engine(
    checkpoints: TinyCheckpoints, stored: torch.dtype, dtype: Any, world_size: int, optimizer: str
) -> None:
    path = checkpoints("qwen3", stored)
    measured = run_ranks(measure_fsdp2, world_size, path, None, optimizer, dtype)
    forecasts = forecast_components(path, world_size, optimizer, engine="fsdp2", dtype=dtype)
    compare_shards([forecast["step"] for forecast in forecasts], measured)


@pytest.mark.slow
def test_fsdp2_shards_of_an_fp32_checkpoint_are_its_masters(checkpoints: TinyCheckpoints) -> None:
    """A policy that computes in bf16 keeps shards, gradients and states in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    path = checkpoints("qwen3", torch.float32)
    config = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    measured = run_ranks(measure_fsdp2, 2, path, config, "adamw", torch.bfloat16)
    options = {"engine": "fsdp2", "engine_config": config, "dtype": torch.bfloat16}
    compare_shards(
        [forecast["step"] for forecast in forecast_components(path, 2, "adamw", **options)], measured
    )


def compare_shards(forecasts: list[dict[str, int]], measured: list[dict[str, int]]) -> None:
    """Rank 0 has full chunks; for other ranks the forecast counts padding as well."""
    assert {name: forecasts[0][name] for name in measured[0]} == measured[0]
    for forecast, sizes in zip(forecasts, measured, strict=True):
        assert all(0 <= forecast[name] - sizes[name] <= 0.1 * forecast[name] for name in sizes)
