"""A library of models that zerostart does not know, and its own, pass what such libraries have to pass."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.extending.toy_library import Toy, ToyModel
from zerostart import models
from zerostart.errors import ConfigError
from zerostart.models import registry
from zerostart.testing import ModelLibraryConformance


class TestToy(ModelLibraryConformance):
    library = "toy"
    kind = ToyModel
    missing = "block/1/w"

    def write(self, root: Path) -> None:
        torch.manual_seed(3)
        ToyModel(words=13, width=6, layers=3).save(root)

    def left(self, model: nn.Module) -> Any:
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

    def left(self, model: Any) -> Any:
        return model.config.name_or_path, model.config.dtype, len(model._weight_conversions)


def test_a_name_is_registered_once() -> None:
    models.register_model_library(Toy)
    with pytest.raises(ConfigError, match="'toy' is already registered"):
        models.register_model_library(type("Toy", (Toy,), {}))
    with pytest.raises(ConfigError, match="'plain' is already registered"):
        models.register_model_library(type("Plain", (Toy,), {"name": "plain"}))


def _installed(folder: Path, value: str) -> None:
    """A package in ``folder`` whose entry point is ``value``."""
    info = folder / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[zerostart.model_libraries]\nothers = {value}\n")


@pytest.mark.parametrize("value", ["others:Others", "others.absent:Others"])
def test_an_installed_library_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, request: pytest.FixtureRequest
) -> None:
    _installed(tmp_path, value)
    (tmp_path / "others.py").write_text(
        "from tests.extending.toy_library import Toy\n"
        "class Model: pass\n"
        "class Others(Toy):\n"
        "    name = 'others'\n"
        "    def handles(self, kind): return kind is Model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(registry._installed.cache_clear)
    registry._installed.cache_clear()
    if "absent" in value:
        with pytest.raises(
            ConfigError, match=r"model library others \(others\.absent:Others\).*uninstall it"
        ):
            models.library_of(nn.Linear)
    else:
        others = importlib.import_module("others")
        assert models.library_of(others.Model).name == "others"
        assert models.library_of(ToyModel).name == "toy"
