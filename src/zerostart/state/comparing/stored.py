"""Tensors of checkpoint files, any run of which can be had."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import PurePosixPath
from types import TracebackType

import torch

from zerostart.checkpoint import manifest
from zerostart.checkpoint.catalog import (
    DTYPE_BITS,
    Assembled,
    Catalog,
    TensorEntry,
    contiguous_strides,
)
from zerostart.checkpoint.formats.pipeline import components
from zerostart.checkpoint.formats.saved_state import open_saved_state
from zerostart.checkpoint.paths import expanded, wait_for
from zerostart.checkpoint.source import open_catalog, resolve_source
from zerostart.checkpoint.storage import Reader, storage_at
from zerostart.geometry.layout.flat import flat_run
from zerostart.recipe import Recipe, Target, torch_dtype
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, join
from zerostart.transfer.staging import bytes_view

#: Where a training state has the model, under its state-dict names.
MODEL = "model"


def is_state(source: str | os.PathLike[str]) -> bool:
    """Whether ``source`` is a directory of ``save_state``."""
    wait_for(source)
    return manifest.is_state(expanded(source))


def catalogs_at(source: str | os.PathLike[str], model_alone: bool) -> list[tuple[str, Catalog]]:
    """The catalogs at ``source``, each with what its names begin with in a comparison.

    A pipeline has one for each model, a training state one for each folder (``model_alone``: the model's).
    Raises what ``open_catalog`` does.
    """
    if storage_at(source) is not None:
        return [("", open_catalog(source))]
    path = resolve_source(source)
    if path.is_dir() and is_state(path):
        if model_alone:
            return [("", open_saved_state(path, [MODEL])[1][0])]
        document = manifest.current(path, manifest.STATE_MARKER) or {}
        files = [PurePosixPath(name) for name in document.get("files", ()) if name.endswith(".safetensors")]
        folders = sorted({str(file.parent) for file in files})
        catalogs = open_saved_state(path, folders)[1]
        return [(f"{folder}/", catalog) for folder, catalog in zip(folders, catalogs, strict=True)]
    found = components(path) if path.is_dir() else None
    if found is not None:
        return [(f"{component.name}/", open_catalog(component.path)) for component in found]
    return [("", open_catalog(path))]


class Stored:
    """The tensors of catalogs, by name; inside the block their elements can be read, from several threads."""

    def __init__(self, catalogs: Sequence[tuple[str, Catalog]]) -> None:
        self._catalogs = [catalog for _, catalog in catalogs]
        self._readers: list[Reader] = []
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._kept: tuple[str, torch.Tensor] | None = None
        self._number = {
            begin + name: (number, entry)
            for number, (begin, catalog) in enumerate(catalogs)
            for name, entry in catalog.weights.items()
        }
        self.tensors: dict[str, TensorEntry | Assembled] = {
            name: entry for name, (_, entry) in self._number.items()
        }

    def __enter__(self) -> Stored:
        self._readers = [self._stack.enter_context(catalog.storage.reader()) for catalog in self._catalogs]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def count(self, name: str) -> int:
        """Elements of a tensor; bytes, where an element is less than one."""
        entry = self.tensors[name]
        return entry.numel if DTYPE_BITS[entry.dtype] >= 8 else entry.nbytes

    def values(self, name: str, first: int, count: int) -> torch.Tensor:
        """``count`` elements from ``first`` on, row-major; bytes, where an element is less than one.

        Raises ReadError and CheckpointNotFoundError.
        """
        number, entry = self._number[name]
        dtype = torch.uint8 if DTYPE_BITS[entry.dtype] < 8 else torch_dtype(entry.dtype, name)
        if isinstance(entry, Assembled):
            return self._put_together(number, entry, dtype, first, count)
        if entry.strides is not None and not contiguous_strides(entry.shape, entry.strides):
            with self._lock:
                if self._kept is None or self._kept[0] != name:
                    self._kept = (name, self._put_in_order(number, entry, dtype))
                return self._kept[1][first : first + count]
        return self._read(number, entry, dtype, first, count)

    def _read(
        self, number: int, entry: TensorEntry, dtype: torch.dtype, first: int, count: int
    ) -> torch.Tensor:
        values = torch.empty(count, dtype=dtype, device="cpu")
        if count:
            view = bytes_view(torch.view_as_real(values).view(-1) if dtype.is_complex else values)
            self._readers[number].read(entry.file, entry.offset + first * dtype.itemsize, [view])
        return values

    def _put_together(
        self, number: int, entry: Assembled, dtype: torch.dtype, first: int, count: int
    ) -> torch.Tensor:
        """Elements of a tensor that lies in the shares of the ranks that wrote it."""
        values = torch.empty(count, dtype=dtype, device="cpu")
        recipe = Recipe(Target(entry.name, entry.shape, dtype), entry.pieces)
        destination = Destination(entry.name, count, count, dtype, True)
        layout = flat_run(entry.shape, first, first + count)
        plan = join(self._catalogs[number], [(recipe, layout, destination)])
        execute(plan, [values], Progress(plan.read_bytes, shown=False), 1)
        return values

    def _put_in_order(self, number: int, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        """A whole tensor that a torch file has transposed, sliced or expanded; it is not had in parts."""
        assert entry.strides is not None, "asked for a strided one"
        span = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, entry.strides, strict=True))
        held = self._read(number, entry, dtype, 0, span if entry.numel else 0)
        return held.as_strided(entry.shape, entry.strides).reshape(-1)
