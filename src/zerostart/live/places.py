"""Where a live model has its tensors: the logical ones, by the names that they have in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import Shard, plain_name
from zerostart.errors import ConfigError
from zerostart.live.record import bare_model, loaded_model, record_of, wrapped
from zerostart.live.shards import found_shards, put_to_rest, with_whole
from zerostart.models import state_names

#: Packages whose modules are put around a whole model; PEFT's have parameters of their own.
_AROUND = ("torch", "deepspeed", "accelerate")


@dataclass(frozen=True)
class Places:
    """The tensors of ``module``, the model without what was wrapped around it.

    ``shards`` has this rank's share of each parameter once, and ``parameters`` the parameter, by the first
    name; ``ties`` the first name of every other one, ``names`` the first names by the parameters' ``id``.
    ``buffers`` are the persistent ones, whole on every rank, and ``around`` those of what
    is wrapped around (``AveragedModel.n_averaged``). ``alone``: there is no other rank.
    """

    module: nn.Module
    shards: dict[str, Shard]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    around: dict[str, torch.Tensor]
    ties: dict[str, str]
    names: dict[int, str]
    alone: bool

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter; raises ConfigError for one that is not the model's."""
        if (name := self.names.get(id(parameter))) is not None:
            return name
        raise ConfigError(
            "the optimizer has a parameter that is not the model's; pass the model and the optimizer that "
            "were trained together, the optimizer made of the model's parameters as they are now"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what engines, DistributedDataParallel and torch.compile have put around it."""
    while type(model).__module__.partition(".")[0] in _AROUND and (inner := wrapped(model)) is not None:
        model = inner
    return model


def places_of(model: nn.Module, world: World) -> Places:
    """The places of ``model``, whoever has loaded it; PEFT's adapters have names beside their layer's.

    Raises EngineError for a parameter of which no one place can be said.
    """
    put_to_rest(model)  # parameters are told by their objects in all that follows
    outer, inner = _unwrapped(model), bare_model(model)
    loaded = loaded_model(outer)
    shards = _found(loaded, outer, world)
    own: dict[str, Shard] = {}
    parameters: dict[str, nn.Parameter] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in _named(inner, outer):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
            continue
        parameters[name] = parameter
        own[name] = shards[id(parameter)]
    buffers = {plain_name(name): tensor for name, tensor, buffer in state_names(inner) if buffer}
    inside = {id(tensor) for _, tensor, buffer in state_names(inner) if buffer}
    around = {name: t for name, t, buffer in state_names(model) if buffer and id(t) not in inside}
    return Places(inner, own, parameters, buffers, around, ties, first, world.size == 1)


def _named(inner: nn.Module, outer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with their names, aliases included; of what lies around ``inner`` by the names there."""
    inside = set()
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        inside.add(id(parameter))
        yield plain_name(name), parameter
    for name, parameter in outer.named_parameters():
        if id(parameter) not in inside:
            yield plain_name(name), parameter


def _found(loaded: nn.Module, outer: nn.Module, world: World) -> dict[int, Shard]:
    """Shards of all parameters of ``outer``, by id; what was loaded lies as its record says."""
    inside = dict(loaded.named_parameters(remove_duplicate=False))
    try:
        known = {id(inside[name]): shard for name, shard in record_of(loaded).shards(loaded).items()}
        ours = {id(parameter) for parameter in inside.values()}
    except ConfigError:
        known, ours = {}, set()
    named = dict(outer.named_parameters(remove_duplicate=False))
    around = any(id(parameter) not in ours for parameter in named.values())
    found = found_shards(outer, world) if around else {}
    found.update({name: known[id(p)] for name, p in named.items() if id(p) in known})
    every = with_whole(outer, found, world)
    return {id(parameter): every[name] for name, parameter in named.items()}
