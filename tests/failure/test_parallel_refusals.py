"""Meshes that an engine or a model cannot serve are refused on every rank, and never loaded otherwise."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Shard

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **settings}}


def beyond(parameter: Any) -> Shard:
    return Shard(7)


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("deepspeed", {"expert_parallel": 3}, "expert_parallel=3 does not divide the 2 ranks"),
    ("deepspeed", {"tensor_parallel": 2}, "DeepSpeed does not shard Qwen3MoeForCausalLM over ranks"),
    ("fsdp2", {"tensor_parallel": 2}, "does not divide the 3 of num_attention_heads"),
    ("fsdp2", {"expert_parallel": 2, "tensor_parallel": 2}, "does not divide the 3 of num_attention_heads"),
    ("deepspeed", {"expert_parallel": 2, "zero_stage": 0}, "expert_parallel with zero_stage=0 is not"),
    (
        "deepspeed",
        {
            "expert_parallel": 2,
            "zero_stage": 1,
            "engine_config": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        },
        "BF16_Optimizer, which reduces gradients of experts only in DeepSpeed's own layers",
    ),
    (
        "deepspeed",
        {
            "expert_parallel": 2,
            "zero_stage": 2,
            "engine_config": {"zero_optimization": {"stage": 2, "reduce_scatter": False}},
        },
        "experts at stages 1 and 2 only with reduce_scatter",
    ),
    (
        "deepspeed",
        {
            "expert_parallel": 2,
            "engine_config": {"expert_parallel": {"enabled": True, "autoep_size": 4}},
        },
        "engine_config['expert_parallel'] has autoep_size=4; use one number for both",
    ),
    (
        "deepspeed",
        {"expert_parallel": 2, "engine_config": zero(zero_hpz_partition_size=2)},
        "expert_parallel=2 with zero_hpz_partition_size=2 is not available",
    ),
    (
        "fsdp2",
        {"expert_parallel": 2, "engine_config": {"replicate": 2}},
        "replicate=2 with expert_parallel=2 does not divide the 2 ranks",
    ),
    (
        "fsdp2",
        {"tensor_parallel": 2, "engine_config": {"replicate": 2}},
        "replicate=2 with tensor_parallel=2 does not divide the 2 ranks",
    ),
    (
        "fsdp2",
        {"tensor_parallel": 2, "engine_config": {"reshard_after_forward": 2}},
        "reshard_after_forward to True or False",
    ),
    (
        "fsdp2",
        {"expert_parallel": 2, "engine_config": {"shard_placement_fn": beyond}},
        "for model.embed_tokens.weight, which has 2 dimensions; use Shard(dim) of one of them, or None",
    ),
]


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_an_expert_plan_without_the_biases(engine: str, checkpoints: TinyCheckpoints) -> None:
    plan = dict.fromkeys(
        (f"model.layers.*.mlp.experts.{leaf}_proj" for leaf in ("gate_up", "down")), "grouped_gemm"
    )
    with pytest.raises(
        zerostart.ZerostartError, match=r"leaves model.layers.0.mlp.experts.gate_up_proj_bias whole"
    ):
        zerostart.plan(
            checkpoints("gpt_oss"), 2, engine=engine, expert_parallel=2, engine_config={"ep_plan": plan}
        )


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "options", "text"), CASES)
def test_refused_with_the_remedy(
    engine: str, options: dict[str, Any], text: str, checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(zerostart.ZerostartError, match=re.escape(text)):
        zerostart.plan(checkpoints("qwen3_moe"), world_size=2, engine=engine, **options)
    for message in run_ranks(refused, 2, engine, checkpoints("qwen3_moe"), options):
        assert message is not None
        assert text in message
        assert "use " in message


def refused(engine: str, path: Path, options: dict[str, Any]) -> str | None:
    try:
        zerostart.load(path, engine=engine, progress=False, **options)
    except zerostart.ZerostartError as error:
        return str(error)
    return None
