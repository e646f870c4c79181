"""From a catalog and a model's expectations to recipes.

Four kinds of conversion meet here, all run on symbolic tensors: a module's own ``load_state_dict``, the
mapping that transformers registers for the model, the converter that diffusers registers, and one of the
caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from zerostart import geometry
from zerostart.checkpoint.catalog import Assembled, Catalog, TensorEntry
from zerostart.errors import ConversionError
from zerostart.recipe import diffusers
from zerostart.recipe import transformers as hf
from zerostart.recipe.coverage import Coverage
from zerostart.recipe.dtypes import torch_dtype
from zerostart.recipe.memory import Memory
from zerostart.recipe.modules import Loaded, load_module
from zerostart.recipe.operators import cast
from zerostart.recipe.recipe import Recipe, Recipes, Target
from zerostart.recipe.recording import recorded
from zerostart.recipe.symbolic import SymbolicTensor, settled
from zerostart.recipe.threads import one_thread
from zerostart.recipe.values import Value
from zerostart.upstream.diffusers import is_diffusers
from zerostart.upstream.transformers import is_pretrained, registered_conversions

__all__ = ["trace"]


@one_thread()
def trace(
    catalog: Catalog,
    model: torch.nn.Module,
    targets: Mapping[str, Target],
    converter: Any = None,
    quantizer: Any = None,
    log: AbstractContextManager[object] | None = None,
) -> Recipes:
    """The recipe of every target that the checkpoint covers, and what is left open.

    ``model`` has its true shapes (on meta, before sharding). ``converter`` is None (the registered mapping),
    a callable from state dict to state dict, or a list of transformers conversions. ``quantizer`` is
    transformers' own, which adds the dequantisation to the registered mapping. ``log`` is the model's, for
    what loading it does to its own tensors. Raises ConversionError for a conversion that fails, is random, or
    depends on the values of weights.
    """
    symbols = {name: _symbol(tensor) for name, tensor in catalog.weights.items()}
    plain = not (is_pretrained(model) or is_diffusers(model))
    if callable(converter):
        name = getattr(converter, "__name__", type(converter).__name__)
        symbols = _run(name, converter, symbols)
        if not plain:
            return _made(symbols, targets)
    elif converter is not None and not is_pretrained(model):
        raise ConversionError(
            f"converter is a list of conversions, which are for a transformers model, and "
            f"{type(model).__name__} is none; pass a callable from state dict to state dict"
        )
    if plain:
        versions = None if callable(converter) else catalog.versions
        return _loaded(load_module(model, symbols, targets, versions, log or nullcontext()), model, targets)
    if is_pretrained(model):
        mapping = registered_conversions(model, quantizer) if converter is None else list(converter)
        result = hf.convert(model, mapping, symbols, targets)
        return _assemble(targets, result.tensors, result.unexpected, result.converted, result.used)
    reading = diffusers.convert(model, symbols, targets, _run)
    return _made(reading.tensors, targets, reading.others)


def _symbol(tensor: TensorEntry | Assembled) -> SymbolicTensor:
    """A tensor of the checkpoint as it is stored, in one place or in several."""
    dtype = torch_dtype(tensor.dtype, tensor.name)
    if isinstance(tensor, TensorEntry):
        return SymbolicTensor.of(tensor.name, tensor.shape, dtype, tensor.strides)
    return SymbolicTensor(Memory.holding(Value(tensor.pieces, tensor.shape, dtype)))


def _run(
    name: str,
    converter: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    symbols: Mapping[str, SymbolicTensor],
) -> dict[str, SymbolicTensor]:
    """Run the converter ``name`` on a state dict of symbolic tensors."""

    given: dict[str, torch.Tensor] = {key: symbol.copied() for key, symbol in symbols.items()}

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


def _made(
    tensors: Mapping[str, SymbolicTensor], targets: Mapping[str, Target], ignored: tuple[str, ...] = ()
) -> Recipes:
    """Recipes out of what a converter made."""
    unexpected = [key for key in tensors if key not in targets]
    return _assemble(targets, tensors, unexpected, frozenset(tensors), (), ignored)


def _loaded(loaded: Loaded, model: torch.nn.Module, targets: Mapping[str, Target]) -> Recipes:
    """Recipes out of what a module's loading fills; it may have changed the module's tensors meanwhile."""
    now = {
        **{name: (t, False) for name, t in model.named_parameters(remove_duplicate=False)},
        **{name: (t, True) for name, t in model.named_buffers(remove_duplicate=False)},
    }
    # A tied tensor has several names, and is stored under one.
    stored = {id(symbol) for name, symbol in loaded.tensors.items() if _as_stored(name, symbol)}
    by_name: dict[str, Recipe] = {}
    for name, symbol in loaded.tensors.items():
        tensor, buffer = now[name]
        known = targets.get(name)
        dtype = known.dtype if known is not None and tensor.dtype.is_floating_point else tensor.dtype
        if known is not None and known.as_stored and symbol.dtype.is_floating_point:
            dtype = symbol.dtype
        target = Target(name, tuple(symbol.shape), dtype, buffer)
        by_name[name] = Recipe(target, cast(symbol.value, dtype).pieces, id(symbol) not in stored)
    return Recipes(by_name, Coverage(loaded.missing, loaded.unexpected, loaded.mismatched))


def _assemble(
    targets: Mapping[str, Target],
    tensors: Mapping[str, SymbolicTensor],
    unexpected: list[str],
    converted: frozenset[str],
    conversions: tuple[object, ...],
    ignored: tuple[str, ...] = (),
) -> Recipes:
    """Match what the conversion gives with what the model expects."""
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
