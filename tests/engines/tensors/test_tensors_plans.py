"""Refuse DeepSpeed's tensor-parallel rules that contradict the model's own plan and would train wrongly."""

from pathlib import Path
from typing import Any

import pytest

import zerostart
from tests.engines.tensors.sharing import TENSOR_PARALLEL, Case, config_of, load_case
from tests.parity import checkpoint
from tests.ranks import run_ranks
from zerostart.errors import ConfigError, EngineError


def make_plan(path: Path, preset: str | None, **options: Any) -> None:
    section = {} if preset is None else {"tensor_parallel": {"preset_model": preset}}
    zerostart.plan(
        path, world_size=2, engine="deepspeed", tensor_parallel=2, **{"engine_config": section, **options}
    )


@pytest.mark.parametrize(
    ("kind", "preset", "message"),
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
def test_rules_that_train_wrongly_are_refused(
    kind: str, preset: str | None, message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan(checkpoint(kind, folder), preset)
    assert message in str(raised.value)
    assert "use engine='fsdp2', which runs it by its own plan" in str(raised.value)


def test_experts_with_sliced_tensors_name_the_other_engine(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unsupported partition style.*use engine='fsdp2'"):
        make_plan(checkpoint("deepseek_v2", folder), None, expert_parallel=2)


@pytest.mark.parametrize("preset", ["bloom", None])
def test_position_bias_by_head_is_refused(preset: str | None, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"BloomForCausalLM has a position bias for each head \(ALiBi\)"):
        make_plan(checkpoint("bloom", folder), preset)


def test_dropout_of_uneven_heads_is_refused(folder: Path) -> None:
    path = checkpoint("qwen3", folder, num_attention_heads=3, num_key_value_heads=3, attention_dropout=0.1)
    with pytest.raises(ConfigError, match="does not divide the heads of Qwen3ForCausalLM"):
        make_plan(path, None)


@pytest.mark.parametrize(
    ("kind", "preset"),
    [("llama", "llama"), ("llama", "qwen2"), ("gemma3_text", None), ("mixtral", "mixtral")],
)
def test_matching_rules_are_accepted(kind: str, preset: str | None, folder: Path) -> None:
    make_plan(checkpoint(kind, folder), preset)


@pytest.mark.slow
def test_adapters_of_sliced_layers_are_refused(folder: Path) -> None:
    run_ranks(check_adapters, 2, checkpoint("llama", folder), checkpoint("qwen3_moe", folder))


def check_adapters(path: Path, mixture: Path) -> None:
    from peft import LoraConfig, get_peft_model

    for stage in (2, 3):
        options: dict[str, Any] = {"engine": "deepspeed", "zero_stage": stage, "progress": False}
        model = zerostart.load(path, tensor_parallel=2, **options)
        with pytest.raises(ValueError, match=r"LinearAllreduce.* is not supported"):  # PEFT's own
            get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
        model = zerostart.load(mixture, expert_parallel=2, **options)
        with pytest.raises(ConfigError, match="was added to experts of Qwen3MoeForCausalLM"):
            get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))


@pytest.mark.slow
def test_an_engine_with_other_slices_than_the_load_is_refused(folder: Path) -> None:
    run_ranks(check_other_slices, TENSOR_PARALLEL, checkpoint("qwen3", folder))


def check_other_slices(path: Path) -> None:
    import deepspeed

    case = Case(path, 2)
    model, config = load_case(case), config_of(case)
    for section, text in (
        ({"autotp_size": 1}, "loaded with tensor_parallel=2"),
        ({"autotp_size": 2, "preset_model": "qwen2"}, "another preset_model"),
    ):
        with pytest.raises(EngineError, match=text):
            deepspeed.initialize(model=model, config={**config, "tensor_parallel": section})
