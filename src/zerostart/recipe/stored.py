"""Make symbolic tensors of a checkpoint's tensors.

Two names of one tensor give one object. Views of one storage are separate tensors. They can be read, but a
write into one is refused, since the others might not show it.
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


def make_symbols(catalog: Catalog) -> dict[str, SymbolicTensor]:
    """Return a symbolic tensor for each checkpoint tensor.

    Raises CheckpointError for a dtype that torch does not have.
    """
    symbols: dict[str, SymbolicTensor] = {}
    storages: dict[tuple[int, int], list[TensorEntry]] = {}
    for name, tensor in catalog.weights.items():
        # Assembled from several files, so no other tensor is a view of its storage.
        if isinstance(tensor, Assembled):
            value = Value(tensor.pieces, tensor.shape, torch_dtype(tensor.dtype, tensor.name))
            symbols[name] = SymbolicTensor(Memory.of_value(value))
        elif tensor.same_as in catalog.weights:
            continue  # a second name of another tensor
        elif not tensor.numel:
            symbols[name] = _separate_symbol(tensor)
        else:
            # Offset of the storage in the file, which identifies views of one storage.
            begin = tensor.offset - tensor.storage_offset * DTYPE_BITS[tensor.dtype] // 8
            storages.setdefault((tensor.file, begin), []).append(tensor)
    for entries in storages.values():
        for entry in entries:
            others = (other.name for other in entries if other is not entry)
            symbols[entry.name] = _separate_symbol(entry, overlaps=next(others, None))
    for name, tensor in catalog.weights.items():
        if isinstance(tensor, TensorEntry) and tensor.same_as in symbols:
            # After the loop over storages, so that the first name is there.
            symbols[name] = symbols[tensor.same_as]
    return {name: symbols[name] for name in catalog.weights}


def copy_symbols(symbols: Mapping[str, SymbolicTensor]) -> dict[str, SymbolicTensor]:
    """Copy the tensors, with shared memory, for code that writes."""
    return copy.deepcopy(dict(symbols))


def _separate_symbol(entry: TensorEntry, overlaps: str | None = None) -> SymbolicTensor:
    pieces = geometry.whole(entry.name, entry.shape, entry.strides)
    value = Value(pieces, entry.shape, torch_dtype(entry.dtype, entry.name))
    memory = Memory.of_value(value, entry.strides, entry.storage_offset)
    memory.overlaps = overlaps
    return SymbolicTensor(memory)
