"""Unsupported settings and meshes are refused with a remedy."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def zero_config(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **settings}}


def shard_missing_dimension(parameter: Any) -> Shard:
    return Shard(7)


def shard_uneven_dimension(parameter: Any) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 else None


NVME = {"device": "nvme", "nvme_path": "."}
Case = tuple[str, dict[str, Any], str]
#: Cases on 2 ranks; those refused for any model are in `tests/contract/combinations.py`.
MESHES: list[Case] = [
    ("deepspeed", {"tensor_parallel": 2}, "DeepSpeed does not shard Qwen3MoeForCausalLM over ranks"),
    ("fsdp2", {"tensor_parallel": 2}, "does not divide the 3 of num_attention_heads"),
    ("deepspeed", {"expert_parallel": 2, "zero_stage": 0}, "expert_parallel with zero_stage=0 is not"),
    (
        "deepspeed",
        {"expert_parallel": 2, "engine_config": zero_config(zero_hpz_partition_size=2)},
        "expert_parallel=2 with zero_hpz_partition_size=2 is not available",
    ),
    (
        "fsdp2",
        {"expert_parallel": 2, "engine_config": {"shard_placement_fn": shard_missing_dimension}},
        "for model.embed_tokens.weight, which has 2 dimensions; use Shard(dim) of one of them, or None",
    ),
    *(
        ("deepspeed", {"tensor_parallel": 2, "engine_config": {"tensor_parallel": section}}, text)
        for section, text in (
            (
                {"preset_model": "qwen2"},
                "leaves some ranks without a slice of model.layers.0.self_attn.q_proj",
            ),
            ({"preset_model": "bloom"}, "DeepSpeed shards no layer of Qwen3MoeForCausalLM"),
            ({"preset_modell": "qwen2"}, "DeepSpeed rejects engine_config['tensor_parallel']"),
        )
    ),
]
#: Cases on 3 ranks.
SETTINGS: list[Case] = [
    *(
        ("fsdp2", {"engine_config": config}, text)
        for config, text in (
            ({"shard_placement_fn": 3}, "engine_config['shard_placement_fn'] is not callable"),
            ({"shard_placement_fn": lambda p: Replicate()}, "returned a Replicate"),
            ({"shard_placement_fn": shard_uneven_dimension}, "evenly along dimensions other than 0"),
            ({"wrap": "Qwen3DecoderLayer"}, "engine_config['wrap']='Qwen3DecoderLayer' is not a list"),
            ({"wrap": ["model.layer.*"]}, "'model.layer.*', but no module"),
            ({"replicate": 0}, "engine_config['replicate']=0 must be a number of replicas"),
            ({"replicat": 2}, "has the unknown key 'replicat'; did you mean 'replicate'?"),
            ({"mp_policy": "bf16"}, "engine_config['mp_policy'] is a str"),
            ({"offload_policy": CPUOffloadPolicy()}, "CPUOffloadPolicy(pin_memory=False)"),
            ({"reshard_after_forward": 2}, "divisor of the 3 ranks"),
        )
    ),
    *(
        ("deepspeed", {"engine_config": zero_config(**settings)}, text)
        for settings, text in (
            ({"stage": 2}, "asks for ZeRO stage 2, but the load for stage 3"),
            ({"zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2 does not divide the 3 ranks"),
            ({"zero_hpz_partition_size": 3, "offload_param": NVME}, "secondary partitions"),
            ({"offload_param": {"device": "tape"}}, "'tape' is unknown"),
            ({"offload_param": {"device": "nvme"}}, "needs nvme_path"),
        )
    ),
    (
        "fsdp2",
        {"tensor_parallel": 3, "engine_config": {"tp_plan": {"lm_head": "column"}}},
        "gives lm_head.weight the style 'column'; known are ",
    ),
    (
        "fsdp2",
        {"expert_parallel": 3, "engine_config": {"ep_plan": {"layers.*.mlp.experts": "all"}}},
        "has the styles all; known are grouped_gemm",
    ),
]


@pytest.mark.parametrize(
    ("world_size", "engine", "options", "text"), [*((2, *c) for c in MESHES), *((3, *c) for c in SETTINGS)]
)
def test_plan_refuses_meshes_and_settings(
    world_size: int, engine: str, options: dict[str, Any], text: str, checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(zerostart.ZerostartError, match=re.escape(text)):
        zerostart.plan(checkpoints("qwen3_moe"), world_size=world_size, engine=engine, **options)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mics_shard_size": 2}, "MiCS"),
        ({"zero_quantized_weights": True}, "quantising kernels"),
        ({"zero_quantized_nontrainable_weights": True}, "quantising kernels"),
    ],
)
def test_load_refuses_features_that_need_kernels(
    settings: dict[str, Any], text: str, checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(zerostart.ZerostartError, match=text):
        zerostart.load(checkpoints("qwen3_moe"), engine_config=zero_config(**settings), progress=False)


@pytest.mark.slow
def test_load_refuses_meshes_on_every_rank(checkpoints: TinyCheckpoints) -> None:
    run_ranks(refuse_all, 2, checkpoints("qwen3_moe"))


def refuse_all(path: Path) -> None:
    for engine, options, text in MESHES:
        with pytest.raises(zerostart.ZerostartError, match=re.escape(text)):
            zerostart.load(path, engine=engine, progress=False, **options)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_expert_plan_without_biases_is_refused(engine: str, checkpoints: TinyCheckpoints) -> None:
    plan = dict.fromkeys(
        (f"model.layers.*.mlp.experts.{leaf}_proj" for leaf in ("gate_up", "down")), "grouped_gemm"
    )
    with pytest.raises(
        zerostart.ZerostartError, match=r"but not model.layers.0.mlp.experts.gate_up_proj_bias"
    ):
        zerostart.plan(
            checkpoints("gpt_oss"), 2, engine=engine, expert_parallel=2, engine_config={"ep_plan": plan}
        )
