"""Choose the parameters that a run trains: all, those named, or a LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import full_shape, plain_name
from zerostart.errors import ConfigError
from zerostart.live.model import get_record
from zerostart.training.adapt.lora import add_lora
from zerostart.training.adapt.lora_files import start_from

if TYPE_CHECKING:
    from zerostart.training.config.configuration import LoraConfig, TrainingConfig


def select_parameters(
    model: nn.Module, train: TrainingConfig, lora: LoraConfig | None, precision: str, world: World
) -> str | None:
    """Freeze the untrained parameters of the loaded ``model``, or add a LoRA; collective.

    Called before the engine wraps the model. Returns a summary; None if all parameters are trained. Raises
    ConfigError, and for a LoRA file CheckpointError and CheckpointNotFoundError, on every rank.
    """
    if train.trainable is not None:
        with world.phase("freezing what is not trained"):
            freeze_others(model, train.trainable)
        return f"trained: {_counted(model)}"
    if lora is None:
        return None
    with world.phase("adding LoRA"):
        # Factors are the same on every rank, filled from a file while they are whole, and sharded last.
        adapted = add_lora(model, lora, train.seed)
    if lora.start_from is not None:
        start_from(model, adapted, lora, world)
    summary = f"trained: LoRA of rank {lora.rank} in {len(adapted)} layers, {_counted(model)}"
    with world.phase("sharding LoRA"):
        get_record(model).engine.shard_added(model, precision)
    return summary


@torch.no_grad()
def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the values of ``model`` to ``dtype``, without changing the dtype of its parameters."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.copy_(parameter.to(dtype))


def _counted(model: nn.Module) -> str:
    trained = every = 0
    for parameter in model.parameters():
        shape = full_shape(parameter)
        every += shape.numel()
        trained += shape.numel() * parameter.requires_grad
    return f"{trained:,} of {every:,} parameters"


def freeze_others(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze all parameters except those that match ``patterns``, and return their names.

    A pattern is the name of a parameter or of a module around it, with ``*`` for any characters. Raises
    ConfigError that names a pattern without a match.
    """
    unused, trained = dict.fromkeys(patterns), []
    for given, parameter in model.named_parameters():
        name = plain_name(given)
        matches = [
            pattern for pattern in patterns if any(fnmatchcase(part, pattern) for part in _parts(name))
        ]
        for pattern in matches:
            unused.pop(pattern, None)
        parameter.requires_grad_(bool(matches))
        if matches:
            trained.append(name)
    if unused:
        raise ConfigError(
            f"train.trainable has {next(iter(unused))!r}, but no parameter, and no module with "
            "parameters, has that name; names are, for example, "
            f"{', '.join(trained[:2] or [plain_name(name) for name, _ in model.named_parameters()][:2])}"
        )
    return tuple(trained)


def _parts(name: str) -> Iterator[str]:
    """Yield the name and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
