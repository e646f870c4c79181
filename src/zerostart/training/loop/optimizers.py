"""Optimizers by name: torch's, those of the HF Trainer whose packages are installed, or a class of one's own.

Which of them an engine can use is found out by trying, on a parameter of a few numbers and before anything is
read: one that steps a tensor in two halves as it steps it whole is right wherever shards are cut.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from zerostart.distributed.world import World, default_device
from zerostart.engines import Engine
from zerostart.errors import ConfigError, ZerostartError
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


def check_optimizer(train: TrainingConfig, engine: Engine, world: World) -> None:
    """Raise :class:`ConfigError` for an optimizer that cannot step, or steps shards otherwise; collective.

    ``engine`` is at its stage. Elements that are stepped apart, or in shards, are compared with whole ones.
    """
    if train.optimizer == TrainingConfig.model_fields["optimizer"].default and not train.optimizer_args:
        return  # whose answer is known
    make, name = optimizer_of(train), f"{_KEY} {train.optimizer}"
    with _told(f"{name} cannot step", "choose another one, or mend train.optimizer_args"):
        whole = _stepped(make, lambda value: [nn.Parameter(value)])
    # The engine steps runs of a flat buffer in the place of parameters, cut wherever ranks' shares end: an
    # optimizer that looks at more than one element at a time (a factored second moment, a norm) sees other
    # ones.
    if not engine.steps_parameters:
        begun = make([{"params": [nn.Parameter(torch.ones(4, device="cpu"))]}])
        parts = _stepped(make, lambda value: [nn.Parameter(part) for part in value.flatten().chunk(2)])
        # A state that is made before the first step would be of the parameters, and not of the runs.
        if begun.state or not _alike(whole, parts):
            why = "keeps a state from the beginning on" if begun.state else "steps a parameter as one"
            raise ConfigError(
                f"{name} {why}, and {engine.title} steps runs of parameters in their place, apart from each "
                "other: choose one that steps each element by itself (adamw), or an engine that steps the "
                "parameters themselves (engine.name fsdp2)"
            )
    elif not engine.replicates_parameters and world.group is not None:
        # Inside, sharding and stepping exchange tensors: the ranks meet first.
        with world.collectives("trying the optimizer"):
            mesh = init_device_mesh(default_device().type, (world.size,))
            with _told(f"{name} cannot step shards", "choose another one, or engine.zero_stage 0"):
                parts = _stepped(
                    make, lambda value: [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))]
                )
        if not _alike(whole, parts):
            raise ConfigError(
                f"{name} steps shards otherwise than whole tensors: choose another one, or "
                "engine.zero_stage 0"
            )


@contextmanager
def _told(what: str, remedy: str) -> Iterator[None]:
    """Inside a class steps that nobody here knows: raises :class:`ConfigError` for whatever it fails with."""
    try:
        yield
    except ZerostartError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{what} ({type(error).__name__}: {reason}): {remedy}") from error


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other.to(one), rtol=1e-5, atol=1e-7)


def _found(train: TrainingConfig) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class, and what the Trainer would give it besides."""
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
    """What the HF Trainer makes of a name of its argument ``optim``."""
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


def _stepped(make: Made, held_as: Callable[[torch.Tensor], list[nn.Parameter]]) -> torch.Tensor:
    """A matrix and a vector after three steps, flat, each held as the parameters that ``held_as`` makes."""
    # Its own generator, on the host: the same numbers on every rank, and no draw from the run's random state.
    draw = torch.Generator("cpu").manual_seed(0)
    values = [torch.randn(shape, generator=draw, device="cpu") for shape in ((8, 6), (8,))]
    held = [held_as(value.to(default_device())) for value in values]
    optimizer = make([{"params": [parameter for parts in held for parameter in parts]}])
    # As the schedule-free ones do: their weights are switched between training and evaluation.
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"{_KEY} {type(optimizer).__name__} holds other weights in training than those that are to be "
            "saved, which a run does not follow: choose another one"
        )
    for _ in range(3):
        for value, parts in zip(values, held, strict=True):
            gradient = torch.randn(value.shape, generator=draw, device="cpu").to(default_device())
            for parameter, of_part in zip(parts, held_as(gradient), strict=True):
                parameter.grad = of_part.detach()
        optimizer.step()
    flat = [parameter.detach() for parts in held for parameter in parts]
    return torch.cat([(t.full_tensor() if isinstance(t, DTensor) else t).flatten().cpu() for t in flat])
