"""A format of another package: a JSON table, and a file in column order."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.formats import Format, register_format
from zerostart.checkpoint.storage import LocalFiles
from zerostart.checkpoint.storage.files import FileState
from zerostart.errors import CheckpointError, CheckpointNotFoundError
from zerostart.recipe import spelling

TABLE, BYTES = "columns.json", "columns.bin"


@register_format
class Columns(Format):
    """Format that stores each tensor's last dimension first, so that reads need strides."""

    name = "columns"

    def recognises(self, path: Path) -> bool:
        """Look for the table."""
        return (path / TABLE).is_file()

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """Read the table, and compare it with the length of the file."""
        file = path / BYTES
        if (state := FileState.at(str(file))) is None:
            raise CheckpointNotFoundError(f"{file}: {TABLE} names this file, but it does not exist")
        tensors, offset = {}, 0
        for name, (dtype, shape, nbytes) in json.loads((path / TABLE).read_text()).items():
            strides = [1] * len(shape)
            for dim in range(1, len(shape)):
                strides[dim] = strides[dim - 1] * shape[dim - 1]
            tensors[name] = TensorEntry(name, dtype, tuple(shape), 0, offset, nbytes, tuple(strides))
            offset += nbytes
        if offset != state.size:
            raise CheckpointError(f"{file}: has {state.size} bytes, but {TABLE} needs {offset}")
        return Catalog(str(path), LocalFiles.known([str(file)], [state]), tensors)


def write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Save tensors in the format ``Columns``."""
    table, columns = {}, bytearray()
    for name, tensor in tensors.items():
        transposed = tensor.permute(list(reversed(range(tensor.dim())))).contiguous()
        data = transposed.flatten().view(torch.uint8).numpy().tobytes()
        table[name] = [spelling(tensor.dtype, name), list(tensor.shape), len(data)]
        columns += data
    (path / TABLE).write_text(json.dumps(table))
    (path / BYTES).write_bytes(columns)
