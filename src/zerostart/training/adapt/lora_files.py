"""A LoRA that training goes on from: the values of another one's file, in the adapters of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.errors import CheckpointError, ConfigError
from zerostart.state.saving.lora_files import Factors, read_lora
from zerostart.training.adapt.lora import ADAPTER
from zerostart.training.config.configuration import LoraConfig


def start_from(model: nn.Module, adapted: Iterable[str], config: LoraConfig, world: World) -> None:
    """Give the adapters of ``model`` the values in the file ``config.start_from``; every rank reads it.

    The modules ``adapted`` have adapters, still whole. Raises CheckpointNotFoundError, CheckpointError for a
    file of other adapters, and ConfigError for one that says more than factors and what they are scaled by.
    """
    assert config.start_from is not None, "whoever calls this has looked"
    with world.phase("reading the LoRA file"):
        file = read_lora(config.start_from, "lora.start_from ")
        checksum = file.checksum()
    # A rank that has read another file hears of it here: the ranks compare what they are about to do.
    world.raise_together(None, f"starting from the LoRA file with the checksum {checksum}")
    with world.phase("starting from the LoRA file"):
        factors, unexpected = file.factors(names := list(adapted), model)
        missing = [name for name in names if name not in factors]
        if missing or unexpected:
            raise CheckpointError(
                f"{file.named} does not fit lora.targets: it lacks {len(missing)} of their "
                f"adapters, and has {len(unexpected)} others, such as {(missing or unexpected)[0]}; "
                "set the targets that it was trained with"
            )
        with torch.no_grad():
            for name, pair in factors.items():
                _fill(model.get_submodule(name), name, pair, config, file.named)


def _fill(layer: Any, name: str, found: Factors, config: LoraConfig, named: str) -> None:
    """Copy the factors into one adapter, scaled so that the product weighs what it weighed in the file."""
    if ADAPTER not in getattr(layer, "lora_A", {}):
        raise ConfigError(
            f"lora.start_from: the adapter of {name} ({type(layer).__name__}) cannot be filled "
            "from a file; leave that layer out of lora.targets"
        )
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    if a.shape != found.a.shape or b.shape != found.b.shape:
        raise CheckpointError(
            f"{named} has factors of the shapes {tuple(found.a.shape)} and "
            f"{tuple(found.b.shape)} for {name}, and lora.rank {config.rank} gives {tuple(a.shape)} and "
            f"{tuple(b.shape)}; set lora.rank to {found.a.shape[0]}, or name another file"
        )
    # The adapter's own scaling is the configuration's: the second factor makes up for the difference.
    times = found.scaling / config.scaling
    # The whole difference goes into B, by way of float32: a factor in half precision is rounded once.
    a.copy_(found.a)
    b.copy_(found.b if times == 1.0 else found.b.float() * times)
