"""Settings of an engine, and rules of a plan, that mean nothing: refused by name, with no rank started."""

from typing import Any

import pytest

import zerostart
from tests.tiny import TinyCheckpoints

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("fsdp2", {"shard_placement_fn": 3}, "engine_config['shard_placement_fn'] is not callable"),
    ("fsdp2", {"wrap": "Qwen3DecoderLayer"}, "engine_config['wrap']='Qwen3DecoderLayer' is not a list"),
    ("fsdp2", {"replicate": 0}, "engine_config['replicate']=0 must be a number of replicas"),
    ("fsdp2", {"replicat": 2}, "has the unknown key 'replicat'; did you mean 'replicate'?"),
    ("fsdp2", {"mp_policy": "bf16"}, "engine_config['mp_policy'] is a str"),
    ("fsdp2", {"tp_plan": {"lm_head": "column"}}, "gives lm_head.weight the style 'column'; known are "),
    (
        "fsdp2",
        {"ep_plan": {"layers.*.mlp.experts": "all"}},
        "has the styles all; known are grouped_gemm",
    ),
    (
        "deepspeed",
        {"gradient_predivide_factor": 3.0, "zero_optimization": {"reduce_scatter": False}},
        "gradient_predivide_factor=3.0 for the mean of 3 ranks",
    ),
]


@pytest.mark.parametrize(("engine", "config", "text"), CASES)
def test_refused_by_name(
    engine: str, config: dict[str, Any], text: str, checkpoints: TinyCheckpoints
) -> None:
    axis = {"tensor_parallel": 3} if "tp_plan" in config else {}
    axis |= {"expert_parallel": 3} if "ep_plan" in config else {}
    with pytest.raises(zerostart.ZerostartError) as raised:
        zerostart.plan(checkpoints("qwen3_moe"), world_size=3, engine=engine, engine_config=config, **axis)
    assert text in str(raised.value)
