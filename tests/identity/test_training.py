"""A loaded model trains like one of the stock route."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.test_deepspeed_compositions import stock_zero3
from tests.ranks import run_ranks
from tests.tiny import TINY, TinyCheckpoints

STEPS, BATCH, LENGTH = 5, 2, 16
LEARNING_RATE = 1e-3


def deepspeed_config(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,  # DeepSpeed's default; set so that both clip
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("qwen3_moe_aligned", torch.bfloat16, id="experts-bf16"),
        pytest.param("qwen3_moe_aligned", torch.float32, id="experts-fp32", marks=pytest.mark.slow),
        pytest.param("qwen3", torch.bfloat16, id="bf16", marks=pytest.mark.slow),
        pytest.param("qwen3", torch.float32, id="fp32", marks=pytest.mark.slow),
    ],
)
def test_deepspeed_losses_equal_those_of_the_stock_route(
    kind: str, dtype: torch.dtype, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints(kind, dtype)
    ours = run_ranks(train_deepspeed, 2, path, dtype, True)
    stock = run_ranks(train_deepspeed, 2, path, dtype, False)
    assert ours == stock
    losses, _norms = ours[0]
    assert len(set(losses)) == STEPS
    assert losses[-1] < losses[0]


def batches(vocabulary: int, ranks: int) -> Iterator[torch.Tensor]:
    """Yield the same ids [ranks, BATCH, LENGTH] on all processes."""
    generator = torch.Generator().manual_seed(7)
    batch = torch.randint(3, vocabulary, (ranks, BATCH, LENGTH), generator=generator)
    for _ in range(STEPS):  # repeat one batch, so that the loss falls quickly
        yield batch


def vocabulary_of(path: Path) -> int:
    return int(TINY[path.name.split("-")[0]][1]["vocab_size"])


def train_deepspeed(path: Path, dtype: torch.dtype, ours: bool) -> tuple[list[float], list[float]]:
    import deepspeed

    config = deepspeed_config(dtype)
    if ours:
        model = zerostart.load(path, engine="deepspeed", engine_config=config, progress=False)
    else:
        model = stock_zero3(path, dtype, config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses, norms = [], []
    for batch in batches(vocabulary_of(path), dist.get_world_size()):
        tokens = batch[dist.get_rank()]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms
