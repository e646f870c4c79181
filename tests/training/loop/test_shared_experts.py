"""Runs whose ranks share experts, from a configuration file alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

AUTOEP = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe"}}
#: The section ``engine`` of each run, and how far gradients are clipped.
ENGINES: dict[str, tuple[dict[str, Any], float]] = {
    "a key": ({"name": "deepspeed", "expert_parallel": 2}, 0.5),
    "DeepSpeed's section": ({"name": "deepspeed", "config": AUTOEP}, 0.5),
    "stage 1": ({"name": "deepspeed", "zero_stage": 1, "expert_parallel": 2}, 0.5),
    "offloaded at 2": (
        {
            "name": "deepspeed",
            "zero_stage": 2,
            "expert_parallel": 2,
            "config": {
                "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
                "zero_force_ds_cpu_optimizer": False,
            },
        },
        0.5,
    ),
    "offloaded at 3": (
        {
            "name": "deepspeed",
            "expert_parallel": 2,
            "config": {
                "zero_optimization": {
                    "offload_optimizer": {"device": "cpu", "pin_memory": False},
                    "offload_param": {"device": "cpu", "pin_memory": False},
                },
                "zero_force_ds_cpu_optimizer": False,
            },
        },
        0.5,
    ),
    "fsdp2 at 2": ({"name": "fsdp2", "zero_stage": 2, "expert_parallel": 2}, 0.5),
    "fsdp2": ({"name": "fsdp2", "expert_parallel": 2}, 0.5),
    "fsdp2, not clipped": ({"name": "fsdp2", "expert_parallel": 2}, 0.0),
}
FAST = ("DeepSpeed's section", "fsdp2, not clipped")


@pytest.fixture
def values(
    tmp_path: Path, tokenizer_path: Path, checkpoints: TinyCheckpoints
) -> Callable[[str, dict[str, Any], float, int], dict[str, Any]]:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the cat. " * 40)

    def make(output: str, engine: dict[str, Any], norm: float, batch: int) -> dict[str, Any]:
        return {
            "model": {"source": str(checkpoints("qwen3_moe_aligned"))},
            "data": {"source": str(text), "tokenizer": str(tokenizer_path), "sequence_length": 16},
            "task": {"name": "causal-lm"},
            "engine": engine,
            "train": {"steps": 4, "batch_size": batch, "learning_rate": 1e-2, "max_grad_norm": norm},
            "output": {"directory": str(tmp_path / output)},
        }

    return make


def run(values: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses by step, and the configuration of the trained model."""
    from zerostart.training.config.load import parse_config
    from zerostart.training.loop.runner import train

    folder = Path(train(parse_config(values)).directory)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    return [line["loss"] for line in lines if "loss" in line], config


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in ENGINES]
)
def test_experts_from_a_file_train_as_one_process(case: str, values: Callable[..., dict[str, Any]]) -> None:
    engine, norm = ENGINES[case]
    ((expected, config),) = run_ranks(run, 1, values("alone", {"name": "fsdp2"}, norm, 4))
    for losses, written in run_ranks(run, 2, values("shared", engine, norm, 2)):
        assert losses == pytest.approx(expected, rel=2e-4)
        assert written == config


def test_a_run_with_held_out_data_and_experts_saves(values: Callable[..., dict[str, Any]]) -> None:
    """Each evaluation leaves FSDP2's parameters gathered, and a checkpoint, an average and the end follow."""
    asked = values("run", {"name": "fsdp2", "expert_parallel": 2}, 0.5, 2)
    asked["data"]["held_out"] = 0.2
    asked["train"] |= {"steps": 2, "evaluate_every": 1}
    asked |= {"checkpoint": {"every": 1}, "ema": {"decay": 0.5, "evaluate": True}}
    for losses, _ in run_ranks(run, 2, asked):
        assert len(losses) == 2
    directory = Path(asked["output"]["directory"])
    assert list(directory.glob("*.safetensors"))
    assert len(list(directory.glob("checkpoints/*/state.json"))) == 2
