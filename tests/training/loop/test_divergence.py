"""Runs with a non-finite loss or gradient end and keep earlier checkpoints."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import rank_outcomes, run_ranks
from tests.training.loop.test_run import make_config as make_config
from tests.training.loop.test_run import run
from zerostart.training.loop.failures import is_finite

ENGINES = ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)]


def run_with_nan(config, first, only_gradients=False):
    """Run with NaN losses, or only NaN gradients, on rank 1 from step ``first``."""
    from tests.training.language import CausalLanguage

    original, forwards = CausalLanguage.loss, []

    def loss(self, model, batch):
        result = original(self, model, batch)
        if torch.is_grad_enabled():
            forwards.append(1)
            if torch.distributed.get_rank() == 1 and len(forwards) >= first:
                if not only_gradients:
                    return result * float("nan")
                result.register_hook(lambda gradient: gradient * float("nan"))
        return result

    CausalLanguage.loss = loss  # in this rank's process, which ends with the run
    return run(config)


def list_checkpoints(config):
    return sorted(
        path.parent.name for path in Path(config["output"]["directory"]).glob("checkpoints/*/state.json")
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_nan_loss_fails_and_keeps_finite_checkpoints(engine, checkpoints, make_config):
    config = make_config(checkpoints("qwen3"), engine, steps=9, warmup_steps=0, schedule="constant")
    config |= {"checkpoint": {"every": 1, "keep": 2}, "resume": "auto"}
    outcomes = rank_outcomes(run_with_nan, 2, config, 4)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.DivergedError"}
    assert outcomes[0].message == outcomes[1].message
    assert "step 4 is not finite on rank 1: its loss is nan, the gradient norm" in outcomes[0].message
    assert "train.patience_nonfinite is 3: the run has ended after step 6" in outcomes[0].message
    assert f"finite weights is {config['output']['directory']}{os.sep}checkpoints" in outcomes[0].message
    # DeepSpeed skips such a step, so its weights stay finite.
    kept_steps = (4, 5) if engine == "deepspeed" else (2, 3)
    assert list_checkpoints(config) == [f"step-{step:08d}" for step in kept_steps]
    for file in Path(config["output"]["directory"]).glob("checkpoints/*/*/*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(file).values())
    assert not Path(config["output"]["directory"], "model.safetensors").exists()
    printed = " ".join(outcomes[0].log.split())
    assert "step 4 is not finite on rank 1: its loss is nan" in printed
    assert ("the weights after step 5 are not finite: they are not saved" in printed) == (engine == "fsdp2")
    (result, _) = run_ranks(run, 2, config)
    assert (result.steps, result.stopped) == (9, False)
    lines = Path(result.directory, "metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if "loss" in entry]
    assert [entry["step"] for entry in steps] == [*range(1, 10)]
    assert [entry["step"] for entry in steps if entry["loss"] is None] == [
        step for step in kept_steps if step > 3
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_run_shorter_than_its_patience_saves_no_nan(engine, checkpoints, make_config):
    config = make_config(checkpoints("qwen3"), engine, steps=5, patience_nonfinite=9)
    config["output"] |= {"every": 2}
    out = Path(config["output"]["directory"])
    outcomes = rank_outcomes(run_with_nan, 2, config, 4)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.DivergedError"}
    assert outcomes[0].message == outcomes[1].message
    exported = sorted(path.name for path in Path(out, "exports").iterdir())
    if engine == "fsdp2":
        assert "after step 5 the weights are not finite: no model was saved" in outcomes[1].message
        assert not Path(out, "model.safetensors").exists()
        assert exported == ["step-2"]
    else:
        assert "the last 2 steps of the run are not finite" in outcomes[1].message
        assert all(bool(t.isfinite().all()) for t in load_file(out / "model.safetensors").values())
        assert exported == ["step-2", "step-4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "stage"), [("fsdp2", 3), ("fsdp2", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
)
def test_nan_gradients_fail(engine, stage, checkpoints, make_config):
    """DeepSpeed skips all such steps and would end without training."""
    config = make_config(checkpoints("qwen3"), engine, steps=9, warmup_steps=0, schedule="constant")
    config["engine"] |= {"zero_stage": stage}
    config |= {"checkpoint": {"every": 1, "keep": 2}}
    outcomes = rank_outcomes(run_with_nan, 2, config, 4, True)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.DivergedError"}
    assert outcomes[0].message == outcomes[1].message
    assert "step 4 is not finite" in outcomes[0].message
    for file in Path(config["output"]["directory"]).glob("checkpoints/*/*/*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(file).values())


def run_with_overflows(config):
    """Run, and return for each step if the weights were updated."""
    from zerostart.training.loop.session import Session

    update, updates = Session.update, []

    def record(self):
        updates.append(update(self))
        return updates[-1]

    Session.update = record
    return run(config), updates


@pytest.mark.slow
def test_a_search_for_the_loss_scale_is_no_divergence(checkpoints, make_config):
    """Six overflows in a row are more than the patience."""
    config = make_config(
        checkpoints("qwen3"), "deepspeed", steps=16, mixed_precision="fp16", learning_rate=1e-4
    )
    config["engine"]["config"] = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}
    ((result, updates), _) = run_ranks(run_with_overflows, 2, config)
    assert not any(updates[:6])
    assert updates[-1]
    assert result.steps == 16


def test_is_finite():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([-torch.inf]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert is_finite(model, optimizer)
    optimizer.state[model.bias]["exp_avg_sq"][1] = torch.inf
    assert not is_finite(model, optimizer)
    optimizer.state[model.bias]["exp_avg_sq"][1] = 0
    model.bias.data[0] = torch.nan
    assert not is_finite(model, optimizer)
    assert is_finite(model.requires_grad_(False), None)
    large = torch.nn.Parameter(torch.full((8,), 3e38))  # only the sum is not finite
    assert is_finite(torch.nn.ParameterList([large]), None)
