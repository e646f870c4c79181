"""Models with mixed dtypes load and train on both engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import zerostart
from tests.dtypes.test_masters import F32, State, config_of, differences, expected_of, gather, masters_of
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints

BF16 = torch.bfloat16
STEPS, RATE = 3, 0.1
EXACT: dict[str, Any] = {
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
}


def tokens(ranks: int) -> torch.Tensor:
    return torch.randint(3, 89, (ranks, 2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def path(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints("flint", F32)


# --- Reference in one process: fp32 masters, the model's dtypes in forward and backward.


def train_alone(
    path: Path, ranks: int, origin: State, dtype: torch.dtype = BF16
) -> tuple[list[list[float]], State, State]:
    """Return losses, first gradients, and final parameters."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).train()
    parameters = dict(model.named_parameters())
    masters = {name: origin[name].clone() for name in parameters}
    optimizer = torch.optim.SGD(masters.values(), lr=RATE)
    losses: list[list[float]] = []
    grads: State = {}
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
        grads = grads or {name: m.grad.clone() for name, m in masters.items() if m.grad is not None}
        optimizer.step()
    return losses, grads, masters


#: One rounding to bf16 (8 bits of mantissa): the effect of another order of two ranks' gradients.
ROUNDING = 2.0**-8


def assert_steps(actual: Any, expected: Any, rank: int, rounding: float = ROUNDING) -> None:
    losses, gradients, parameters = actual
    want_losses, want_gradients, want = expected
    assert losses == pytest.approx([step[rank] for step in want_losses], rel=rounding / 8)
    for name, gradient in want_gradients.items():
        near = 1e-5 + rounding * float(gradient.abs().max())
        torch.testing.assert_close(gradients[name].float(), gradient.float(), rtol=0, atol=near, msg=name)
    for name, tensor in want.items():
        near = STEPS * RATE * (1e-5 + 2.5 * rounding * float(want_gradients[name].abs().max())) + 1e-7
        torch.testing.assert_close(parameters[name].float(), tensor.float(), rtol=1e-6, atol=near, msg=name)


# --- DeepSpeed


def train_deepspeed(path: Path, zero: dict[str, Any], masters: bool) -> Any:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = config_of(**zero) | EXACT
    # The load uses the default placement, which makes no difference on a CPU.
    model = zerostart.load(path, engine_config=config_of(), progress=False, fp32_masters=masters)
    before = differences(gather(model), expected_of(path, BF16))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    before += differences(gather(model), expected_of(path, BF16))
    initial = masters_of(model)
    batch = tokens(dist.get_world_size())[dist.get_rank()]
    losses: list[float] = []
    grads: State = {}
    for _ in range(STEPS):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        grads = grads or {name: safe_get_full_grad(p).clone() for name, p in model.named_parameters()}
        engine.step()
        losses.append(loss.item())
    rounded = {name: tensor.to(initial[name].dtype) for name, tensor in gather(model).items()}
    after = {
        name: t.to(p.dtype).float()
        for (name, t), p in zip(masters_of(model).items(), model.parameters(), strict=True)
    }
    return before, initial, (losses, grads, masters_of(model)), differences(rounded, after)


HOST = {"device": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "masters", "zero"),
    [
        (1, True, {}),
        (2, True, {"sub_group_size": 700, "stage3_param_persistence_threshold": 0}),
        (2, True, {"reduce_bucket_size": 300, "contiguous_gradients": False}),
        (2, True, {"offload_optimizer": HOST, "offload_param": HOST, "sub_group_size": 700}),
        (3, False, {}),
    ],
)
def test_deepspeed_trains_mixed_dtypes_as_one_process(
    world_size: int, masters: bool, zero: dict[str, Any], path: Path
) -> None:
    stored = expected_of(path, BF16)
    origin = expected_of(path, F32) if masters else {name: t.float() for name, t in stored.items()}
    expected = train_alone(path, world_size, origin)
    for rank, (before, initial, trace, after) in enumerate(
        run_ranks(train_deepspeed, world_size, path, zero, masters, timeout=240)
    ):
        assert before == []
        assert differences(initial, origin) == []
        assert after == []
        assert_steps(trace, expected, rank)


