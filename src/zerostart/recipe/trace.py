"""The steps from a catalog and a model's expectations to recipes, all on symbolic tensors.

A library of models puts them together: what the checkpoint holds (``stored``), a conversion of it, its
own or the caller's (``run_converter``), and then either names that are matched (``matched``, ``assembled``)
or a module's own loading (``loaded_into``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from zerostart import geometry
from zerostart.errors import ConversionError
from zerostart.recipe.coverage import Coverage
from zerostart.recipe.modules import Loaded, load_module
from zerostart.recipe.operators import cast
from zerostart.recipe.recipe import Recipe, Recipes, Target
from zerostart.recipe.recording import recorded
from zerostart.recipe.stored import copies_of
from zerostart.recipe.symbolic import SymbolicTensor, settled


def run_converter(
    converter: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    symbols: Mapping[str, SymbolicTensor],
    known_as: str | None = None,
) -> dict[str, SymbolicTensor]:
    """Run the converter on a state dict of symbolic tensors; messages call it ``known_as``, or by its name.

    Raises ConversionError for a conversion that fails, is random, or depends on the values of weights.
    """
    name = known_as or str(getattr(converter, "__name__", type(converter).__name__))
    given: dict[str, torch.Tensor] = dict(copies_of(symbols))

    def run() -> dict[str, SymbolicTensor]:
        return _state_dict(name, converter(given))

    try:
        return recorded(f"the converter {name}", run)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(f"the converter {name} failed: {type(error).__name__}: {error}") from error


def _state_dict(name: str, made: Any) -> dict[str, SymbolicTensor]:
    """What the converter ``name`` made, in the state that its tensors have when it is done."""
    if not isinstance(made, Mapping):
        raise ConversionError(f"the converter {name} gave a {type(made).__name__}, and not a mapping")
    strange = [key for key, value in made.items() if not isinstance(value, torch.Tensor)]
    if strange:
        kind = type(made[strange[0]]).__name__
        raise ConversionError(
            f"the converter {name} made {strange[0]!r} (and {len(strange) - 1} more) a {kind}, and not a "
            "tensor; leave such entries out"
        )
    return {str(key): settled(value) for key, value in made.items()}


def matched(
    tensors: Mapping[str, SymbolicTensor], targets: Mapping[str, Target], ignored: tuple[str, ...] = ()
) -> Recipes:
    """Recipes out of a state dict whose names are the model's.

    Raises ConversionError as ``assembled`` does.
    """
    unexpected = [key for key in tensors if key not in targets]
    return assembled(tensors, targets, unexpected, frozenset(tensors), (), ignored)


def loaded_into(
    model: torch.nn.Module,
    symbols: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
    versions: Mapping[str, Mapping[str, Any]] | None,
    log: AbstractContextManager[object],
) -> Recipes:
    """Recipes out of what the module's own ``load_state_dict`` makes of ``symbols``; see ``load_module``.

    Raises ConversionError where what it does to a tensor cannot be followed.
    """
    before = {name: tensor.dtype for name, (tensor, _) in _tensors(model).items()}
    return _loaded(load_module(model, symbols, targets, versions, log), model, targets, before)


def _tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Parameters and buffers by name, tied names included, and which of them are buffers."""
    return {
        **{name: (t, False) for name, t in model.named_parameters(remove_duplicate=False)},
        **{name: (t, True) for name, t in model.named_buffers(remove_duplicate=False)},
    }


def _loaded(
    loaded: Loaded,
    model: torch.nn.Module,
    targets: Mapping[str, Target],
    before: Mapping[str, torch.dtype],
) -> Recipes:
    """Recipes out of what a module's loading fills; it may have changed the module's tensors meanwhile.

    ``before`` are their dtypes until then: where the load asks for none, what the module has changed stays.
    """
    now = _tensors(model)
    # A tied tensor has several names, and is stored under one.
    stored = {id(symbol) for name, symbol in loaded.tensors.items() if _as_stored(name, symbol)}
    by_name: dict[str, Recipe] = {}
    for name, symbol in loaded.tensors.items():
        tensor, buffer = now[name]
        known = targets.get(name)
        dtype = known.dtype if known is not None and tensor.dtype.is_floating_point else tensor.dtype
        if known is not None and known.as_stored and symbol.dtype.is_floating_point:
            dtype = symbol.dtype if tensor.dtype == before.get(name) else tensor.dtype
        target = Target(name, tuple(symbol.shape), dtype, buffer)
        by_name[name] = Recipe(target, cast(symbol.value, dtype).pieces, id(symbol) not in stored)
    return Recipes(by_name, Coverage(loaded.missing, loaded.unexpected, loaded.mismatched))


def assembled(
    tensors: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
    unexpected: list[str],
    converted: frozenset[str],
    conversions: tuple[object, ...],
    ignored: tuple[str, ...] = (),
) -> Recipes:
    """Match what a conversion gives, of which ``converted`` are not merely renamed, with what is expected.

    Raises ConversionError for a cast of values that cannot be followed.
    """
    by_name: dict[str, Recipe] = {}
    missing: list[str] = []
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, target in targets.items():
        tensor = tensors.get(name)
        if tensor is None:
            missing.append(name)
        elif tuple(tensor.shape) != target.shape:
            mismatched[name] = (tuple(tensor.shape), target.shape)
        else:
            if target.as_stored and tensor.dtype.is_floating_point:
                target = replace(target, dtype=tensor.dtype)
            changed = name in converted and not _as_stored(name, tensor)
            by_name[name] = Recipe(target, cast(tensor.value, target.dtype).pieces, changed)
    coverage = Coverage(tuple(missing), tuple(unexpected), mismatched, ignored)
    return Recipes(by_name, coverage, conversions)


def _as_stored(name: str, tensor: SymbolicTensor) -> bool:
    """Whether the tensor is the checkpoint tensor ``name`` in row-major order, whole and unchanged."""
    if len(tensor.pieces) != 1:
        return False
    (piece,) = tensor.pieces
    source = piece.source[0]
    return source == name and geometry.whole(source, tuple(tensor.shape)) == (piece,)
