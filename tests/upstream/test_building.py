"""Models that are built on meta while the whole process is set up for ZeRO-3."""

import sys

import torch

from zerostart.upstream.transformers.models import without_weights


def test_a_model_inside_a_model_is_built_on_meta_too() -> None:
    """transformers would partition it: of a model with a vision part, this part alone."""
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
