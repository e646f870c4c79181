"""Check the private parts of other libraries that ``zerostart.upstream`` uses."""

import sys
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.loaders import single_file_model

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.accelerate import plugins as ac
from zerostart.upstream.deepspeed import zero3_optimizer as ds3
from zerostart.upstream.deepspeed import zero3_start as start
from zerostart.upstream.diffusers import weights as df
from zerostart.upstream.transformers import loading
from zerostart.upstream.transformers.models import without_weights


def test_a_changed_start_of_the_zero3_optimizer_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warn once about a method with another source, and use DeepSpeed's start."""
    assert start.is_known()
    monkeypatch.setattr(ds3.require_stage3(), "initialize_optimizer_states", lambda self: None)
    start.is_known.cache_clear()
    assert not start.is_known()
    assert not start.is_known()
    assert caplog.text.count("initialize_optimizer_states has changed") == 1
    start.is_known.cache_clear()


def test_unknown_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    ac.require_version.cache_clear()
    monkeypatch.setattr(accelerate, "__version__", "1.0.0")
    with pytest.raises(UnsupportedVersionError, match=r"accelerate 1\.0\.0 is installed"):
        ac.require_version()
    ac.require_version.cache_clear()

    def changed(model: Any, files: Any) -> None: ...

    loading.require_version.cache_clear()
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", changed)
    with pytest.raises(
        UnsupportedVersionError,
        match=r"it takes \(model, files\), not \(model, state_dict, .*use zerostart.load",
    ):
        loading.require_version()
    loading.require_version.cache_clear()


TABLE = single_file_model.SINGLE_FILE_LOADABLE_CLASSES


@pytest.mark.parametrize("name", TABLE)
def test_the_converter_is_diffusers_choice(name: str) -> None:
    """zerostart finds an entry by name, diffusers by importing the whole table."""
    kind = getattr(diffusers, name, None)
    if kind is None:  # StableCascadeUNet: the class has another name
        pytest.skip(f"diffusers has no class {name}")
    expected = TABLE[single_file_model._get_single_file_loadable_mapping_class(kind)]
    assert df.original_layout(kind)[0] is expected["checkpoint_mapping_fn"]
    assert df.original_layout(type("Mine", (kind,), {}))[0] is expected["checkpoint_mapping_fn"]


def test_a_model_inside_a_model_is_built_on_meta_too() -> None:
    """transformers itself would partition the vision part."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, modeling_utils
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 32}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    active = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    before = "deepspeed" in sys.modules
    try:
        assert active.is_zero3()
        with without_weights(torch.float32):
            model = Qwen2_5_VLModel(config)
        assert not modeling_utils._is_ds_init_called
        with modeling_utils.set_zero3_state(), without_weights(torch.float32):
            Qwen2_5_VLModel(config)
            assert modeling_utils._is_ds_init_called
    finally:
        unset_hf_deepspeed_config()
    assert ("deepspeed" in sys.modules) == before
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not [name for name, p in model.named_parameters() if hasattr(p, "ds_id")]
