"""Find masters, moments and gradients of a live model in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.distributed.world import World
from zerostart.engines import (
    Gradient,
    Member,
    OptimizerState,
    Shard,
    SteppedTensor,
    TrainingState,
    engine_families,
    replace_storage,
)
from zerostart.errors import ConfigError
from zerostart.geometry.layout.layout import narrow_layout
from zerostart.live.model import LiveModel


@dataclass(frozen=True)
class StateTensor:
    """This rank's shard of a tensor that belongs to the parameter ``name``, element by element.

    ``key`` is ``master``, ``gradient``, or the key in the optimizer's state.
    """

    name: str
    key: str
    shard: Shard


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainingState:
    """Return the training state of ``model``, kept by its engine or by ``optimizer``.

    Raises ConfigError and EngineError for a state that cannot be read.
    """
    states = (engine.training_state(model, optimizer) for engine in engine_families())
    state = next((state for state in states if state is not None), None)
    return OptimizerState(model, optimizer) if state is None else state


class LiveTraining(LiveModel):
    """A live model with the training state of its engine or torch optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World) -> None:
        """``model`` and ``optimizer`` are as ``zerostart.save_state`` takes them.

        Raises ConfigError and EngineError for a state that cannot be saved or restored.
        """
        self.state = training_state(model, optimizer)
        super().__init__(model, world)

    @property
    def steps(self) -> Sequence[SteppedTensor]:
        """Tensors that the optimizer steps: parameters, or masters of runs of them."""
        return self.state.steps

    def masters(self) -> Iterator[StateTensor]:
        """Iterate over the copies that the optimizer steps instead of parameters."""
        for step in self.steps:
            if not step.is_parameter:
                yield from self._members(step, "master", step.tensor)

    def moments(self) -> Iterator[StateTensor]:
        """Iterate over state tensors with one element for each element of a parameter.

        Raises ConfigError for a value that is neither a number nor a tensor.
        """
        for step in self.steps:
            elementwise = is_elementwise(step)
            for key, value in step.state.items():
                if not isinstance(key, str) or "/" in key:
                    raise ConfigError(
                        f"the optimizer's state {key!r} of {self.name_of(step.members[0].parameter)} "
                        "cannot be "
                        "saved: its name must be a string without slashes"
                    )
                # Numbers go into the JSON document; each rank saves states of other shapes as they are.
                if is_number(key, value, step) or (isinstance(value, torch.Tensor) and not elementwise):
                    continue
                if not isinstance(value, torch.Tensor) or value.shape != step.tensor.shape:
                    raise ConfigError(
                        f"the optimizer's state {key!r} of {self.name_of(step.members[0].parameter)} is "
                        f"neither a number nor a tensor, but a {type(value).__name__}: it cannot be saved "
                        "with the parameter. Use an optimizer whose state is tensors and numbers, or save "
                        "its state_dict() by yourself"
                    )
                yield from self._members(step, key, value)

    def gradients(self) -> Iterator[StateTensor]:
        """Iterate over reduced gradients that no step has used yet.

        Raises ConfigError if gradients are not reduced.
        """
        return self.shard_gradients(self.state.gradients(self._is_replicated))

    def shard_gradients(self, gradients: Sequence[Gradient]) -> Iterator[StateTensor]:
        """Iterate over gradients, or memory for them, with the shard of each."""
        for member, gradient in gradients:
            name = self.name_of(member.parameter)
            yield StateTensor(name, "gradient", member_shard(member, self.shards[name], gradient))

    def _members(self, step: SteppedTensor, key: str, values: torch.Tensor) -> Iterator[StateTensor]:
        for member in step.members:
            name = self.name_of(member.parameter)
            yield StateTensor(name, key, member_shard(member, self.shards[name], values))

    def _is_replicated(self, parameter: torch.Tensor) -> bool:
        return not isinstance(parameter, DTensor) and self.shards[self.name_of(parameter)].replica[1] > 1


def member_shard(member: Member, shard: Shard, values: torch.Tensor) -> Shard:
    """Return a member's shard of a stepped tensor, a state tensor or a gradient.

    ``values`` have the elements of all members of a step, or only those of the member.
    """
    whole = tuple(values.shape) == shard.layout.shape and values.numel() == member.count
    # The padding of a small parameter may have its shape.
    whole = whole and shard.layout.owned >= member.count
    if whole and member.first is None and not isinstance(values, DTensor):
        return replace_storage(shard, values)  # in the memory order of the values
    # Otherwise the values are one run, of this member or of all members of the step.
    local = (values.to_local() if isinstance(values, DTensor) else values).detach().view(-1)
    storage = local if local.numel() == member.count else local[member.at : member.at + member.count]
    if member.first is None:
        return replace(shard, storage=storage)
    layout = narrow_layout(shard.layout, member.first, member.first + member.count)
    # The other ranks' runs have no elements in common with this one, and are not needed here.
    return Shard(shard.name, layout, storage, lambda _: layout, shard.optimizer_replica)


def is_elementwise(step: SteppedTensor) -> bool:
    """Return True if each state tensor has one plain element for each stepped element."""
    tensors = [value for value in step.state.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not step.tensor.dim():
        return True
    return all(v.shape == step.tensor.shape and not _keeps_others(v) for v in tensors)


def _keeps_others(value: torch.Tensor) -> bool:
    return hasattr(value.to_local() if isinstance(value, DTensor) else value, "__tensor_flatten__")


def is_number(key: str, value: object, step: SteppedTensor) -> bool:
    """Return True if a state entry is a number, equal for all elements."""
    if isinstance(value, (bool, int, float)) or value is None:
        return True
    # Moments of a scalar parameter are scalars: only its ``step`` is a number.
    shaped = step.tensor.dim() == 0 and key != "step"
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not shaped
