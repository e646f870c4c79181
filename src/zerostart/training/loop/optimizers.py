"""Create optimizers by name: torch's, or a user's class."""

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


def optimizer_factory(train: TrainingConfig) -> Callable[[Any], Optimizer]:
    """Return a function that makes the optimizer of ``train`` from its parameters.

    Raises ConfigError for an unknown name and TypeError for an argument that is given twice.
    """
    kind = _optimizer_class(train.optimizer)
    takes = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {"lr": train.learning_rate}
    for name in ("betas", "weight_decay"):
        value = getattr(train, name)
        # A configured value also goes to a class that does not take it, and which then refuses it.
        if name in takes or value != TrainingConfig.model_fields[name].default:
            arguments[name] = value
    return functools.partial(kind, **arguments, **train.optimizer_args)


def check_optimizer(train: TrainingConfig, engine: Engine) -> None:
    """Raise ConfigError for refused arguments, or an optimizer that cannot step shards.

    ``engine`` is at its stage. An optimizer that steps each element by itself is right for any shards. One
    that combines elements (a norm, a factored moment, one rate for all) needs whole tensors.
    """
    kind = _optimizer_class(train.optimizer)
    try:
        optimizer = optimizer_factory(train)([torch.nn.Parameter(torch.ones(2, 2, device="cpu"))])
    except Exception as error:  # of many types
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{_KEY} {train.optimizer} cannot be made ({type(error).__name__}: {reason}): choose "
            "another one, or change train.optimizer_args, betas or weight_decay"
        ) from error
    if not engine.is_sharded_at(engine.zero_stage):
        return
    if not is_elementwise(kind):
        raise ConfigError(
            f"{_KEY} {train.optimizer}: {kind.__module__}.{kind.__qualname__} is not known to step each "
            "element by itself, so its steps on shards may differ from those on the whole model: choose "
            "another one (adamw), set engine.zero_stage to 0, or call register_elementwise_optimizer for it"
        )
    if optimizer.state and not engine.steps_parameters:
        raise ConfigError(
            f"{_KEY} {train.optimizer} makes its state before the first step, and {engine.title} "
            "replaces the parameters after that: choose another one (adamw), or engine.name fsdp2"
        )


def _optimizer_class(name: str) -> type[Optimizer]:
    module, _, attribute = name.rpartition(":")
    classes: dict[str, Any] = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    try:
        kind = getattr(importlib.import_module(module), attribute) if module else classes[name.lower()]
    except (ImportError, AttributeError, KeyError) as error:
        names = ", ".join(sorted(classes))
        raise ConfigError(
            f"{_KEY} {name!r} is unknown ({error}): it is one of {names}, or package.module:Class"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"{_KEY} {name} does not name a class derived from torch.optim.Optimizer")
    return kind
