"""Optimizers by name: torch's, those of the HF Trainer whose packages are installed, or a user's class."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from zerostart.engines import Engine
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import TrainingConfig

#: An optimizer of groups of parameters.
Made = Callable[[Any], Optimizer]

_KEY = "train.optimizer"
#: Arguments of optimizers that are other keys of the section, which count.
_KEYS = {"lr": "learning_rate", "betas": "betas", "weight_decay": "weight_decay"}


def optimizer_of(train: TrainingConfig) -> Made:
    """What makes the optimizer that ``train`` names, with its rate, betas and further arguments.

    Raises :class:`ConfigError` for a name that nobody knows, and arguments that the class does not take.
    """
    kind, own = _found(train)
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
    return functools.partial(kind, **(own | given | train.optimizer_args))


def check_optimizer(train: TrainingConfig, engine: Engine) -> None:
    """Raise :class:`ConfigError` for arguments that the optimizer refuses, and if shards need other steps.

    ``engine`` is at its stage. An optimizer that steps each element by itself is right for any shards. One
    that looks at several elements together (a norm, a factored moment, one rate for all) needs whole tensors.
    """
    make, (kind, _) = optimizer_of(train), _found(train)
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


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return True if optimizers of this class are known to step each element by itself."""
    return kind in _elementwise


def register_elementwise_optimizer(kind: type[Optimizer]) -> None:
    """Declare that optimizers of this class step each element by itself, so that shards may be stepped."""
    _elementwise.add(kind)


#: Classes that step each element by itself.
_elementwise: set[type[Optimizer]] = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


def _found(train: TrainingConfig) -> tuple[type[Optimizer], dict[str, Any]]:
    name = train.optimizer
    if ":" in name:
        return _checked(name, _imported(name)), {}
    torchs = _torchs()
    # The Trainer's adafactor is another class than torch's, with other arguments.
    if (kind := torchs.get(name.lower())) is not None and name.lower() != "adafactor":
        return kind, {}
    return _trainers(train, torchs)


def _torchs() -> Mapping[str, type[Optimizer]]:
    """torch's own classes by their names in small letters."""
    return {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }


def _trainers(train: TrainingConfig, torchs: Mapping[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    name, known = train.optimizer, [one.value for one in OptimizerNames]
    if name not in known:
        names = ", ".join(sorted({*torchs, *known}))
        raise ConfigError(f"{_KEY} {name!r} is unknown: it is one of {names}, or package.module:Class")
    beta1, beta2 = train.betas
    # What that function reads of ``TrainingArguments``, which would check far more than an optimizer.
    arguments: Any = SimpleNamespace(
        optim=OptimizerNames(name),
        learning_rate=train.learning_rate,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=1e-8,
        weight_decay=train.weight_decay,
        warmup_steps=train.warmup_steps,
        optim_args=None,
        optim_target_modules=None,
    )
    try:
        kind, given = Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{_KEY} {name}: the Trainer cannot make it here: {reason}") from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"{_KEY} {name} is made of whole layers, and a run has shards: choose another one")
    # These two are the run's own, from their keys.
    return kind, {key: value for key, value in given.items() if key not in ("lr", "betas")}


def _imported(name: str) -> object:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"{_KEY} {name}: the module {module} cannot be imported: {error}") from error


def _checked(name: str, found: object) -> type[Optimizer]:
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"{_KEY} {name} does not name a class derived from torch.optim.Optimizer")
    return found
