"""A format of somebody else's: a table in JSON, and one file of bytes, column after column."""

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
    """Tensors are stored with their last dimension first, so that each has strides in the file."""

    name = "columns"

    def recognises(self, path: Path) -> bool:
        """By the table."""
        return (path / TABLE).is_file()

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """What the table says, held against the length of the file."""
        file = path / BYTES
        if (state := FileState.at(str(file))) is None:
            raise CheckpointNotFoundError(f"{file}: the table beside it names it, and it is not there")
        tensors, offset = {}, 0
        for name, (dtype, shape, nbytes) in json.loads((path / TABLE).read_text()).items():
            strides = [1] * len(shape)
            for dim in range(1, len(shape)):
                strides[dim] = strides[dim - 1] * shape[dim - 1]
            tensors[name] = TensorEntry(name, dtype, tuple(shape), 0, offset, nbytes, tuple(strides))
            offset += nbytes
        if offset != state.size:
            raise CheckpointError(f"{file}: has {state.size} bytes, and the table beside it needs {offset}")
        return Catalog(str(path), LocalFiles.known([str(file)], [state]), tensors)


def write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Save tensors as ``Columns`` reads them."""
    table, columns = {}, bytearray()
    for name, tensor in tensors.items():
        turned = tensor.permute(list(reversed(range(tensor.dim())))).contiguous()
        data = turned.flatten().view(torch.uint8).numpy().tobytes()
        table[name] = [spelling(tensor.dtype, name), list(tensor.shape), len(data)]
        columns += data
    (path / TABLE).write_text(json.dumps(table))
    (path / BYTES).write_bytes(columns)
