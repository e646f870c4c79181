"""A live model in training: what its engine or its optimizer keeps for each parameter, as logical tensors."""

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
    Stepped,
    TrainingState,
    engine_families,
    laid_out,
)
from zerostart.errors import ConfigError
from zerostart.geometry.layout.layout import narrowed
from zerostart.live.model import LiveModel


@dataclass(frozen=True)
class StateTensor:
    """A tensor that is kept for the parameter ``name``, element by element: this rank's share of it.

    ``key`` says what it is: ``master``, ``gradient``, or the key in the optimizer's state.
    """

    name: str
    key: str
    shard: Shard


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainingState:
    """What is kept for ``model`` in training, by the engine that trains it or by ``optimizer`` alone.

    Raises ConfigError and EngineError for a state that cannot be read where it is.
    """
    states = (engine.training_state(model, optimizer) for engine in engine_families())
    found = next((state for state in states if state is not None), None)
    return OptimizerState(model, optimizer) if found is None else found


class LiveTraining(LiveModel):
    """A live model with its training state, whoever keeps that: a torch optimizer, or an engine."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World) -> None:
        """``model`` and ``optimizer`` are as ``zerostart.save_state`` takes them.

        Raises ConfigError and EngineError for what cannot be saved or restored as it is given.
        """
        self.state = training_state(model, optimizer)
        super().__init__(model, world)

    @property
    def steps(self) -> Sequence[Stepped]:
        """What is stepped: parameters, or masters of runs of them."""
        return self.state.steps

    def masters(self) -> Iterator[StateTensor]:
        """The copies that are stepped in the place of parameters."""
        for step in self.steps:
            # Where the parameter is stepped itself, there is no copy: the parameter is saved as such.
            if not step.is_parameter:
                yield from self._members(step, "master", step.tensor)

    def moments(self) -> Iterator[StateTensor]:
        """The tensors of the optimizer's state with an element for each of the parameter's, as they are now.

        Raises ConfigError for what is neither a number nor a tensor.
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
                # Numbers go into the document, and states of other shapes as each rank has them.
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
        """The reduced gradients that no step has used yet.

        Raises ConfigError where gradients are not reduced.
        """
        return self.shard_gradients(self.state.gradients(self._is_replicated))

    def shard_gradients(self, gradients: Sequence[Gradient]) -> Iterator[StateTensor]:
        """Gradients, or the room for them, each with its share of the parameter."""
        for member, gradient in gradients:
            name = self.name_of(member.parameter)
            yield StateTensor(name, "gradient", member_shard(member, self.shards[name], gradient))

    def _members(self, step: Stepped, key: str, values: torch.Tensor) -> Iterator[StateTensor]:
        for member in step.members:
            name = self.name_of(member.parameter)
            yield StateTensor(name, key, member_shard(member, self.shards[name], values))

    def _is_replicated(self, parameter: torch.Tensor) -> bool:
        return not isinstance(parameter, DTensor) and self.shards[self.name_of(parameter)].held[1] > 1


def member_shard(member: Member, shard: Shard, values: torch.Tensor) -> Shard:
    """The share of a member in what is stepped, or in a tensor like it: one of its state, or the gradient.

    ``values`` have the elements of all members of a step, or those of the member alone.
    """
    whole = tuple(values.shape) == shard.layout.shape and values.numel() == member.count
    # A small parameter's padding has its shape, too.
    whole = whole and shard.layout.owned >= member.count
    if whole and member.first is None and not isinstance(values, DTensor):
        return laid_out(shard, values)  # it lies in memory in an order of its own
    # Else the values are one run: of this member alone, or of all members of the step, of which it has a
    # part.
    local = (values.to_local() if isinstance(values, DTensor) else values).detach().view(-1)
    storage = local if local.numel() == member.count else local[member.at : member.at + member.count]
    if member.first is None:
        return replace(shard, storage=storage)
    layout = narrowed(shard.layout, member.first, member.first + member.count)
    # Who has the other runs nobody asks here: they have no elements in common.
    return Shard(shard.name, layout, storage, lambda _: layout, shard.stepped)


def is_elementwise(step: Stepped) -> bool:
    """Whether each tensor of a state has one plain element for each element that is stepped."""
    tensors = [value for value in step.state.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not step.tensor.dim():
        return True
    return all(v.shape == step.tensor.shape and not _keeps_others(v) for v in tensors)


def _keeps_others(value: torch.Tensor) -> bool:
    return hasattr(value.to_local() if isinstance(value, DTensor) else value, "__tensor_flatten__")


def is_number(key: str, value: object, step: Stepped) -> bool:
    """Whether an entry of a state is a number, which is the same for every element."""
    if isinstance(value, (bool, int, float)) or value is None:
        return True
    # A parameter without dimensions has moments without dimensions: only its ``step`` is a number then.
    shaped = step.tensor.dim() == 0 and key != "step"
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not shaped
