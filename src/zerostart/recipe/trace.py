"""From a catalog and a model's expectations to recipes.

Three kinds of conversion meet here, all run on symbolic tensors: none (the names agree), the mapping that
transformers registers for the model, and a converter of the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.recipe import transformers as hf
from zerostart.recipe.coverage import Coverage
from zerostart.recipe.dtypes import torch_dtype
from zerostart.recipe.recipe import Recipe, Recipes, Target
from zerostart.recipe.symbolic import SymbolicTensor

__all__ = ["trace"]


def trace(catalog: Catalog, model: torch.nn.Module, targets: Mapping[str, Target]) -> Recipes:
    """The recipe of every target that the checkpoint covers, and what is left open.

    ``model`` has its true shapes (on meta, before sharding). Raises ConversionError for a conversion that
    fails or is no index map.
    """
    symbols = {
        name: SymbolicTensor.of(name, entry.shape, torch_dtype(entry.dtype, name))
        for name, entry in catalog.tensors.items()
    }
    if hf.is_pretrained(model):
        result = hf.convert(model, symbols, frozenset(targets))
        return _assemble(targets, result.tensors, result.unexpected, result.converted, result.used)
    unexpected = [name for name in symbols if name not in targets]
    return _assemble(targets, symbols, unexpected, frozenset(), ())


def _assemble(
    targets: Mapping[str, Target],
    tensors: Mapping[str, SymbolicTensor],
    unexpected: list[str],
    converted: frozenset[str],
    conversions: tuple[object, ...],
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
            by_name[name] = Recipe(target, tensor.pieces, name in converted)
    coverage = Coverage(tuple(missing), tuple(unexpected), mismatched)
    return Recipes(by_name, coverage, conversions)
