"""Small models of the served families, in their hub layouts."""

import json
from pathlib import Path

from zerostart.models.synth import synthesise

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, **_MOE},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 64,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        # The latent attention's kernels have these sizes and no others.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_nextn_predict_layers": 0,
        **_MOE,
    },
}


def create_checkpoint(family: str, folder: Path, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a checkpoint of ``family`` with random weights."""
    config = folder / f"{family}-{seed}.json"
    config.write_text(json.dumps({**_SIZES, "model_type": family, **FAMILIES[family]}))
    out = folder / f"{family}-{dtype}-{seed}"
    synthesise(config, out, dtype=dtype, seed=seed)
    return out
