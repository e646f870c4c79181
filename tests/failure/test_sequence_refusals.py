"""Unsupported sequence parallelism is refused on all ranks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def qwen3(**settings: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
    attention = settings.pop("attn_implementation", None)
    config = AutoConfig.for_model(settings.pop("kind", "qwen3"), **{**sizes, **heads, **settings})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=11, hidden_size=12, state_size=4, num_hidden_layers=1))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=11, **sizes))


SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
LATENT = {"kind": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 1}
#: (Model, engine, arguments of the load, part of the message).
CASES: list[tuple[Callable[[], nn.Module], str, dict[str, Any], str]] = [
    (qwen3, "deepspeed", {"sequence_parallel": 4}, "sequence_parallel=4 does not divide the 6 ranks"),
    (
        lambda: qwen3(num_attention_heads=8),
        "deepspeed",
        {"sequence_parallel": 3},
        "does not divide the 8 of num_attention_heads",
    ),
    (
        lambda: qwen3(attn_implementation="eager"),
        "deepspeed",
        {"sequence_parallel": 2},
        "which has the attention implementation 'eager'; build it with attn_implementation='sdpa'",
    ),
    (
        lambda: qwen3(**SLIDING),
        "fsdp2",
        {"sequence_parallel": 2},
        "which has layers of type sliding_attention",
    ),
    (lambda: qwen3(**LATENT), "deepspeed", {"sequence_parallel": 2}, "which has latent attention"),
    (
        mamba,
        "deepspeed",
        {"sequence_parallel": 2},
        "carry a state from token to token",
    ),
    (bert, "deepspeed", {"sequence_parallel": 2}, "which has attention that looks ahead"),
    (
        lambda: nn.Linear(2, 2),
        "deepspeed",
        {"sequence_parallel": 2},
        "which has attention that zerostart knows nothing of",
    ),
]


@pytest.mark.parametrize(("model", "engine", "options", "text"), CASES)
def test_unsupported_models_are_refused_with_a_remedy(
    model: Callable[[], nn.Module], engine: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(zerostart.errors.ConfigError, match=re.escape(text)) as caught:
        zerostart.plan({}, world_size=6, engine=engine, model=model, **options)
    assert re.search("; (use|build|pass|leave)|leave", str(caught.value))


@pytest.mark.slow
def test_refusals_of_sinks_and_on_every_rank(checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(zerostart.errors.ConfigError, match="which has attention sinks"):
        zerostart.plan(checkpoints("gpt_oss"), world_size=2, sequence_parallel=2)
    for text in run_ranks(load_and_refuse, 2, checkpoints("qwen3")):
        assert "does not divide the 3 of num_attention_heads in Qwen3ForCausalLM" in text


def load_and_refuse(path: Path) -> str:
    with pytest.raises(zerostart.errors.ConfigError) as caught:
        zerostart.load(path, sequence_parallel=2, progress=False)
    return str(caught.value)
