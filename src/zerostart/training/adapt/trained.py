"""Choosing what a run trains: the whole loaded model, the parameters that are named, or a LoRA."""

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


def choose_trained(
    model: nn.Module, train: TrainingConfig, lora: LoraConfig | None, precision: str, world: World
) -> str | None:
    """Freeze the loaded ``model`` but for what a run trains, adding that where it is a LoRA; collective.

    Before the engine has the model. Gives what is trained in words; None for all of it. Raises ConfigError,
    and of a LoRA file CheckpointError and CheckpointNotFoundError, on every rank.
    """
    if train.trainable is not None:
        with world.phase("freezing what is not trained"):
            train_only(model, train.trainable)
        return f"trained: {_counted(model)}"
    if lora is None:
        return None
    with world.phase("adding LoRA"):
        # Drawn from the seed on every rank alike, filled from a file while each rank has all of a factor, and
        # sharded last.
        adapted = add_lora(model, lora, train.seed)
    if lora.start_from is not None:
        start_from(model, adapted, lora, world)
    summary = f"trained: LoRA of rank {lora.rank} in {len(adapted)} layers, {_counted(model)}"
    with world.phase("sharding LoRA"):
        get_record(model).engine.shard_added(model, precision)
    return summary


@torch.no_grad()
def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the parameters of ``model`` to what ``dtype`` holds, in the dtype that they have."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.copy_(parameter.to(dtype))


def _counted(model: nn.Module) -> str:
    trained = every = 0
    for parameter in model.parameters():
        # A shard tells its own size; the whole parameter's is counted, and so is the same on every rank.
        shape = full_shape(parameter)
        every += shape.numel()
        trained += shape.numel() * parameter.requires_grad
    return f"{trained:,} of {every:,} parameters"


def train_only(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze the parameters of the loaded ``model`` but for those that ``patterns`` name; gives their names.

    A pattern is the name of a parameter or of a module that it is in, with ``*`` for any characters. Raises
    ConfigError, naming it, for one that no parameter has.
    """
    unused, trained = dict.fromkeys(patterns), []
    for given, parameter in model.named_parameters():
        name = plain_name(given)
        found = [pattern for pattern in patterns if any(fnmatchcase(part, pattern) for part in _parts(name))]
        for pattern in found:
            # What is left in the end has matched nothing: patterns may overlap, so each counts for itself.
            unused.pop(pattern, None)
        parameter.requires_grad_(bool(found))
        if found:
            trained.append(name)
    if unused:
        raise ConfigError(
            f"train.trainable has {next(iter(unused))!r}, but no parameter, and no module with "
            "parameters, has that name; names are, for example, "
            f"{', '.join(trained[:2] or _some(model))}"
        )
    return tuple(trained)


def _parts(name: str) -> Iterator[str]:
    """The name and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _some(model: nn.Module) -> list[str]:
    return [plain_name(name) for name, _ in model.named_parameters()][:2]
