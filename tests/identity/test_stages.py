"""ZeRO stages 0 to 2 train like one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerostart
from tests.engines.zero12 import routes
from tests.parity import CLIP, Trace, batches, checkpoint, differences, optimizer, reference
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.engines.fsdp2.calls import begin_batch

#: Number of batches accumulated for one step.
ACCUMULATION = 2


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def is_sharded(model: nn.Module) -> set[bool]:
    """Return whether the first block's parameters are shards now."""
    layer = model.model.layers[0].self_attn.q_proj.weight  # type: ignore[union-attr, index]
    return {isinstance(layer, DTensor)}


def train(path: Path, stage: int, exchange: bool) -> tuple[Trace, list[str]]:
    model: Any = zerostart.load(path, engine="fsdp2", zero_stage=stage, exchange=exchange, progress=False)
    if stage == 0:
        model = DistributedDataParallel(model)
    model.train()
    rank, size = dist.get_rank(), dist.get_world_size()
    optim, trace, errors = optimizer(model), Trace(), []
    for step in batches(size * ACCUMULATION):
        total = torch.zeros(())
        for part in range(ACCUMULATION):
            last = part == ACCUMULATION - 1
            tokens = step[part * size + rank]
            if isinstance(model, FSDPModule):
                begin_batch(model, stage, last)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / ACCUMULATION
            states = {"forward": is_sharded(model) if stage else None}
            loss.backward()
            states["backward"] = is_sharded(model) if stage else None
            if stage:
                errors += wrong_states(states, stage, last)
            total += loss.detach()
        if not trace.gradients:
            names = (name.removeprefix("module.") for name, _ in model.named_parameters())
            trace.gradients = {n: full_tensor(p.grad) for n, p in zip(names, model.parameters(), strict=True)}
        dist.all_reduce(total)
        trace.losses.append(total.item() / size)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        trace.norms.append(full_tensor(norm).item())
        optim.step()
        optim.zero_grad()
    trace.weights = {n: t for n, t in zerostart.full_tensors(model, rank=None) if t is not None}
    return trace, errors


def wrong_states(have: dict[str, Any], stage: int, last: bool) -> list[str]:
    """List blocks that are gathered or sharded at wrong times."""
    want = {"forward": {stage == 3}, "backward": {stage != 1 or last}}
    return [
        f"{when} of stage {stage}, last={last}: {have[when]}" for when in want if have[when] != want[when]
    ]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("qwen3_moe", 3),
        *(pytest.param("qwen3_moe", stage, marks=pytest.mark.slow) for stage in range(3)),
        *(pytest.param("qwen3", stage, marks=pytest.mark.slow) for stage in range(4)),
    ],
)
def test_fsdp2_trains_as_one_process(kind: str, stage: int, folder: Path) -> None:
    path = checkpoint(kind, folder)
    single = reference(path)
    for trace, errors in run_ranks(train, 2, path, stage, stage == 0, timeout=200):
        assert differences(trace, single, 1e-4) == []
        assert errors == []


STAGE_0 = {
    "bf16": routes.Case(stage=0, groups="decay"),
    "fp32": routes.Case(stage=0, bf16=False, exchange=True),
    "fp16": routes.Case(stage=0, bf16=False, fp16=True, top={"fp16": {"enabled": True, "loss_scale": 64}}),
}


def compare_stage_0(path: Path) -> dict[str, list[str]]:
    differences_by_case = {}
    for name in routes.available(STAGE_0):
        case = STAGE_0[name]
        expected = routes.trace_training(routes.stock(path, case), case)
        differences_by_case[name] = routes.differing_keys(
            routes.trace_training(routes.ours(path, case), case), expected
        )
    return differences_by_case


@pytest.mark.slow
def test_deepspeed_at_stage_0_trains_like_stock(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    for differences_by_case in run_ranks(compare_stage_0, 2, path):
        assert not {name: lines for name, lines in differences_by_case.items() if lines}
