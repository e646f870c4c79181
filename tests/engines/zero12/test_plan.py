"""Compare plans and loads of stages 1 and 2, and check refused settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.engines.zero12 import routes
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import ConfigError


def load_and_compare(path: Path, exchange: bool, dtype: torch.dtype | None) -> tuple[int, int, list[str]]:
    """Return bytes read, bytes received, and names of wrong parameters."""
    model = zerostart.load(path, zero_stage=2, exchange=exchange, dtype=dtype, progress=False)
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or torch.bfloat16)
    wrong = [
        n
        for (n, p), q in zip(model.named_parameters(), expected.parameters(), strict=True)
        if p.dtype != q.dtype or not torch.equal(p, q)
    ]
    report = zerostart.report(model)
    assert ("gathered from all" in str(report)) == exchange
    assert "as requested" not in str(report) or exchange is False
    return report.read_bytes, report.exchanged_bytes, wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "exchange"),
    [("qwen3_moe", None, True), ("qwen3_moe", torch.float32, False), ("gpt_oss", torch.float32, True)],
)
def test_bytes_are_as_planned(
    kind: str, dtype: torch.dtype | None, exchange: bool, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints(kind, torch.bfloat16, sharded=True)
    plan = zerostart.plan(path, world_size=3, zero_stage=2, exchange=exchange, dtype=dtype)
    results = run_ranks(load_and_compare, 3, path, exchange, dtype)
    assert [wrong for _, _, wrong in results] == [[], [], []]
    assert [nbytes for nbytes, _, _ in results] == [rank.read_bytes for rank in plan.ranks]
    received = [nbytes for _, nbytes, _ in results]
    assert received == (list(plan.exchanged_bytes) or [0, 0, 0])
    whole = plan.checkpoint_bytes * (2 if dtype == torch.float32 else 1)
    assert all(nbytes == pytest.approx(2 / 3 * whole * exchange, rel=0.01) for nbytes in received)
    rank_plans = [
        zerostart.plan(path, world_size=3, zero_stage=2, exchange=exchange, dtype=dtype, rank=r).ranks[0]
        for r in range(3)
    ]
    assert [rank.read_bytes for rank in rank_plans] == [rank.read_bytes for rank in plan.ranks]
    total_read = sum(rank.read_bytes for rank in plan.ranks)
    if exchange:
        assert total_read <= 1.05 * plan.checkpoint_bytes
    else:
        assert total_read == pytest.approx(3 * plan.checkpoint_bytes, rel=0.01)
    assert all(whole <= rank.device_bytes for rank in plan.ranks)


def load_with_head(path: Path, exchange: bool) -> list[torch.Tensor]:
    """Return the parameters of a model with a head that the checkpoint lacks."""
    torch.manual_seed(11 + dist.get_rank())
    model = zerostart.load(
        path, model=model_with_head(), zero_stage=1, exchange=exchange, progress=False, strict=False
    )
    return [p.detach() for p in model.parameters()]


def model_with_head() -> Any:
    from transformers import Qwen3ForSequenceClassification

    return Qwen3ForSequenceClassification


@pytest.mark.slow
def test_missing_tensors_are_initialised_alike_on_all_ranks(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.float32)
    torch.manual_seed(11)
    expected = list(model_with_head().from_pretrained(path).parameters())
    for exchange in (False, True):
        for parameters in run_ranks(load_with_head, 2, path, exchange):
            assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def load_for_another_stage(path: Path) -> None:
    zerostart.load(path, zero_stage=1, engine_config={"zero_optimization": {"stage": 2}}, progress=False)


@pytest.mark.slow
def test_contradictions_are_refused(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe", torch.bfloat16)
    with pytest.raises(ConfigError, match="expert_parallel with zero_stage=0 is not available: DeepSpeed"):
        zerostart.plan(path, world_size=2, zero_stage=0, expert_parallel=2)
    with pytest.raises(ConfigError, match="zero_stage=4 is not available on deepspeed"):
        zerostart.plan(path, world_size=2, zero_stage=4)
    for outcome in rank_outcomes(load_for_another_stage, 2, path):
        assert outcome.error == "zerostart.errors.EngineError"
        assert "asks for ZeRO stage 2, but the load for stage 1" in outcome.message


def train_without_launcher() -> bool:
    """Load and train in a process without a launcher or a process group."""
    model = zerostart.load(
        {"weight": torch.ones(2, 3), "bias": torch.zeros(2)},
        model=lambda: nn.Linear(3, 2),
        zero_stage=2,
        progress=False,
    )
    import deepspeed

    case = routes.Case(bf16=False)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=routes.config_of(case))[0]
    return bool(engine(torch.ones(1, 3)).sum() == 6)


@pytest.mark.slow
def test_a_single_process_trains() -> None:
    (outcome,) = rank_outcomes(train_without_launcher, 1, process_group=False)
    assert outcome.value is True, outcome.describe()
