"""The tensors of a checkpoint as symbolic tensors.

One tensor under two names is one object. Views of one storage are tensors of their own: reading them is
served, and a write into one of them is refused, since the others might not show it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from zerostart import geometry
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, Catalog, TensorEntry
from zerostart.recipe.dtypes import torch_dtype
from zerostart.recipe.memory import Memory
from zerostart.recipe.symbolic import SymbolicTensor
from zerostart.recipe.values import Value


def symbols_of(catalog: Catalog) -> dict[str, SymbolicTensor]:
    """A symbolic tensor for each tensor of the checkpoint, by its name.

    Raises CheckpointError for a dtype that torch does not have.
    """
    made: dict[str, SymbolicTensor] = {}
    storages: dict[tuple[int, int], list[TensorEntry]] = {}
    for name, tensor in catalog.weights.items():
        # Put together of several files: no storage that others could be views of.
        if isinstance(tensor, Assembled):
            value = Value(tensor.pieces, tensor.shape, torch_dtype(tensor.dtype, tensor.name))
            made[name] = SymbolicTensor(Memory.holding(value))
        elif tensor.same_as in catalog.weights:
            continue  # another name of a tensor that is there
        elif not tensor.numel:
            made[name] = _alone(tensor)
        else:
            # Where the storage itself begins in the file, by which views of one storage are known.
            begin = tensor.offset - tensor.storage_offset * DTYPE_BITS[tensor.dtype] // 8
            storages.setdefault((tensor.file, begin), []).append(tensor)
    for entries in storages.values():
        for entry in entries:
            others = (other.name for other in entries if other is not entry)
            made[entry.name] = _alone(entry, overlaps=next(others, None))
    for name, tensor in catalog.weights.items():
        if isinstance(tensor, TensorEntry) and tensor.same_as in made:
            # After all storages, so that the one that it is another name of is there.
            made[name] = made[tensor.same_as]
    return {name: made[name] for name in catalog.weights}


def copies_of(symbols: Mapping[str, SymbolicTensor]) -> dict[str, SymbolicTensor]:
    """The tensors in memory of their own, shared as before, for code that may write into them."""
    return copy.deepcopy(dict(symbols))


def _alone(entry: TensorEntry, overlaps: str | None = None) -> SymbolicTensor:
    """A tensor that shares its memory with no other."""
    pieces = geometry.whole(entry.name, entry.shape, entry.strides)
    value = Value(pieces, entry.shape, torch_dtype(entry.dtype, entry.name))
    memory = Memory.holding(value, entry.strides, entry.storage_offset)
    memory.overlaps = overlaps
    return SymbolicTensor(memory)