def load(path: Path, zero: dict[str, Any]) -> None:
    zerostart.load(path, engine_config=config_of(**zero), progress=False)


@pytest.mark.slow
def test_setting_for_one_dtype_is_refused(path: Path) -> None:
    setting = "stage3_use_all_reduce_for_fetch_params"
    for outcome in rank_outcomes(load, 2, path, {setting: True}):
        assert outcome.error == "zerostart.errors.EngineError"
        assert setting in outcome.message
        assert "model.embed_tokens.weight is bfloat16, model.layers.0.self_attn.sinks is float32" in (
            outcome.message
        )


# --- FSDP2


def train_fsdp2(
    path: Path, options: dict[str, Any], dtype: torch.dtype, masters: bool, experts: int = 1
) -> Any:
    model = zerostart.load(
        path,
        engine="fsdp2",
        dtype=dtype,
        engine_config=options,
        expert_parallel=experts,
        progress=False,
        fp32_masters=masters,
    )
    before = dict(zerostart.full_tensors(model, rank=None))
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batch = tokens(dist.get_world_size())[dist.get_rank()]
    losses: list[float] = []
    grads: State = {}
    for _ in range(STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        grads = grads or {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return before, units, (losses, grads, dict(zerostart.full_tensors(model, rank=None)))


POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dtype"), [(1, F32), (2, BF16), (3, BF16)])
def test_fsdp2_trains_with_exact_masters(world_size: int, dtype: torch.dtype, path: Path) -> None:
    origin = expected_of(path, F32)
    expected = train_alone(path, world_size, origin)
    for rank, (before, units, trace) in enumerate(
        run_ranks(train_fsdp2, world_size, path, {"mp_policy": POLICY}, dtype, True)
    ):
        assert differences(before, origin) == []
        assert {"model.layers.0.self_attn", "model.layers.0.mlp.gate"} <= set(units)
        assert_steps(trace, expected, rank)


@pytest.mark.slow
def test_fsdp2_trains_mixed_dtypes_without_a_policy(path: Path) -> None:
    """Compares one step, because AdamW updates bf16 itself."""
    stored = expected_of(path, BF16)
    (losses, gradients, _) = train_alone(path, 2, stored)
    for rank, (before, _, (step_losses, grads, _)) in enumerate(
        run_ranks(train_fsdp2, 2, path, {"reshard_after_forward": False}, BF16, True)
    ):
        assert differences(before, stored) == []
        assert step_losses[0] == pytest.approx(losses[0][rank], abs=2e-3)
        for name, gradient in gradients.items():
            assert grads[name].dtype == stored[name].dtype
            near = 1e-5 + 2e-2 * float(gradient.abs().max())
            torch.testing.assert_close(grads[name].float(), gradient.float(), rtol=0, atol=near, msg=name)


class TwoDtypes(nn.Module):
    """One module with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=F32))
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=BF16))


def load_two_dtypes(engine: str) -> Any:
    source = {name: tensor.detach() for name, tensor in TwoDtypes().state_dict().items()}
    model = zerostart.load(source, model=TwoDtypes, engine=engine, progress=False)
    return {name: p.dtype for name, p in model.named_parameters()}


@pytest.mark.slow
def test_fsdp2_refuses_a_module_with_two_dtypes() -> None:
    for outcome in rank_outcomes(load_two_dtypes, 2, "fsdp2"):
        assert outcome.error == "zerostart.errors.EngineError"
        assert "scale is float32, weight is bfloat16" in outcome.message
    assert run_ranks(load_two_dtypes, 2, "deepspeed") == [{"scale": F32, "weight": BF16}] * 2
