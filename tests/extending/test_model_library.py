"""Run the conformance tests on a model library of another package, and on transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.extending.toy_library import Toy, ToyModel
from zerostart import models
from zerostart.errors import ConfigError
from zerostart.testing import ModelLibraryConformance


class TestToy(ModelLibraryConformance):
    library = "toy"
    kind = ToyModel
    missing = "block/1/w"

    def write(self, root: Path) -> None:
        torch.manual_seed(3)
        ToyModel(words=13, width=6, layers=3).save(root)

    def loaded_attributes(self, model: nn.Module) -> Any:
        return model.source


@pytest.mark.slow
class TestTransformers(ModelLibraryConformance):
    library = "transformers"
    kind = Qwen3MoeForCausalLM
    missing = "model.layers.1.mlp.gate.weight"

    def write(self, root: Path) -> None:
        torch.manual_seed(3)
        config = Qwen3MoeConfig(
            vocab_size=19,
            hidden_size=8,
            num_hidden_layers=2,
            num_experts=3,
            moe_intermediate_size=4,
            intermediate_size=12,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(root)

    def loaded_attributes(self, model: Any) -> Any:
        return model.config.name_or_path, model.config.dtype, len(model._weight_conversions)


def test_a_name_is_registered_once() -> None:
    models.register_model_library(Toy)
    with pytest.raises(ConfigError, match="'toy' is already registered"):
        models.register_model_library(type("Toy", (Toy,), {}))
    with pytest.raises(ConfigError, match="'plain' is already registered"):
        models.register_model_library(type("Plain", (Toy,), {"name": "plain"}))
