"""Make symbolic tensors of a checkpoint's tensors.

Two names of one tensor give one object. Views of one storage are separate tensors. They can be read, but a
write into one is refused, since the others might not show it.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping

from zerostart import geometry
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, Catalog, TensorEntry
from zerostart.recipe.dtypes import torch_dtype
from zerostart.recipe.memory import Memory
from zerostart.recipe.symbolic import SymbolicTensor
from zerostart.recipe.values import Value


class CheckpointSymbols(Mapping[str, SymbolicTensor]):
    """The tensors of a checkpoint as symbolic tensors, which are made when they are first used.

    Raises CheckpointError for a dtype that torch does not have.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._entries: dict[str, TensorEntry | Assembled] = dict(catalog.weights)
        self._made: dict[str, SymbolicTensor] = {}
        self._changed: set[str] = set()
        storages: dict[tuple[int, int], list[str]] = {}
        for name, entry in self._entries.items():
            torch_dtype(entry.dtype, name)
            # Assembled from several files, or a second name: no view of another tensor's storage.
            if isinstance(entry, TensorEntry) and entry.same_as not in self._entries and entry.numel:
                # Offset of the storage in the file, which identifies views of one storage.
                begin = entry.offset - entry.storage_offset * DTYPE_BITS[entry.dtype] // 8
                storages.setdefault((entry.file, begin), []).append(name)
        self._views = {name: names for names in storages.values() if len(names) > 1 for name in names}

    def __getitem__(self, name: str) -> SymbolicTensor:
        if name not in self._made:
            self._made[name] = self._make(name, self._entries[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def _make(self, name: str, entry: TensorEntry | Assembled) -> SymbolicTensor:
        dtype = torch_dtype(entry.dtype, name)
        if isinstance(entry, Assembled):
            return SymbolicTensor(Memory.of_value(Value(entry.pieces, entry.shape, dtype)))
        if entry.same_as in self._entries:
            return self[entry.same_as]
        value = Value(geometry.whole(name, entry.shape, entry.strides), entry.shape, dtype)
        memory = Memory.of_value(value, entry.strides, entry.storage_offset)
        memory.overlaps = next((other for other in self._views.get(name, ()) if other != name), None)
        return SymbolicTensor(memory)

    def form(self, name: str) -> Hashable:
        """Return a key that is equal for tensors that differ only in their names and places."""
        entry = self._entries[name]
        if isinstance(entry, Assembled) or entry.same_as or name in self._views or name in self._changed:
            return name
        return entry.dtype, entry.shape, entry.strides, entry.storage_offset

    def change(self, changed: Mapping[str, SymbolicTensor], dropped: Container[str]) -> None:
        """Replace the tensors ``changed``, and drop others."""
        self._changed |= changed.keys()
        self._made.update(changed)
        self._entries = {name: entry for name, entry in self._entries.items() if name not in dropped}
