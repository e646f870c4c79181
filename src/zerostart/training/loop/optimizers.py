"""Optimizers by name: torch's, or a user's class."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from zerostart.engines import Engine
from zerostart.engines.optimizers import is_elementwise
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import TrainingConfig

_KEY = "train.optimizer"
#: Arguments of optimizers that are other keys of the section, which count.
_KEYS = {"lr": "learning_rate", "betas": "betas", "weight_decay": "weight_decay"}


def optimizer_of(train: TrainingConfig) -> Callable[[Any], Optimizer]:
    """What makes the optimizer that ``train`` names, with its rate, betas and further arguments.

    Raises :class:`ConfigError` for a name that nobody knows, and arguments that the class does not take.
    """
    kind = _class_of(train.optimizer)
    takes = inspect.signature(kind).parameters
    anything = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    if unknown := [name for name in train.optimizer_args if name not in takes and not anything]:
        raise ConfigError(
            f"train.optimizer_args: {kind.__name__} takes no {unknown[0]}, but {', '.join(list(takes)[1:])}"
        )
    if taken := [name for name in _KEYS if name in train.optimizer_args]:
        raise ConfigError(
            f"train.optimizer_args: {taken[0]} has a key of its own: write train.{_KEYS[taken[0]]} instead"
        )
    given: dict[str, Any] = {"lr": train.learning_rate}
    if "betas" in takes:
        given["betas"] = train.betas
    elif train.betas != TrainingConfig.model_fields["betas"].default:
        raise ConfigError(f"train.betas: {_KEY} {train.optimizer} has none; leave them out")
    if "weight_decay" not in takes and train.weight_decay:
        raise ConfigError(f"train.weight_decay: {_KEY} {train.optimizer} has none; leave it out")
    return functools.partial(kind, **(given | train.optimizer_args))


def check_optimizer(train: TrainingConfig, engine: Engine) -> None:
    """Raise :class:`ConfigError` for arguments that the optimizer refuses, and if shards need other steps.

    ``engine`` is at its stage. An optimizer that steps each element by itself is right for any shards. One
    that looks at several elements together (a norm, a factored moment, one rate for all) needs whole tensors.
    """
    make, kind = optimizer_of(train), _class_of(train.optimizer)
    try:
        optimizer = make([{"params": [torch.nn.Parameter(torch.ones(2, 2, device="cpu"))]}])
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{_KEY} {train.optimizer} cannot be made ({type(error).__name__}: {reason}): choose "
            "another one, or change train.optimizer_args"
        ) from error
    if not engine.is_sharded_at(engine.zero_stage):
        return
    if not is_elementwise(kind):
        raise ConfigError(
            f"{_KEY} {train.optimizer}: {kind.__module__}.{kind.__qualname__} is not known to step each "
            "element by itself, so shards may be stepped otherwise than the whole model: choose another one "
            "(adamw), set engine.zero_stage to 0, or call register_elementwise_optimizer for it"
        )
    if optimizer.state and not engine.steps_parameters:
        raise ConfigError(
            f"{_KEY} {train.optimizer} makes its state before the first step, and {engine.title} "
            "replaces the parameters after that: choose another one (adamw), or engine.name fsdp2"
        )


def _class_of(name: str) -> type[Optimizer]:
    module, _, attribute = name.rpartition(":")
    # torch's own classes by their names in small letters.
    known: dict[str, Any] = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if not module and name.lower() not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{_KEY} {name!r} is unknown: it is one of {names}, or package.module:Class")
    try:
        kind = getattr(importlib.import_module(module), attribute, None) if module else known[name.lower()]
    except ImportError as error:
        raise ConfigError(f"{_KEY} {name}: the module {module} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"{_KEY} {name} does not name a class derived from torch.optim.Optimizer")
    return kind
