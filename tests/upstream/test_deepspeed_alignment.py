"""Compare the alignment of experts in host memory with stock DeepSpeed.

On CUDA ``torch._grouped_mm`` refuses addresses that are no multiple of 16 bytes; no CUDA kernel runs here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from benchmarks.gpu_check import BATCH, step, watch_expert_addresses
from tests.ranks import run_ranks
from zerostart.models.synth import synthesise


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt_oss with four heads, so that its sinks have 8 bytes in bf16."""
    folder = tmp_path_factory.mktemp("gpt_oss") / "tiny"
    synthesise("gpt_oss", folder, size="tiny")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "stage", "align", "in_stock"),
    [
        (1, 3, False, True),
        (2, 3, False, False),
        (1, 2, True, False),
        (1, 2, False, True),
    ],
)
def test_experts_begin_at_16_bytes(world: int, stage: int, align: bool, in_stock: bool, path: Path) -> None:
    """Stock does not align on one rank; stages 1 and 2 need ``parameter_alignment``."""
    for ours, stock in run_ranks(addresses, world, path, stage, align):
        assert bool(stock) == in_stock
        assert bool(ours) == (in_stock and stage < 3)


def addresses(path: Path, stage: int, align: bool) -> tuple[list[int], list[int]]:
    """Return the experts' offsets from multiples of 16 bytes, in ours and in stock."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    zero = {"stage": stage, **({"parameter_alignment": True} if align else {})}
    config = {**BATCH, "bf16": {"enabled": True}, "zero_optimization": zero}
    offsets = []
    for ours in (True, False):
        zero_config = None if ours or stage < 3 else HfDeepSpeedConfig(config)
        if ours:
            options: Any = {"engine": "deepspeed", "zero_stage": stage, "engine_config": config}
            model: Any = zerostart.load(path, dtype=torch.bfloat16, progress=False, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        remainders = watch_expert_addresses(model)
        for _ in range(2):
            step(engine, None, torch.device("cpu"))
        assert remainders
        offsets.append(sorted(remainders - {0}))
        del zero_config
    return offsets[0], offsets[1]
