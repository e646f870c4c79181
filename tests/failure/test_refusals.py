"""Settings and meshes that an engine or a model cannot serve are refused by name, with the remedy."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate, Shard

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **settings}}


def beyond(parameter: Any) -> Shard:
    return Shard(7)


def uneven(parameter: Any) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 else None


NVME = {"device": "nvme", "nvme_path": "."}
Case = tuple[str, dict[str, Any], str]
#: On 2 ranks.
MESHES: list[Case] = [
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
    (
        "deepspeed",
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_model": "qwen2"}}},
        "leaves some ranks without a slice of model.layers.0.self_attn.q_proj.weight",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_model": "bloom"}}},
        "DeepSpeed shards no layer of Qwen3MoeForCausalLM",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"autotp_size": 4}}},
        "autotp_size=4; use one number for both",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_modell": "qwen2"}}},
        "DeepSpeed rejects engine_config['tensor_parallel']",
    ),
    (
        "deepspeed",
        {
            "tensor_parallel": 2,
            "engine_config": {"tensor_parallel": {"preset_model": "qwen2"}, "tp_plan": {"head": "colwise"}},
        },
        "both tp_plan and a preset_model in tensor_parallel",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "engine_config": zero(zero_hpz_partition_size=2)},
        "tensor_parallel=2 with zero_hpz_partition_size=2 is not available",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "engine_config": zero(offload_param={"device": "nvme", "nvme_path": "/tmp"})},
        "tensor_parallel=2 with offload_param to nvme is not available",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "sequence_parallel": 2},
        "tensor_parallel=2 with sequence_parallel=2 needs 4 ranks for each batch",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "engine_config": {"compile": {"passes": ["autotp"]}}},
        "tensor_parallel=2 with the pass 'autotp'",
    ),
    (
        "deepspeed",
        {"tensor_parallel": 2, "zero_stage": 2, "exchange": True},
        "exchange=True with tensor_parallel=2 is not available on DeepSpeed ZeRO-2",
    ),
]
#: On 3 ranks.
SETTINGS: list[Case] = [
    *(
        ("fsdp2", {"engine_config": config}, text)
        for config, text in (
            ({"shard_placement_fn": 3}, "engine_config['shard_placement_fn'] is not callable"),
            ({"shard_placement_fn": lambda p: Replicate()}, "returned a Replicate"),
            ({"shard_placement_fn": uneven}, "evenly along dimensions other than 0"),
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
        ("deepspeed", {"engine_config": zero(**settings)}, text)
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
    (
        "deepspeed",
        {"engine_config": {"gradient_predivide_factor": 3.0, "zero_optimization": {"reduce_scatter": False}}},
        "gradient_predivide_factor=3.0 for the mean of 3 ranks",
    ),
]


@pytest.mark.parametrize(
    ("world_size", "engine", "options", "text"), [*((2, *c) for c in MESHES), *((3, *c) for c in SETTINGS)]
)
def test_a_plan_refuses_a_mesh_or_a_setting(
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
def test_a_load_refuses_what_this_machine_cannot_do(
    settings: dict[str, Any], text: str, checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(zerostart.ZerostartError, match=text):
        zerostart.load(checkpoints("qwen3_moe"), engine_config=zero(**settings), progress=False)


@pytest.mark.slow
def test_loads_refuse_them_on_every_rank(checkpoints: TinyCheckpoints) -> None:
    run_ranks(refuse_all, 2, checkpoints("qwen3_moe"))


def refuse_all(path: Path) -> None:
    for engine, options, text in MESHES:
        with pytest.raises(zerostart.ZerostartError, match=re.escape(text)):
            zerostart.load(path, engine=engine, progress=False, **options)


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
