"""Models that keep some parameters in fp32 beside bf16: loaded so, and trained so, on both engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import zerostart
from tests.dtypes.test_masters import F32, State, config_of, expected_of, masters_in, unlike, whole_halves
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


# --- One process, as the engines train: fp32 masters, the model's own dtypes in forward and backward.


def alone(
    path: Path, ranks: int, origin: State, dtype: torch.dtype = BF16
) -> tuple[list[list[float]], State, State]:
    """Losses by step and rank, the gradients of the first step, and the parameters after the last."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).train()
    parameters = dict(model.named_parameters())
    masters = {name: origin[name].clone() for name in parameters}
    optimizer = torch.optim.SGD(masters.values(), lr=RATE)
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


#: One rounding to bf16, whose mantissa has 8 bits: what another order of two ranks' gradients changes.
ROUNDING = 2.0**-8


def assert_steps(found: Any, expected: Any, rank: int, near_to: float = ROUNDING) -> None:
    losses, gradients, parameters = found
    want_losses, want_gradients, want = expected
    assert losses == pytest.approx([step[rank] for step in want_losses], rel=near_to / 8)
    for name, gradient in want_gradients.items():
        near = 1e-5 + near_to * float(gradient.abs().max())
        torch.testing.assert_close(gradients[name].float(), gradient.float(), rtol=0, atol=near, msg=name)
    for name, tensor in want.items():
        near = STEPS * RATE * (1e-5 + 2.5 * near_to * float(want_gradients[name].abs().max())) + 1e-7
        torch.testing.assert_close(parameters[name].float(), tensor.float(), rtol=1e-6, atol=near, msg=name)


# --- DeepSpeed


def train_deepspeed(path: Path, zero: dict[str, Any], masters: bool) -> Any:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = config_of(**zero) | EXACT
    # Where the parameters lie at the load is another matter; on a CPU it makes no difference.
    model = zerostart.load(path, engine_config=config_of(), progress=False, fp32_masters=masters)
    before = unlike(whole_halves(model), expected_of(path, BF16))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
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
def test_deepspeed_trains_a_mixture_as_one_process_does(
    world_size: int, masters: bool, zero: dict[str, Any], path: Path
) -> None:
    kept = expected_of(path, BF16)
    origin = expected_of(path, F32) if masters else {name: t.float() for name, t in kept.items()}
    expected = alone(path, world_size, origin)
    for rank, (before, begun, found, after) in enumerate(
        run_ranks(train_deepspeed, world_size, path, zero, masters, timeout=240)
    ):
        assert before == []
        assert unlike(begun, origin) == []
        assert after == []
        assert_steps(found, expected, rank)


def refused(path: Path, zero: dict[str, Any]) -> None:
    zerostart.load(path, engine_config=config_of(**zero), progress=False)


@pytest.mark.slow
def test_a_setting_for_one_dtype_is_refused_by_name(path: Path) -> None:
    setting = "stage3_use_all_reduce_for_fetch_params"
    for outcome in rank_outcomes(refused, 2, path, {setting: True}):
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
    first: State = {}
    for _ in range(STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        first = first or {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return before, units, (losses, first, dict(zerostart.full_tensors(model, rank=None)))


POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dtype"), [(1, F32), (2, BF16), (3, BF16)])
def test_fsdp2_trains_with_masters_that_were_never_rounded(
    world_size: int, dtype: torch.dtype, path: Path
) -> None:
    origin = expected_of(path, F32)
    expected = alone(path, world_size, origin)
    for rank, (before, units, found) in enumerate(
        run_ranks(train_fsdp2, world_size, path, {"mp_policy": POLICY}, dtype, True)
    ):
        assert unlike(before, origin) == []
        assert {"model.layers.0.self_attn", "model.layers.0.mlp.gate"} <= set(units)
        assert_steps(found, expected, rank)


@pytest.mark.slow
def test_fsdp2_trains_a_mixture_without_a_policy(path: Path) -> None:
    """No policy and no masters: AdamW would change bf16 itself, so that only the first step is compared."""
    kept = expected_of(path, BF16)
    (losses, gradients, _) = alone(path, 2, kept)
    for rank, (before, _, (found, first, _)) in enumerate(
        run_ranks(train_fsdp2, 2, path, {"reshard_after_forward": False}, BF16, True)
    ):
        assert unlike(before, kept) == []
        assert found[0] == pytest.approx(losses[0][rank], abs=2e-3)
        for name, gradient in gradients.items():
            assert first[name].dtype == kept[name].dtype
            near = 1e-5 + 2e-2 * float(gradient.abs().max())
            torch.testing.assert_close(first[name].float(), gradient.float(), rtol=0, atol=near, msg=name)


class Torn(nn.Module):
    """One module with parameters of two dtypes, beside a list of modules of either."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=F32))
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=BF16))


def torn(engine: str) -> Any:
    source = {name: tensor.detach() for name, tensor in Torn().state_dict().items()}
    model = zerostart.load(source, model=Torn, engine=engine, progress=False)
    return {name: p.dtype for name, p in model.named_parameters()}


@pytest.mark.slow
def test_one_module_of_two_dtypes_is_refused_by_name_where_it_cannot_be_sharded() -> None:
    for outcome in rank_outcomes(torn, 2, "fsdp2"):
        assert outcome.error == "zerostart.errors.EngineError"
        assert "scale is float32, weight is bfloat16" in outcome.message
    assert run_ranks(torn, 2, "deepspeed") == [{"scale": F32, "weight": BF16}] * 2
