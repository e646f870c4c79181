"""Experts on DeepSpeed, where kernels for groups of them would read: addresses on the host, beside stock's.

``torch._grouped_mm`` refuses addresses beside a multiple of 16 bytes, on CUDA; nothing of it is run here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from benchmarks.gpu_check import BATCH, step, watched
from tests.ranks import run_ranks
from zerostart.models.synth import synthesise


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt_oss with four heads, whose sinks are 8 bytes in bf16."""
    made = tmp_path_factory.mktemp("gpt_oss") / "tiny"
    synthesise("gpt_oss", made, size="tiny")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "stage", "asked", "in_stock"),
    [
        (1, 3, False, True),
        (2, 3, False, False),
        (1, 2, True, False),
        (1, 2, False, True),
    ],
)
def test_experts_begin_at_16_bytes(world: int, stage: int, asked: bool, in_stock: bool, path: Path) -> None:
    """On one rank stock's do not; before stage 3 its ``parameter_alignment`` has to be asked for, by both."""
    for ours, stock in run_ranks(addresses, world, path, stage, asked):
        assert bool(stock) == in_stock
        assert bool(ours) == (in_stock and stage < 3)


def addresses(path: Path, stage: int, asked: bool) -> tuple[list[int], list[int]]:
    """Bytes beside a multiple of 16 at which experts were seen, in ours and in stock."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    zero = {"stage": stage, **({"parameter_alignment": True} if asked else {})}
    config = {**BATCH, "bf16": {"enabled": True}, "zero_optimization": zero}
    found = []
    for ours in (True, False):
        said = None if ours or stage < 3 else HfDeepSpeedConfig(config)
        if ours:
            options: Any = {"engine": "deepspeed", "zero_stage": stage, "engine_config": config}
            model: Any = zerostart.load(path, dtype=torch.bfloat16, progress=False, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        seen = watched(model)
        for _ in range(2):
            step(engine, None, torch.device("cpu"))
        assert seen
        found.append(sorted(seen - {0}))
        del said
    return found[0], found[1]
