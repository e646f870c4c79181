"""Models that keep some parameters in fp32 beside bf16: loaded so, and trained so, on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_masters import F32, State, config_of, expected_of, masters_in, start, unlike, whole_halves
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import zerostart
from ranks import rank_outcomes, run_ranks
from tiny import TinyCheckpoints

BF16 = torch.bfloat16
STEPS, RATE = 3, 1e-2
EXACT: dict[str, Any] = {
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
}


def tokens(ranks: int) -> torch.Tensor:
    return torch.randint(3, 89, (ranks, 2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def path(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints("flint", F32)


def test_the_model_mixes_dtypes(path: Path) -> None:
    kept = {name for name, p in expected_of(path, BF16).items() if p.dtype == F32}
    ends = ("gate.weight", "self_attn.sinks")
    assert len(kept) == 5
    assert all(name.endswith(ends) for name in kept)


# --- One process, as the engines train: fp32 masters, the model's own dtypes in forward and backward.


def alone(path: Path, ranks: int, origin: State, half: bool = True) -> tuple[list[list[float]], State, State]:
    """Losses by step and rank, the gradients of the first step, and the parameters after the last."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=BF16).train()
    parameters = dict(model.named_parameters())
    masters = {name: origin[name].clone() for name in parameters}
    optimizer = torch.optim.AdamW(masters.values(), lr=RATE)
    losses: list[list[float]] = []
    first: State = {}
    for _ in range(STEPS):
        losses.append([])
        for name, master in masters.items():
            master.grad = torch.zeros_like(master)
            parameters[name].data.copy_(master)
        for batch in tokens(ranks):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            losses[-1].append(loss.item())
            for name, master in masters.items():
                grad, parameters[name].grad = parameters[name].grad, None
                if grad is not None and master.grad is not None:
                    master.grad += grad.to(master.dtype) / ranks
        first = first or {name: m.grad.clone() for name, m in masters.items() if m.grad is not None}
        optimizer.step()
    return losses, first, masters


def assert_steps(found: Any, expected: Any, rank: int) -> None:
    losses, gradients, parameters = found
    want_losses, want_gradients, want = expected
    assert losses == pytest.approx([step[rank] for step in want_losses], abs=2e-3)
    for name, gradient in want_gradients.items():
        near = 1e-5 + 4e-3 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[name].float(), gradient.float(), rtol=0, atol=near, msg=name)
    for name, tensor in want.items():
        # A sign that flips in a tiny gradient moves an Adam step by twice the rate.
        apart = (parameters[name].float() - tensor.float()).abs()
        assert float((apart > RATE / 4).float().mean()) < 0.02, name


# --- DeepSpeed


def train_deepspeed(path: Path, zero: dict[str, Any], masters: bool) -> Any:
    from deepspeed.utils import safe_get_full_grad

    config = config_of(**zero) | EXACT
    model = zerostart.load(path, engine_config=config, progress=False, fp32_masters=masters)
    before = unlike(whole_halves(model), expected_of(path, BF16))
    model.train()
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    before += unlike(whole_halves(model), expected_of(path, BF16))
    begun = masters_in(model)
    batch = tokens(dist.get_world_size())[dist.get_rank()]
    losses: list[float] = []
    first: State = {}
    for _ in range(STEPS):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        first = first or {name: safe_get_full_grad(p).clone() for name, p in model.named_parameters()}
        engine.step()
        losses.append(loss.item())
    rounded = {name: tensor.to(begun[name].dtype) for name, tensor in whole_halves(model).items()}
    after = {
        name: t.to(p.dtype).float()
        for (name, t), p in zip(masters_in(model).items(), model.parameters(), strict=True)
    }
    return before, begun, (losses, first, masters_in(model)), unlike(rounded, after)


@pytest.mark.parametrize("masters", [True, False], ids=["stored", "rounded"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_deepspeed_trains_a_mixture_as_one_process_does(
    world_size: int, masters: bool, path: Path, deepspeed_op: None
) -> None:
    kept = expected_of(path, BF16)
    origin = expected_of(path, F32) if masters else {name: t.float() for name, t in kept.items()}
    expected = alone(path, world_size, origin)
    for rank, (before, begun, found, after) in enumerate(
        run_ranks(train_deepspeed, world_size, path, {}, masters, timeout=240)
    ):
        assert before == []
        assert unlike(begun, origin) == []
        assert after == []
        assert_steps(found, expected, rank)


@pytest.mark.parametrize(
    "zero",
    [
        {"sub_group_size": 700, "stage3_param_persistence_threshold": 0},
        {"reduce_bucket_size": 300, "reduce_scatter": False},
        {"reduce_bucket_size": 300, "contiguous_gradients": False},
        {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 700},
    ],
    ids=["sub-groups", "all-reduce", "scattered", "offloaded"],
)
def test_deepspeed_trains_a_mixture_with_other_settings(
    zero: dict[str, Any], path: Path, deepspeed_op: None
) -> None:
    origin = expected_of(path, F32)
    expected = alone(path, 2, origin)
    for rank, (before, begun, found, after) in enumerate(
        run_ranks(train_deepspeed, 2, path, zero, True, timeout=240)
    ):
        assert before == []
        assert unlike(begun, origin) == []
        assert after == []
        assert_steps(found, expected, rank)
