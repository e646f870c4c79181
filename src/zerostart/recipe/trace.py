"""From a catalog and a model's expectations to recipes.

Four kinds of conversion meet here, all run on symbolic tensors: none (the names agree), the mapping that
transformers registers for the model, the converter that diffusers registers, and one of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from zerostart import geometry
from zerostart.checkpoint.catalog import Catalog
from zerostart.errors import ConversionError
from zerostart.recipe import diffusers
from zerostart.recipe import transformers as hf
from zerostart.recipe.coverage import Coverage
from zerostart.recipe.dtypes import torch_dtype
from zerostart.recipe.operators import cast
from zerostart.recipe.recipe import Recipe, Recipes, Target
from zerostart.recipe.symbolic import SymbolicTensor, functionalized
from zerostart.recipe.threads import one_thread
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
) -> Recipes:
    """The recipe of every target that the checkpoint covers, and what is left open.

    ``model`` has its true shapes (on meta, before sharding). ``converter`` is None (the registered mapping),
    a callable from state dict to state dict, or a list of transformers conversions. ``quantizer`` is
    transformers' own, which adds the dequantisation to the registered mapping. Raises ConversionError
    for a conversion that fails, is random, or depends on the values of weights.
    """
    symbols = {
        name: SymbolicTensor.of(name, entry.shape, torch_dtype(entry.dtype, name), entry.strides)
        for name, entry in catalog.tensors.items()
    }
    if callable(converter):
        name = getattr(converter, "__name__", type(converter).__name__)
        return _made(_run(name, converter, symbols), targets)
    if is_pretrained(model):
        mapping = registered_conversions(model, quantizer) if converter is None else list(converter)
        result = hf.convert(model, mapping, symbols, targets)
        return _assemble(targets, result.tensors, result.unexpected, result.converted, result.used)
    if is_diffusers(model):
        reading = diffusers.convert(model, symbols, targets, _run)
        return _made(reading.tensors, targets, reading.others)
    unexpected = [name for name in symbols if name not in targets]
    return _assemble(targets, symbols, unexpected, frozenset(), ())


def _run(
    name: str,
    converter: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    symbols: Mapping[str, SymbolicTensor],
) -> dict[str, SymbolicTensor]:
    """Run the converter ``name`` on a state dict of symbolic tensors."""

    def run(state_dict: dict[str, torch.Tensor]) -> Any:
        made = converter(state_dict)
        # A mapping of a class of its own is opened here, where its tensors still are functionalization's.
        return dict(made) if isinstance(made, Mapping) else made

    randomness = torch.get_rng_state()
    try:
        made = functionalized(run)({key: symbol.copied() for key, symbol in symbols.items()})
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(f"the converter {name} failed: {type(error).__name__}: {error}") from error
    if not torch.equal(randomness, torch.get_rng_state()):
        torch.set_rng_state(randomness)
        raise ConversionError(
            f"the converter {name} draws random numbers, which would differ from rank to rank; leave out "
            "what it makes of them and pass strict=False to have it initialised"
        )
    if not isinstance(made, Mapping):
        raise ConversionError(f"the converter {name} gave a {type(made).__name__}, and not a mapping")
    strange = [key for key, value in made.items() if not isinstance(value, SymbolicTensor)]
    if strange:
        raise ConversionError(
            f"the converter {name} made {strange[0]!r} (and {len(strange) - 1} more) out of nothing in the "
            "checkpoint; leave such entries out and pass strict=False to have them initialised"
        )
    return {str(key): value for key, value in made.items() if isinstance(value, SymbolicTensor)}


def _made(
    tensors: Mapping[str, SymbolicTensor], targets: Mapping[str, Target], ignored: tuple[str, ...] = ()
) -> Recipes:
    """Recipes out of what a converter made."""
    unexpected = [key for key in tensors if key not in targets]
    return _assemble(targets, tensors, unexpected, frozenset(tensors), (), ignored)


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
            by_name[name] = Recipe(target, cast(tensor, target.dtype).pieces, changed)
    coverage = Coverage(tuple(missing), tuple(unexpected), mismatched, ignored)
    return Recipes(by_name, coverage, conversions)


def _as_stored(name: str, tensor: SymbolicTensor) -> bool:
    """Whether the tensor is the checkpoint tensor ``name`` in row-major order, whole and unchanged."""
    if len(tensor.pieces) != 1:
        return False
    (piece,) = tensor.pieces
    source = piece.source[0]
    return source == name and geometry.whole(source, tuple(tensor.shape)) == (piece,)
