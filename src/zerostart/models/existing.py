"""Modules that have values already: taken out of the module, and freed as shards are made of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.models.library import Built
from zerostart.models.origins import Origins, keep_dtypes
from zerostart.models.tensors import recast, replace_tensor
from zerostart.recipe import Recipes, Target, matched, symbols_of


def has_values(model: object) -> bool:
    """Whether ``model`` is a module with a parameter, or without any a buffer, that is not on meta."""
    if not isinstance(model, nn.Module):
        return False
    held: list[torch.Tensor] = [*model.parameters()] or [*model.buffers()]
    return any(tensor.device.type != "meta" for tensor in held)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """``(name, tensor, is a buffer)`` of every parameter and buffer once, those not in the state dict too."""
    for name, parameter in model.named_parameters():
        yield name, parameter, False
    for name, buffer in model.named_buffers():
        yield name, buffer, True


class Taken:
    """The parameters of a module, which has others on meta in their place from here on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._old: dict[str, nn.Parameter] = {}
        new: dict[int, torch.Tensor] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            self._old[name] = parameter
            if id(parameter) not in new:
                new[id(parameter)] = recast(parameter, parameter.dtype)
            replace_tensor(model, name, new[id(parameter)])

    def give_back(self) -> None:
        """Put the parameters back, unless they are to be freed by now."""
        for name, parameter in self._old.items():
            replace_tensor(self._model, name, parameter)

    def release(self) -> None:
        """Keep them alive no longer."""
        self._old.clear()


def existing_recipes(built: Built, catalog: Catalog) -> Recipes:
    """Each parameter and buffer as it is, ties once; a dtype that the model is to have is a cast.

    Raises CheckpointError for a dtype that torch does not have, ConversionError as ``matched`` does.
    """
    kept = [] if built.dtype is None else built.library.dtype_plan(built.model, built.dtype)
    targets = {}
    for name, tensor, buffer in named_tensors(built.model):
        held = () if buffer or not tensor.is_floating_point() else kept
        dtype = next((other for pattern, other in held if pattern.search(name)), tensor.dtype)
        targets[name] = Target(name, tuple(tensor.shape), dtype, buffer)
    return matched(symbols_of(catalog), targets)


def existing_origins(built: Built, recipes: Recipes) -> Origins:
    """Everything is there: nothing is tied anew, initialised or computed."""
    keep_dtypes(built.model, recipes)
    found, model = recipes.by_name, built.model
    buffers = {name: found[name] for name, _ in model.named_buffers()}
    return Origins({name: found[name] for name, _ in model.named_parameters()}, buffers, ())
