"""Warn once, on rank 0, about optimizers that combine elements."""

import logging
import os
from pathlib import Path

import pytest
import torch

from tests.integrations.scripts import fsdp2, zero3
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


class Mixing(torch.optim.SGD):
    """Optimizer that is not registered as elementwise."""


def warnings_of(path: Path, environment: dict[str, str]) -> list[str]:
    os.environ.update(environment)
    import zerostart

    zerostart.enable()
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from transformers import AutoModelForCausalLM

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerostart").addHandler(handler)
    shards = "FSDP_VERSION" in environment
    options = {"cpu": True} if shards else {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}
    accelerator = Accelerator(**options)
    for kind in (torch.optim.AdamW, Mixing):
        model = AutoModelForCausalLM.from_pretrained(path)
        loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
            torch.zeros(4, 2), batch_size=2
        )
        accelerator.prepare(model, kind(model.parameters(), lr=0.1), loader)
    return [text for text in messages if "step each element by itself" in text]


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_an_optimizer_that_may_mix_elements_of_shards_is_warned_about(
    engine: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    environment = fsdp2() if engine == "fsdp2" else zero3(tmp_path)
    first, second = run_ranks(warnings_of, 2, checkpoints("qwen3"), environment)
    assert len(first) == 1
    assert "test_optimizers_of_shards.Mixing is not known" in first[0]
    assert "register_elementwise_optimizer(Mixing)" in first[0]
    assert second == []
