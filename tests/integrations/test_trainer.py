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
    results = run_ranks(
        trainer_script, 2, path, out, environment, more, adopt, loading, process_group=False, timeout=200
    )
    assert results[0]["losses"] == results[1]["losses"]
    return results[0]


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
    # accelerate's route also saves gathered copies of tied weights.
    duplicates = expected.keys() - weights.keys()
    assert weights.keys() <= expected.keys()
    assert all(torch.equal(expected[key], expected["model.embed_tokens.weight"]) for key in duplicates)
    for key in weights:
        torch.testing.assert_close(weights[key], expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    ["zero3", "zero2", "fsdp2"],
)
def test_trainer_with_expert_parallelism(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
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


EXPERTS = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "experts.down_proj"]}


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("fsdp2", {"gradient_checkpointing": True}),
        pytest.param("zero3", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("zero2", {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp2", {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp2", {"bf16": True}, marks=pytest.mark.slow),
    ],
)
def test_trainer_with_adapters_of_shared_experts(
    engine: str, options: dict[str, Any], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Compare losses, norms and adapters with one process on twice the batch."""
    path, bf16 = checkpoints("qwen3_moe_aligned"), bool(options.get("bf16"))
    zero: dict[str, Any] = {"zero_optimization": {"stage": 2 if engine == "zero2" else 3}}
    precision = {"ACCELERATE_MIXED_PRECISION": "bf16"} if bf16 else {}
    environment = fsdp2(**precision) if engine == "fsdp2" else zero3(tmp_path / "config", **zero)
    shared = {"use_cpu": True} if engine == "fsdp2" else {}
    ours = run(
        path, tmp_path / "ours", environment, {"expert_parallel": 2}, lora=EXPERTS, **options, **shared
    )
    single_options = {"lora": EXPERTS, "batch_size": 4, "use_cpu": True, **options}
    arguments = path, tmp_path / "alone", {}, single_options, None, {}
    stock = run_ranks(trainer_script, 1, *arguments, process_group=False, timeout=200)[0]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-2 if bf16 else 1e-5)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-1 if bf16 else 1e-4)
    name = "adapter_model.safetensors"
    adapters, expected = load_file(tmp_path / "ours" / name), load_file(tmp_path / "alone" / name)
    assert adapters.keys() == expected.keys()
    assert any(".experts." in key for key in adapters)
    for key in () if bf16 else expected:  # AdamW steps by the sign of the rounding
        torch.testing.assert_close(adapters[key], expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_trainer_configures_fsdp2_itself(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Train without a launcher: the Trainer creates the Accelerator after the model."""
    path, options = checkpoints("qwen3"), {"fsdp": True, "fsdp_config": {"version": 2}, "use_cpu": True}
    stock = run(path, tmp_path / "stock", fsdp2(), None, use_cpu=True)
    ours = run(path, tmp_path / "ours", {}, {}, **options)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
