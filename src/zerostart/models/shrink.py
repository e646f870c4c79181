"""Shrink configurations: the same architecture and layout with small sizes.

Works on the dictionary of a transformers configuration, by the names of fields in the library's
architectures. Other fields do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from zerostart.checkpoint.strict_json import JsonObject

_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
#: Names of sizes by their maximum. The vocabulary is odd, so that no even number of ranks divides it; the
#: others keep the relations that models check.
_TINY: Mapping[int, tuple[str, ...]] = {
    257: ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input", "n_words"),
    128: (
        *("intermediate_size", "intermediate_size_mlp", "n_inner", "d_inner", "ffn_dim", "d_ff", "mlp_dim"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "mamba_d_ssm"),
        *("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"),
    ),
    64: (
        *("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "embedding_dim"),
        *("embedding_size", "attention_hidden_size", "text_hidden_size", "out_hidden_size"),
        *("projection_dim", "word_embed_proj_dim"),
        *("sliding_window", "attention_window_size", "original_max_position_embeddings"),
    ),
    56: ("image_size",),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank"),
    16: (
        *("head_dim", "global_head_dim", "v_head_dim", "index_head_dim", "d_head", "d_kv", "kv_channels"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head", "kv_lora_rank"),
    ),
    8: (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "mamba_n_heads"),
        *("hidden_size_per_layer_input",),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "index_n_heads"),
        *("encoder_attention_heads", "decoder_attention_heads", "linear_num_value_heads"),
    ),
    2: (
        *(*_LAYERS, "n_recurrent_layers"),
        *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"),
        *("top_k_experts", "moe_top_k", "n_group", "num_expert_group", "num_expert_groups"),
        *("linear_num_key_heads", "attn_layer_period", "expert_layer_period"),
    ),
    1: (
        *("topk_group", "n_shared_experts", "first_k_dense_replace"),
        *("attn_layer_offset", "expert_layer_offset"),
    ),
    0: ("num_kv_shared_layers", "n_input_layers", "n_output_layers"),
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_global_key_value_heads")


def tiny(config: JsonObject) -> JsonObject:
    """Shrink a configuration to a few hundred thousand parameters.

    2 layers, hidden size 64, 4 heads of 16 (2 for grouped keys and values), 8 experts with 2 active, and a
    vocabulary of 257.
    """
    result: JsonObject = {k: tiny(v) if _is_nested(k, v) else v for k, v in config.items()}
    for target, keys in _TINY.items():
        # A configuration may be tiny already.
        result.update({key: min(config[key], target) for key in keys if _is_size(config.get(key))})
    _shrink_attention(config, result)
    _set_layers(config, result, {key: result[key] for key in _LAYERS if _is_size(config.get(key))})
    _clip_token_ids(result)
    _shrink_rotary_sections(result)
    _shrink_outputs(config, result)
    return result


def _shrink_attention(config: JsonObject, result: JsonObject) -> None:
    grouped = _first_of(config, _KV_HEADS)
    heads = _first_of(config, ("num_attention_heads", "n_head", "num_heads"))
    for key in _KV_HEADS:
        if _is_size(config.get(key)):
            # Grouped keys and values stay grouped.
            result[key] = min(config[key], 4 if grouped == heads else 2)
    if _is_size(config.get("expand")) and _is_size(config.get("num_heads")):
        result["num_heads"] = config["expand"] * 64 // 16  # Mamba 2: heads of 16 share the expanded width
    if "head_dim" in config and config["head_dim"] is None:
        result["head_dim"] = 16  # for models that do not compute it
    if "qk_head_dim" in config:
        result["qk_head_dim"] = result.get("qk_nope_head_dim", 0) + result.get("qk_rope_head_dim", 0)
    # Latent attention: the head size repeats the size of the rotated part, or of the whole.
    for key in ("qk_head_dim", "qk_rope_head_dim"):
        if _is_size(config.get(key)) and config.get("head_dim") == config[key]:
            result["head_dim"] = result[key]


def _is_nested(key: str, value: object) -> TypeGuard[JsonObject]:
    if not isinstance(value, Mapping) or key in ("quantization_config", "per_layer_config"):
        return False
    return key.endswith("_config") or "model_type" in value


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _first_of(config: JsonObject, keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if _is_size(config.get(key))), None)


def _set_layers(config: Mapping[str, object], result: dict[str, object], layers: Mapping[str, int]) -> None:
    result.update(layers)
    if not layers:
        return
    # Lists follow the first kind of layers in the configuration.
    main = next(iter(layers))
    before, after = config[main], layers[main]
    for key, value in config.items():
        if key == "per_layer_config" and isinstance(value, Mapping):
            result[key] = {layer: own for layer, own in value.items() if int(layer) < after}
        if not isinstance(value, list | tuple) or not value:
            continue
        # A list has an entry for each layer, or numbers of layers.
        if len(value) == before:
            result[key] = _resample(list(value), after)
        elif key.endswith(("_layers", "_indexes", "_indices", "_idx", "_ids")) and all(map(_is_index, value)):
            result[key] = [position for position in value if position < after]


def _is_index(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _resample(kinds: list[object], count: int) -> list[object]:
    result = [kinds[position % len(kinds)] for position in range(count)]
    # Keep kinds of layers (sliding, full, linear) if there is room: each has its own code.
    missing = [kind for at, kind in enumerate(kinds) if kind not in kinds[:at] and kind not in result]
    room = max(0, count - 1)
    tail = missing[:room]
    return result[: count - len(tail)] + tail


def _clip_token_ids(config: dict[str, object]) -> None:
    vocabulary = config.get("vocab_size")
    if not _is_size(vocabulary):
        return
    for key, value in config.items():
        if not key.endswith("_token_id"):
            continue
        if isinstance(value, list):
            config[key] = [min(entry, vocabulary - 1) for entry in value]
        elif _is_index(value):
            config[key] = min(value, vocabulary - 1)


def _shrink_rotary_sections(config: dict[str, object]) -> None:
    """Divide half of a head among time, height and width."""
    head = config.get("head_dim")
    if not _is_size(head):
        head = (_first_of(config, ("hidden_size",)) or 0) // (
            _first_of(config, ("num_attention_heads",)) or 1
        )
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and isinstance(rope.get("mrope_section"), list) and head:
            half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
            side = half // 4
            config[key] = {**rope, "mrope_section": [half - 2 * side, side, side]}


def _shrink_outputs(config: JsonObject, result: JsonObject) -> None:
    stages, chosen = config.get("stage_names"), config.get("out_indices")
    layers = next((result[key] for key in _LAYERS if _is_size(result.get(key))), None)
    if not isinstance(stages, list) or not isinstance(chosen, list | tuple) or layers is None:
        return
    if len(stages) == layers + 1:
        return
    del result["stage_names"]  # the library derives them from the number of layers
    result["out_features"] = None
    result["out_indices"] = list(range(max(1, layers + 1 - len(chosen)), layers + 1))
