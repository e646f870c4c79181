"""Train and save with the HF Trainer, with and without the added line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.scripts import fsdp2, trainer_script, zero3
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

Environment = dict[str, str]


def run(path: Path, out: Path, environment: Environment, adopt: Any, **more: Any) -> dict[str, Any]:
    loading = more.pop("loading", {})
    found = run_ranks(
        trainer_script, 2, path, out, environment, more, adopt, loading, process_group=False, timeout=200
    )
    assert found[0]["losses"] == found[1]["losses"]
    return found[0]


def saved(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("qwen3", 3),
        pytest.param("qwen3_moe_aligned", 3, marks=pytest.mark.slow),
        pytest.param("qwen3_moe_aligned", 2, marks=pytest.mark.slow),
    ],
)
def test_trainer_on_deepspeed(name: str, stage: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    gathered = {"stage3_gather_16bit_weights_on_model_save": True}
    zero = {"stage": stage, **(gathered if stage == 3 else {})}
    path, environment = checkpoints(name), zero3(tmp_path, zero_optimization=zero)
    stock = run(path, tmp_path / "stock", environment, None)
    ours = run(path, tmp_path / "ours", environment, {})
    assert ours["losses"] == stock["losses"]
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6)
    (weights, config), (expected, expected_config) = saved(tmp_path / "ours"), saved(tmp_path / "stock")
    assert config == expected_config
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe_aligned"])
def test_trainer_on_fsdp2(name: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path, environment = checkpoints(name), fsdp2()
    stock = run(path, tmp_path / "stock", environment, None, use_cpu=True)
    ours = run(path, tmp_path / "ours", environment, {}, use_cpu=True)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-5)
    (weights, config), (expected, expected_config) = saved(tmp_path / "ours"), saved(tmp_path / "stock")
    assert config == expected_config
    # Gathered, tied weights are tied no more, and accelerate's route saves both.
    twice = expected.keys() - weights.keys()
    assert weights.keys() <= expected.keys()
    assert all(torch.equal(expected[key], expected["model.embed_tokens.weight"]) for key in twice)
    for key in weights:
        torch.testing.assert_close(weights[key], expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    ["zero3", "zero2", "fsdp2"],
)
def test_trainer_with_experts_shared_out(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints("qwen3_moe_aligned")
    environments = {
        "zero3": zero3(tmp_path),
        "zero2": zero3(tmp_path / "zero2", zero_optimization={"stage": 2}),
        "fsdp2": fsdp2(),
    }
    environment = environments[engine]
    options = {"use_cpu": True} if engine == "fsdp2" else {}
    stock = run(path, tmp_path / "stock", environment, None, **options)
    ours = run(path, tmp_path / "ours", environment, {"expert_parallel": 2}, **options)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-4)
    (weights, config), (expected, expected_config) = saved(tmp_path / "ours"), saved(tmp_path / "stock")
    assert config == expected_config
    assert weights.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(weights[key], expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_trainer_that_asks_for_fsdp2_itself(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Without the launcher: the Accelerator is made by the Trainer, after the model."""
    path, asked = checkpoints("qwen3"), {"fsdp": True, "fsdp_config": {"version": 2}, "use_cpu": True}
    stock = run(path, tmp_path / "stock", fsdp2(), None, use_cpu=True)
    ours = run(path, tmp_path / "ours", {}, {}, **asked)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
