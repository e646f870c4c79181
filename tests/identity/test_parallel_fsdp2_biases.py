"""FSDP2 with tensors: row-wise layers with a bias, which all ranks have whole, train as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.test_parallel_fsdp2 import train
from tests.parity import Trace, batches, checkpoint, differences, optimizer, reference
from tests.ranks import run_ranks

BIASES: dict[str, dict[str, bool]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "starcoder2": {},
    "gpt_neox": {},
    "phi": {},
    "gpt_oss": {},
}
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("llama", 2),
        *(pytest.param(kind, 2, marks=SLOW) for kind in BIASES if kind != "llama"),
        *(pytest.param(kind, 4, marks=SLOW) for kind in BIASES),
    ],
)
def test_biases_train_as_in_one_process(kind: str, world: int, tmp_path: Path) -> None:
    path = checkpoint(kind, tmp_path, **BIASES[kind])
    wanted = reference(path)
    for found, forward in run_ranks(trained_and_resumed, world, path, tmp_path):
        assert forward < 1e-5
        assert differences(found, wanted) == []


def trained_and_resumed(path: Path, folder: Path) -> tuple[Trace, float]:
    """A training, after the forward's own difference and before a training state that is gone on from."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"engine": "fsdp2", "tensor_parallel": 2, "progress": False}
    model, tokens = zerostart.load(path, **options), next(batches(1))[0]
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(path)(input_ids=tokens).logits
        forward = (model(input_ids=tokens).logits - wanted).abs().max() / wanted.abs().max()
    trace = train(path, 1, {"tensor_parallel": 2})
    resumed(path, folder, options)
    return trace, forward.item()


def resumed(path: Path, folder: Path, options: dict[str, Any]) -> None:
    """Steps before a training state and after it, which are those of a training without one."""

    def steps(model: Any, optim: torch.optim.Optimizer, first: int, stop: int) -> list[float]:
        losses = []
        for batch in list(batches(1))[first:stop]:
            loss = model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return losses

    first = zerostart.load(path, **options).train()
    optim = optimizer(first)
    steps(first, optim, 0, 2)
    zerostart.save_state(folder / f"state-{dist.get_world_size()}", first, optim)
    again = zerostart.load(path, **options).train()
    other = optimizer(again)
    zerostart.load_state(folder / f"state-{dist.get_world_size()}", again, other)
    assert steps(again, other, 2, 4) == pytest.approx(steps(first, optim, 2, 4), rel=1e-6)
    zerostart.save(again, folder / f"saved-{dist.get_world_size()}")
    assert zerostart.diff(folder / f"saved-{dist.get_world_size()}", again).equal
