"""Forecast masters, states, gradients and parameters against the tensors that real engines hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.loading.forecast.engines_memory import BASE, deepspeed_holds, fsdp2_holds
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.distributed.world import World
from zerostart.engines.forecast import Target
from zerostart.live.report import Clock
from zerostart.loading.forecast.memory import moments_of, optimizer_of, parameter_bytes
from zerostart.loading.forecast.reading import owned_by
from zerostart.loading.preparation import prepare
from zerostart.loading.request import Request

BF16 = {"bf16": {"enabled": True}}
HOST = {"device": "cpu", "pin_memory": False}


def foreseen(path: Path, world_size: int, optimizer: str, **given: Any) -> list[dict[str, dict[str, int]]]:
    """Of each rank the components of the last moment of each phase: the update, and what it starts from.

    Not those of the highest moment, which for a model this small may be any.
    """
    request = Request(path, **given)
    engine = request.resolve(world_size)
    model = prepare(request, engine, World(0, 1, None), Clock(), strict=False).built.model
    parallelism = engine.parallelism(model)
    placed = engine.placements(model, parallelism)
    ranks = range(world_size)
    numels = {name: own.numels for name, own in owned_by(model, placed, ranks).items()}
    held = parameter_bytes(model, placed, parallelism, ranks, numels)
    target = Target(accelerator=False, world_size=world_size)
    moments = moments_of(model, engine, placed, held, 0, optimizer_of(optimizer, None), target)
    last = {moment.phase: moment.on(target).host for moment in moments}
    shape = (world_size,)
    return [
        {p: {n: int(np.broadcast_to(v, shape)[r]) for n, v in sizes.items()} for p, sizes in last.items()}
        for r in ranks
    ]


@pytest.mark.parametrize(
    ("world_size", "half"), [(2, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_zero3(checkpoints: TinyCheckpoints, half: bool, world_size: int) -> None:
    path = checkpoints("qwen3", torch.bfloat16 if half else torch.float32)
    base = {**BASE, **(BF16 if half else {})}
    cases = [
        (3, {**base, "zero_optimization": {"stage": 3, **zero}}, optimizer)
        for zero, optimizer in (
            ({}, "adamw"),
            ({"offload_optimizer": HOST}, "adamw"),
            ({"offload_param": HOST}, "momentum"),
        )
    ]
    found = run_ranks(deepspeed_holds, world_size, path, cases)
    for number, (_, config, optimizer) in enumerate(cases):
        made = foreseen(path, world_size, optimizer, engine_config=config)
        for told, of_rank in zip(made, found, strict=True):
            holds = of_rank[number]
            assert told["step"]["optimizer state"] == holds.pop("optimizer state")
            assert {name: told["initialize"][name] for name in holds} == holds


@pytest.mark.slow
@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
def test_zero12(checkpoints: TinyCheckpoints, half: bool) -> None:
    path = checkpoints("qwen3", torch.bfloat16 if half else torch.float32)
    base = {**BASE, **(BF16 if half else {})}
    cases = [
        (stage, {**base, "zero_optimization": {"stage": stage, **zero}}, "adamw")
        for stage in (1, 2)
        for zero in ({}, {"offload_optimizer": HOST})
    ]
    found = run_ranks(deepspeed_holds, 2, path, cases)
    for number, (stage, config, optimizer) in enumerate(cases):
        made = foreseen(path, 2, optimizer, zero_stage=stage, engine_config=config)
        for told, of_rank in zip(made, found, strict=True):
            holds = of_rank[number]
            assert told["step"]["master weights"] == holds["master weights"]
            assert told["step"]["optimizer state"] == holds["optimizer state"]
            if "offload_optimizer" in config["zero_optimization"]:
                assert told["step"]["gradients"] == holds["gradients"]
            # The load leaves room for other paddings at the end of a flat buffer.
            assert 0 <= told["step"]["parameters"] - holds["parameters"] <= 8192


@pytest.mark.slow
@pytest.mark.parametrize("experts", [2, 4])
def test_experts_over_several_ranks_at_stage_2(tmp_path: Path, experts: int) -> None:
    """Their masters are shared by the ranks that have the same ones, and not by all."""
    path = checkpoint("qwen3_moe", tmp_path)
    config = {**BASE, **BF16, "zero_optimization": {"stage": 2}}
    found = run_ranks(deepspeed_holds, 4, path, [(2, config, "adamw")], experts)
    made = foreseen(path, 4, "adamw", zero_stage=2, engine_config=config, expert_parallel=experts)
    for told, (holds,) in zip(made, found, strict=True):
        assert told["step"]["master weights"] == holds["master weights"]
        assert told["step"]["optimizer state"] == holds["optimizer state"]
        # Room for other paddings at the end of each of two flat buffers.
        assert 0 <= told["step"]["parameters"] - holds["parameters"] <= 2 * 8192


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize(
    ("stored", "dtype", "world_size"),
    [(torch.bfloat16, None, 2), (torch.float32, None, 3), (torch.bfloat16, torch.float32, 1)],
)
def test_fsdp2(
    checkpoints: TinyCheckpoints, stored: torch.dtype, dtype: Any, world_size: int, optimizer: str
) -> None:
    path = checkpoints("qwen3", stored)
    found = run_ranks(fsdp2_holds, world_size, path, None, optimizer, dtype)
    made = foreseen(path, world_size, optimizer, engine="fsdp2", dtype=dtype)
    compare_shards([told["step"] for told in made], found)


@pytest.mark.slow
def test_masters_of_an_fp32_checkpoint_are_the_shards_of_fsdp2(checkpoints: TinyCheckpoints) -> None:
    """With a policy that computes in bf16, shards are held in fp32, and all that is trained with them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    path = checkpoints("qwen3", torch.float32)
    config = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    found = run_ranks(fsdp2_holds, 2, path, config, "adamw", torch.bfloat16)
    given = {"engine": "fsdp2", "engine_config": config, "dtype": torch.bfloat16}
    compare_shards([told["step"] for told in foreseen(path, 2, "adamw", **given)], found)


def compare_shards(told: list[dict[str, int]], found: list[dict[str, int]]) -> None:
    """Rank 0 has whole chunks; of other ranks the forecast counts the padding to them."""
    assert {name: told[0][name] for name in found[0]} == found[0]
    for sizes, holds in zip(told, found, strict=True):
        assert all(0 <= sizes[name] - holds[name] <= 0.1 * sizes[name] for name in holds)
