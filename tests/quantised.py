"""Tiny fp8 and mxfp4 checkpoints in hub layouts."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.tiny import edit_tensors

#: Tensors that DeepSeek-V3 does not quantise: embeddings, norms, router, head.
UNQUANTISED = re.compile(r"embed_tokens|norm|mlp\.gate\.|lm_head|bias")


def deepseek_v3_fp8(path: Path, block: tuple[int, int], sizes: Mapping[str, int]) -> Path:
    """Write a sharded DeepSeek-V3 with random fp8 weights."""
    save(path, "deepseek_v3", sizes)
    edit_tensors(path, lambda tensors: quantise_fp8(tensors, block))
    finish(path, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)})
    return path


def gpt_oss_mxfp4(path: Path, sizes: Mapping[str, Any]) -> Path:
    """Write gpt-oss with random mxfp4 experts."""
    save(path, "gpt_oss", sizes)
    edit_tensors(path, quantise_mxfp4)
    finish(path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return path


def save(path: Path, model_type: str, sizes: Mapping[str, Any]) -> None:
    """Write random bf16 weights in the hub's layout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="100KB")


def quantise_fp8(tensors: dict[str, torch.Tensor], block: tuple[int, int]) -> None:
    """Quantise linear weights by blocks, partial at the edges."""
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and not UNQUANTISED.search(name):
            rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
            tensors[name] = (weight.float() * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(rows, columns) * 0.02 + 0.001


def quantise_mxfp4(tensors: dict[str, torch.Tensor]) -> None:
    """Replace ``[experts, in, out]`` by ``[experts, out, in/32, 16]`` and scales."""
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        shape = (experts, columns, rows // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 130, shape, dtype=torch.uint8)


def finish(path: Path, quantization: Mapping[str, Any]) -> None:
    """Describe the quantisation in the config, and index all tensors."""
    from safetensors import safe_open

    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization)}))
    index = path / "model.safetensors.index.json"
    if index.exists():
        names: dict[str, str] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as reader:
                names.update(dict.fromkeys(reader.keys(), file.name))
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))


CheckpointWriter = Callable[[Path], Path]
DEEPSEEK = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
}
GPT_OSS = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 64,
}
#: Functions that write a checkpoint, by name.
QUANTISED: Mapping[str, CheckpointWriter] = {
    "deepseek_v3-fp8": lambda path: deepseek_v3_fp8(path, (8, 8), DEEPSEEK),
    "gpt_oss-mxfp4": lambda path: gpt_oss_mxfp4(path, GPT_OSS),
}
