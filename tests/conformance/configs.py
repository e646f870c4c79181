"""Small configurations: the library's defaults, shrunk, with changes for single types."""

from collections.abc import Mapping
from typing import Any

from zerostart.models.shrink import tiny

Fields = Mapping[str, Any]

#: A convolutional backbone instead of one from a library that is not installed.
_RESNET: Fields = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_SWIN: Fields = {
    "model_type": "swin",
    "image_size": 32,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_DETR: Fields = {"backbone_config": _RESNET}
_DPT: Fields = {
    "backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "out_features": None},
    "neck_hidden_sizes": [8, 12, 16, 20],
    "fusion_hidden_size": 24,
}
_AUDIO: Fields = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_SAPIENS_HEAD: Fields = {"upsample_out_channels": [16, 8], "conv_out_channels": [8, 8]}
_SAPIENS_DEEP: Fields = {
    "head_config": {**_SAPIENS_HEAD, "upsample_kernel_sizes": [4, 4], "conv_kernel_sizes": [1, 1]}
}

#: Fields set after shrinking, by model type or identifier. Nested mappings are merged, unless they have
#: another model type.
OVERRIDES: Mapping[str, Fields] = {
    "BeitForSemanticSegmentation": {
        "num_hidden_layers": 4,
        "out_indices": [1, 2, 3, 4],
        "out_features": None,
    },
    "conditional_detr": _DETR,
    "detr": _DETR,
    "ConditionalDetrForSegmentation": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "DetrForSegmentation": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "dinov3_convnext": {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1]},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "emu3_vqgan": {
        "codebook_size": 32,
        "base_channels": 32,
        "num_res_blocks": 1,
        "channel_multiplier": [1, 1],
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 16],
        "rope_parameters": {"mrope_section": [3, 3, 2]},
    },
    "esm": {"vocab_size": 33},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 64}},
    "granite_speech_encoder": {"hidden_dim": 64, "dim_head": 16},
    "granite_speech_plus_encoder": {"hidden_dim": 64, "dim_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_vision_model": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4},
    "maskformer": {"backbone_config": _SWIN},
    "mimi": {"upsample_groups": 32, "num_filters": 4, "codebook_size": 32},
    "mimi_encoder": {"upsample_groups": 32, "num_filters": 4},
    "mimi_decoder": {"upsample_groups": 32, "num_filters": 4},
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 48},
    "nemotron_h_omni": {"projector_hidden_size": 48, "vision_hidden_size": 64},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "thinker_hidden_size": 64},
        "code2wav_config": {"decoder_dim": 32, "codebook_size": 16},
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 24},
    # Not square: a transposed tensor would otherwise have the expected shape.
    "qwen3_vl_moe_text": {"moe_intermediate_size": 24},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 4,
        "ple_embed_dim": 64,
    },
    "Sapiens2ForImageMatting": _SAPIENS_DEEP,
    "Sapiens2ForNormalEstimation": _SAPIENS_DEEP,
    "Sapiens2ForPointmapEstimation": _SAPIENS_DEEP,
    "Sapiens2ForPoseEstimation": _SAPIENS_DEEP,
    "Sapiens2ForSemanticSegmentation": _SAPIENS_DEEP,
    "sam3_tracker_video": {
        "memory_attention_hidden_size": 64,
        "memory_attention_feed_forward_hidden_size": 128,
        "memory_encoder_hidden_size": 64,
        "mask_downsampler_embed_dim": 64,
        "memory_fuser_embed_dim": 64,
    },
    "sam3_vision_model": {"fpn_hidden_size": 64},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "tipsv2_dpt": _DPT,
    "vibevoice_acoustic_tokenizer_encoder": _AUDIO,
    "vibevoice_semantic_tokenizer_encoder": _AUDIO,
    "vit_mae": {
        "decoder_num_attention_heads": 4,
        "decoder_hidden_size": 48,
        "decoder_num_hidden_layers": 2,
        "decoder_intermediate_size": 96,
    },
}


def small_config(kind: Any, identifier: str) -> Any:
    """Return a small configuration for the model class ``kind``.

    Some model types, such as exaone, have a configuration of their own and the class of another model.
    """
    from transformers import CONFIG_MAPPING

    other = identifier in ("exaone", "sarvam_mla", "sarvam_moe")
    config_class = CONFIG_MAPPING[identifier] if other else kind.config_class
    raw = _adjusted(tiny(config_class().to_dict()))
    return config_class.from_dict(_merged(raw, OVERRIDES.get(identifier, {})))


def _adjusted(raw: Fields) -> dict[str, Any]:
    """Apply the changes for the model type of a configuration and of nested ones."""
    nested = {key: _adjusted(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    return _merged(nested, OVERRIDES.get(str(raw.get("model_type")), {}))


def _merged(raw: Fields, changes: Fields) -> dict[str, Any]:
    merged = dict(raw)
    for key, value in changes.items():
        old = merged.get(key)
        another = isinstance(value, Mapping) and "model_type" in value
        inside = isinstance(value, Mapping) and isinstance(old, Mapping) and not another
        merged[key] = _merged(old, value) if inside else value
    if "out_features" in changes or "out_indices" in changes:
        merged.pop("stage_names", None)
    return merged
