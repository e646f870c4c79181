"""A script's own optimizer and scheduler keep working when experts get separate parameter groups."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.parity import VOCABULARY, checkpoint
from tests.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}


def first_step_only(step: int) -> float:
    return float(step == 0)


def start_engine(path: Path, how: str) -> tuple[Any, Any]:
    """Return the engine, and the scheduler if the script steps it itself."""
    import deepspeed

    model = zerostart.load(path, zero_stage=2, engine_config=CONFIG, expert_parallel=2, progress=False)
    parameters = list(model.parameters())
    groups = [{"params": parameters[1::2], "weight_decay": 0.1}, {"params": parameters[::2]}]
    arguments: dict[str, Any] = {"config": CONFIG, "model": model}
    scheduler = None
    if how == "of the engine":
        section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
        arguments |= {"config": CONFIG | section, "model_parameters": groups}
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, first_step_only
        )
    elif how == "a function":
        arguments |= {
            "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
            "model_parameters": parameters,
        }
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, first_step_only
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        groups = list(optimizer.param_groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, first_step_only)
        arguments["optimizer"] = optimizer
        if how == "given":
            arguments["lr_scheduler"], scheduler = scheduler, None
    engine, *_ = deepspeed.initialize(**arguments)
    if how in ("given", "by hand"):
        assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    return engine, scheduler


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def check_schedule(path: Path, how: str) -> None:
    before = dict(vars(torch.optim.Optimizer))
    engine, scheduler = start_engine(path, how)
    generator = torch.Generator().manual_seed(dist.get_rank())
    snapshots = [weights(engine)]
    for _ in range(3):
        tokens = torch.randint(3, VOCABULARY, (1, 8), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
        if scheduler is not None:
            scheduler.step()
        assert set(engine.get_lr()) == {0.0}
        snapshots.append(weights(engine))
    changes = [[n for n in a if not torch.equal(a[n], b[n])] for a, b in itertools.pairwise(snapshots)]
    assert any("experts" in name for name in changes[0])
    assert any("experts" not in name for name in changes[0])
    assert changes[1:] == [[], []]
    assert sum(bool(group.get("moe")) for group in engine.optimizer.param_groups) >= 1
    assert dict(vars(torch.optim.Optimizer)) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["given", "by hand"])
def test_a_scheduler_on_the_clients_optimizer_reaches_all_parameters(how: str, tmp_path: Path) -> None:
    run_ranks(check_schedule, 2, checkpoint("mixtral", tmp_path), how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a function", "of the engine"])
def test_a_scheduler_made_by_the_engine_reaches_all_parameters(how: str, tmp_path: Path) -> None:
    run_ranks(check_schedule, 2, checkpoint("mixtral", tmp_path), how)
