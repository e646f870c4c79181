"""Training state of a live model, as an engine keeps it.

Saving, resuming, comparing and editing use only this part of an engine.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.upstream.torch.optimizer_steps import (
    Member,
    SteppedTensor,
    has_taken,
    plain_steps,
    watch_steps,
)

#: Counts of steps, scales and names of an engine, as JSON values.
Counters: TypeAlias = dict[str, Any]

#: ``(first, values)``: element ``i`` of the 1-D ``values`` is the fp32 master of element ``first + i`` of
#: this rank's share of a parameter.
Master = tuple[int, torch.Tensor]
#: A gradient and its run of a parameter's elements.
Gradient = tuple[Member, torch.Tensor]


@runtime_checkable
class Stateful(Protocol):
    """An object with a state to save, such as a learning rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Set the state to a saved one."""
        ...


class TrainingState(abc.ABC):
    """The live training state of one model.

    ``steps`` are the tensors that an optimizer steps: the parameters themselves, or fp32 masters of runs of
    them. Nothing is copied: the tensors are the engine's own memory, to be saved or filled. ``saved`` is
    always the ``engine`` entry of a saved state's document, as ``counters`` made it.
    """

    #: True if the engine makes the tensors that its optimizer steps, and ends accumulation windows.
    owns_optimizer: bool = False
    steps: Sequence[SteppedTensor]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that are stepped themselves."""
        return [step.tensor for step in self.steps if step.is_parameter]

    def watch(self) -> bool:
        """Start to record which gradients a step uses.

        Returns True if that was on before.
        """
        return True

    @abc.abstractmethod
    def counters(self) -> Counters:
        """Return the counters as JSON values of the saved document, ``name`` first."""

    @abc.abstractmethod
    def restore_counters(self, saved: Counters) -> None:
        """Go on counting from ``saved``; its ``window`` is missing where no window is resumed."""

    def components(self) -> Mapping[str, Stateful]:
        """The objects whose own state dicts are saved, by their keys in the document."""
        return {}

    @abc.abstractmethod
    def gradients(self, is_replicated: Callable[[torch.Tensor], bool]) -> Sequence[Gradient]:
        """Return the reduced gradients that no step has used yet.

        ``is_replicated`` is true for a parameter that several ranks have whole. Raises ConfigError if
        gradients are not reduced yet.
        """

    @abc.abstractmethod
    def make_gradients(self, parameter_ids: Collection[int], saved: Counters) -> Sequence[Gradient] | None:
        """Make room for the saved gradients of some parameters; all others lose theirs.

        None if gradients were saved in the middle of a window that only another engine can end.
        """

    @abc.abstractmethod
    def check_window(self, saved: Counters, with_gradients: bool, source: str) -> None:
        """Raise ConfigError for a window of another number of batches than accumulate here."""


class OptimizerState(TrainingState):
    """The state of a model whose parameters a torch optimizer steps, if there is one."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        """``optimizer`` may be accelerate's wrapper. Raises ConfigError for other objects."""
        self._model = model
        self._scaler: Stateful | None = None
        self._accumulation: int | None = None
        while type(optimizer).__module__.partition(".")[0] == "accelerate":
            self._scaler = getattr(optimizer, "scaler", None)
            self._accumulation = getattr(getattr(optimizer, "gradient_state", None), "num_steps", None)
            optimizer = optimizer.optimizer
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer is a {type(optimizer).__name__}, not a torch optimizer")
        self.steps = plain_steps(optimizer) if optimizer is not None else []

    def watch(self) -> bool:
        """Watch by hooks of the optimizer."""
        return watch_steps({step.optimizer for step in self.steps})

    def counters(self) -> Counters:
        """Return accelerate's counters."""
        return {"name": "torch", "scaler": None, "accumulation": self._accumulation}

    def restore_counters(self, saved: Counters) -> None:
        """Restore nothing."""

    def components(self) -> Mapping[str, Stateful]:
        """The gradient scaler of accelerate."""
        return {} if self._scaler is None else {"scaler": self._scaler}

    def check_reduced(self) -> None:
        """Raise ConfigError where gradients are held that are not reduced yet."""

    def gradients(self, is_replicated: Callable[[torch.Tensor], bool]) -> Sequence[Gradient]:
        """Return gradients of shards and of parameters on a single rank."""
        self.check_reduced()
        gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]
        if gradients and all(has_taken(gradient) for _, gradient in gradients):
            return []  # between step() and zero_grad(): nothing is to be added to them
        # The gradient of a replica may or may not be reduced already.
        return [(_whole(p), gradient) for p, gradient in gradients if not is_replicated(p)]

    def make_gradients(self, parameter_ids: Collection[int], saved: Counters) -> Sequence[Gradient] | None:
        """New gradients of zeros, or none; no window can be ended."""
        if "window" in saved:
            return None if parameter_ids else []
        gradients = []
        for parameter in self.parameters:
            parameter.grad = None
            if id(parameter) in parameter_ids:
                parameter.grad = torch.zeros_like(parameter.detach())
                gradients.append((_whole(parameter), parameter.grad))
        return gradients

    def check_window(self, saved: Counters, with_gradients: bool, source: str) -> None:
        """As accelerate counts batches; raises ConfigError."""
        before = saved.get("accumulation")
        if with_gradients and before is not None and self._accumulation not in (None, before):
            check_accumulation(before, self._accumulation, "accelerate", source)


def check_accumulation(before: object, now: object, library: str, source: str) -> None:
    """Raise ConfigError if a saved window has another number of batches than now."""
    if before not in (None, now):
        raise ConfigError(
            f"{source} was saved in the middle of gradient accumulation with "
            f"gradient_accumulation_steps={before}, but "
            f"{library} has {now}: resume with {before}, or save after an optimizer step"
        )


def members_of(steps: Iterable[SteppedTensor]) -> list[Member]:
    """List the stepped runs of parameters, in the order of an engine's gradients."""
    return [member for step in steps for member in step.members]


def _whole(parameter: torch.Tensor) -> Member:
    return Member(parameter, 0, parameter.numel())
