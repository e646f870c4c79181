"""DeepSpeed's rules of tensors are held against the model's own plan: what would train wrong is refused."""

from pathlib import Path
from typing import Any

import pytest

import zerostart
from tests.engines.tensors.sharing import SHARING, Case, config_of, loaded
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import ConfigError, EngineError


def planned(path: Path, preset: str | None, **more: Any) -> None:
    section = {} if preset is None else {"tensor_parallel": {"preset_model": preset}}
    zerostart.plan(
        path, world_size=2, engine="deepspeed", tensor_parallel=2, **{"engine_config": section, **more}
    )


@pytest.mark.parametrize(
    ("kind", "preset", "said"),
    [
        ("gemma3_text", "llama", "sum no gradients of model.layers.0.self_attn.q_norm"),
        ("qwen3", "qwen2", "sum no gradients of model.layers.0.self_attn.q_norm"),
        ("deepseek_v2", "deepseek_v2", "sum no gradients behind model.layers.0.self_attn.kv_a_proj_with_mqa"),
        ("olmo2", "llama", "cut model.layers.0.self_attn.q_proj, and do not gather"),
        ("phi3", "phi3", "DeepSpeed does not shard Phi3ForCausalLM over ranks"),
        ("olmo2", None, "unsupported partition style"),
        ("glm4", None, "unsupported partition style"),
        ("phi3", None, "unsupported partition style"),
        ("deepseek_v2", None, "unsupported partition style"),
    ],
)
def test_what_would_train_wrong_is_refused(kind: str, preset: str | None, said: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        planned(checkpoint(kind, folder), preset)
    assert said in str(raised.value)
    assert "use engine='fsdp2', which runs it by its own plan" in str(raised.value)


def test_experts_beside_tensors_name_the_other_engine(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unsupported partition style.*use engine='fsdp2'"):
        planned(checkpoint("deepseek_v2", folder), None, expert_parallel=2)


@pytest.mark.parametrize("preset", ["bloom", None])
def test_heads_that_are_counted(preset: str | None, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"BloomForCausalLM has a position bias for each head \(ALiBi\)"):
        planned(checkpoint("bloom", folder), preset)


def test_dropout_of_heads_that_are_shared_unevenly(folder: Path) -> None:
    path = checkpoint("qwen3", folder, num_attention_heads=3, num_key_value_heads=3, attention_dropout=0.1)
    with pytest.raises(ConfigError, match="does not divide the heads of Qwen3ForCausalLM"):
        planned(path, None)


@pytest.mark.parametrize(
    ("kind", "preset"),
    [("llama", "llama"), ("llama", "qwen2"), ("gemma3_text", None), ("mixtral", "mixtral")],
)
def test_what_fits_is_served(kind: str, preset: str | None, folder: Path) -> None:
    planned(checkpoint(kind, folder), preset)


@pytest.mark.slow
def test_adapters_of_what_ranks_share(folder: Path) -> None:
    run_ranks(adapted, 2, checkpoint("llama", folder), checkpoint("qwen3_moe", folder))


def adapted(path: Path, mixture: Path) -> None:
    from peft import LoraConfig, get_peft_model

    for stage in (2, 3):
        options: dict[str, Any] = {"engine": "deepspeed", "zero_stage": stage, "progress": False}
        model = zerostart.load(path, tensor_parallel=2, **options)
        with pytest.raises(ConfigError, match=r"tensor_parallel=2 slices over ranks: .*LinearAllreduce"):
            get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
        model = zerostart.load(mixture, expert_parallel=2, **options)
        with pytest.raises(ConfigError, match="is an adapter of experts of Qwen3MoeForCausalLM"):
            get_peft_model(model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj"], r=2))


# What DeepSpeed's ranks cannot share of tensors is refused on every rank, before anything is read.


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **settings}}


CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_model": "qwen2"}}},
        "leaves some ranks without a slice of model.layers.0.self_attn.q_proj.weight",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_model": "bloom"}}},
        "DeepSpeed shards no layer of Qwen3MoeForCausalLM",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"autotp_size": 4}}},
        "autotp_size=4; use one number for both",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"tensor_parallel": {"preset_modell": "qwen2"}}},
        "DeepSpeed rejects engine_config['tensor_parallel']",
    ),
    (
        {
            "tensor_parallel": 2,
            "engine_config": {
                "tensor_parallel": {"preset_model": "qwen2"},
                "tp_plan": {"head": "colwise"},
            },
        },
        "both tp_plan and a preset_model in tensor_parallel",
    ),
    (
        {"tensor_parallel": 2, "engine_config": zero(zero_hpz_partition_size=2)},
        "tensor_parallel=2 with zero_hpz_partition_size=2 is not available",
    ),
    (
        {"tensor_parallel": 2, "engine_config": zero(offload_param={"device": "nvme", "nvme_path": "/tmp"})},
        "tensor_parallel=2 with offload_param to nvme is not available",
    ),
    (
        {"tensor_parallel": 2, "sequence_parallel": 2},
        "tensor_parallel=2 with sequence_parallel=2 needs 4 ranks for each batch",
    ),
    (
        {"tensor_parallel": 2, "engine_config": {"compile": {"passes": ["autotp"]}}},
        "tensor_parallel=2 with the pass 'autotp'",
    ),
    (
        {"tensor_parallel": 2, "zero_stage": 2, "exchange": True},
        "exchange=True with tensor_parallel=2 is not available on DeepSpeed ZeRO-2",
    ),
]


@pytest.mark.parametrize(("options", "text"), CASES)
def test_a_plan_refuses(options: dict[str, Any], text: str, checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(zerostart.ZerostartError) as raised:
        zerostart.plan(checkpoints("qwen3_moe"), world_size=2, **options)
    assert text in str(raised.value)


@pytest.mark.slow
def test_loads_and_engines_refuse_on_every_rank(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    run_ranks(refused, SHARING, checkpoints("qwen3_moe"), checkpoint("qwen3", tmp_path))


def refused(mixture: Path, path: Path) -> None:
    import deepspeed

    for options, text in CASES:
        with pytest.raises(zerostart.ZerostartError) as raised:
            zerostart.load(mixture, progress=False, **options)
        assert text in str(raised.value)
    case = Case(path, 2)
    model, config = loaded(case), config_of(case)
    for section, text in (
        ({"autotp_size": 1}, "loaded with tensor_parallel=2"),
        ({"autotp_size": 2, "preset_model": "qwen2"}, "another preset_model"),
    ):
        with pytest.raises(EngineError, match=text):
            deepspeed.initialize(model=model, config={**config, "tensor_parallel": section})
