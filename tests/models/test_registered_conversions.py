"""The conversions that transformers registers, where a checkpoint does not fit them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerostart.errors import ConversionError
from zerostart.models.libraries.transformers import convert
from zerostart.recipe import SymbolicTensor, Target
from zerostart.upstream.transformers.models import registered_conversions


def test_a_lost_expert_is_named() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        num_hidden_layers=1,
        num_experts=3,
        hidden_size=8,
        moe_intermediate_size=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=9,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    symbols = {
        name: SymbolicTensor.of(name, (4, 8), torch.float32)
        for expert in range(3)
        for projection in ("gate", "up")
        if (name := f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight").count("1.gate") == 0
    }
    targets = {k: Target(k, tuple(v.shape), v.dtype) for k, v in model.state_dict().items()}
    with pytest.raises(ConversionError, match=r"lacks model\.layers\.0\.mlp\.experts\.1\.gate_proj\.weight"):
        convert(model, registered_conversions(model), symbols, targets)
