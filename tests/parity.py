"""Train in one process on the whole batch, as reference for parallel training.

Tiny fp32 models with 8 experts; sizes divide by 4 and suit torch's grouped matrix product.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks

STEPS, ROWS, LENGTH, VOCABULARY = 5, 4, 12, 96
LEARNING_RATE, CLIP = 1e-2, 0.5

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
_DEEPSEEK: Mapping[str, Any] = {
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"intermediate_size": 32},
    "bert": {
        "intermediate_size": 32,
        "is_decoder": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "starcoder2": {"intermediate_size": 32},
    "gpt_neox": {"intermediate_size": 32},
    "phi": {"intermediate_size": 32},
    "qwen3": {"intermediate_size": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "intermediate_size": 32,
        "moe_intermediate_size": 8,
        "num_experts": 8,
        "mlp_only_layers": [1],
    },
    "mixtral": {"intermediate_size": 8, "num_local_experts": 8},
    "gpt_oss": {
        "intermediate_size": 8,
        "num_local_experts": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_text": {"intermediate_size": 32, "sliding_window": 4},
    "gemma4_text": {
        "intermediate_size": 32,
        "sliding_window": 4,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 2,
    },
    "olmo2": {"intermediate_size": 32},
    "glm4": {"intermediate_size": 32, "pad_token_id": 0},
    "phi3": {"intermediate_size": 32, "pad_token_id": 0},
    "falcon": {
        "head_dim": None,
        "bias": False,
        "alibi": False,
        "multi_query": False,
        "new_decoder_architecture": False,
    },
    "bloom": {"n_head": 4, "n_layer": 2},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}


def checkpoint(kind: str, folder: Path, **options: Any) -> Path:
    """Write a tiny checkpoint with random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "-".join([kind, *(f"{name}={value}" for name, value in options.items())])
    if not path.exists():
        settings = {**_COMMON, **_MODELS[kind], **options}
        config = AutoConfig.for_model(kind, **{n: v for n, v in settings.items() if v is not None})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        model.save_pretrained(path)
    return path


def batches(parts: int) -> Iterator[torch.Tensor]:
    """Yield each step's token ids [parts, rows, LENGTH]; ROWS in all."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator).view(parts, -1, LENGTH)


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=1e-4)


@dataclass
class Trace:
    """Losses, gradient norms, the first step's gradients and the final weights of a training."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def step(self, model: torch.nn.Module, optim: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        """Train one step in a process that has the whole model."""
        loss.backward()
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.losses.append(loss.item())
        self.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optim.step()
        optim.zero_grad()


def train_in_one_process(path: Path, load: Callable[[Path], torch.nn.Module] | None = None) -> Trace:
    """Train on the whole batch with only transformers and torch; ``load`` builds another model."""
    from transformers import AutoModelForCausalLM

    model: Any = (load or AutoModelForCausalLM.from_pretrained)(path).train()
    optim, trace = optimizer(model), Trace()
    for batch in batches(1):
        loss = model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        trace.step(model, optim, loss)
    trace.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return trace


@functools.lru_cache(maxsize=16)
def reference(path: Path) -> Trace:
    """Return the cached trace of `train_in_one_process` on a checkpoint, from a fresh process."""
    trace: Trace = run_ranks(train_in_one_process, 1, path)[0]
    return trace


#: Tolerance after five steps for another order of summation, by model type; 1e-5 for others.
ROUNDING = {"gemma4_text": 5e-5}


def differences(actual: Trace, expected: Trace, tolerance: float = 1e-5) -> list[str]:
    """Describe differences above ``tolerance``, relative to each tensor's largest element."""
    lines = []

    def compare(label: str, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.shape != b.shape:
            lines.append(f"{label}: shape {tuple(a.shape)} for {tuple(b.shape)}")
        elif (error := ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item()) > tolerance:
            lines.append(f"{label}: {error:.1e}, ratio {(a.norm() / b.norm()).item():.4f}")

    compare("losses", torch.tensor(actual.losses), torch.tensor(expected.losses))
    compare("norms", torch.tensor(actual.norms), torch.tensor(expected.norms))
    for kind in ("gradients", "weights"):
        a: dict[str, torch.Tensor] = getattr(actual, kind)
        b: dict[str, torch.Tensor] = getattr(expected, kind)
        if a.keys() != b.keys():
            lines.append(f"{kind} differ in names: {sorted(a.keys() ^ b.keys())[:4]}")
        for name in a.keys() & b.keys():
            compare(f"{kind} of {name}", a[name], b[name])
    return lines
