"""PEFT on FSDP2 in a loop that prepares nothing: around a model, and beside experts that ranks share."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

LORA = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}


def gradients_around(path: Path) -> list[str]:
    """Where gradients of a prefix are not those of one process, from other seeds on each rank."""
    rank = dist.get_rank()
    batches = torch.arange(32).view(2, 2, 8)
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours: Any = zerostart.load(path, engine="fsdp2", dtype=torch.float32, progress=False)
    found = []
    for model, seed in ((plain, 3), (ours, 3 + rank)):
        torch.manual_seed(seed)
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(model, config)
        batch = batches[rank] if found else batches.flatten(0, 1)
        model(input_ids=batch, labels=batch).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    expected, got = found
    assert expected.keys() == got.keys()
    return [n for n, g in got.items() if not torch.allclose(g, expected[n], rtol=1e-4, atol=1e-7)]


def beside_experts(path: Path) -> None:
    """A LoRA beside experts that ranks share computes, and is not trained on each rank alone."""
    model: Any = zerostart.load(path, engine="fsdp2", expert_parallel=2, progress=False)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert model(input_ids=tokens).logits.isfinite().all()
    with pytest.raises(zerostart.errors.EngineError, match=r"lora_A.*with expert_parallel=2 was added after"):
        model(input_ids=tokens, labels=tokens)


def both(dense: Path, experts: Path) -> list[str]:
    beside_experts(experts)
    return gradients_around(dense)


def test_adapters_that_nothing_prepares(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    assert run_ranks(both, 2, checkpoints("qwen3"), checkpoint("mixtral", tmp_path)) == [[], []]
