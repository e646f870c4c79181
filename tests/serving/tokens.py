"""Greedy generation with transformers."""

from pathlib import Path
from typing import Any

import torch

PROMPT = [5, 9, 33, 71, 2, 8]


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """Return the ``count`` tokens after ``prompt``, in fp32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    inputs = torch.tensor([prompt])
    outputs = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in outputs[0, len(prompt) :]]
