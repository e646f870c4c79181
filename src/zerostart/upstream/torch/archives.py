"""Files of ``torch.save`` whose tensors are written later; what describes a distributed checkpoint."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from zerostart.upstream.registry import Use, need
from zerostart.upstream.versions import TORCH

_FAKE = Use(
    library=TORCH,
    owner="torch._subclasses.fake_tensor",
    names=("FakeTensorMode",),
    why="torch.save lays out archives of tensors that are in no memory",
)
_PLACES = Use(
    library=TORCH,
    owner="torch.distributed.checkpoint.filesystem",
    names=("_StorageInfo",),
    why="the description of a distributed checkpoint says where parts lie",
)
TOUCHED = (_FAKE, _PLACES)


def empty_tensors(
    kinds: Sequence[tuple[torch.dtype, Sequence[int]]],
) -> list[torch.Tensor]:
    """Tensors of these dtypes and shapes for ``save_without_data``, none of which is in memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    need(_FAKE)
    with FakeTensorMode():
        return [torch.empty(tuple(shape), dtype=dtype, device="cpu") for dtype, shape in kinds]


def save_without_data(value: object, path: Path) -> None:
    """What ``torch.save`` writes of ``value``, with holes for the elements of all tensors."""
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(value, path)


#: Of one entry of a distributed checkpoint: dtype and shape (None where it is no tensor), the way to it in
#: the state dict, and the file, offset and bytes of its archive.
Described = tuple[torch.dtype | None, Sequence[int], tuple[str | int, ...], tuple[str, int, int]]


def distributed_metadata(entries: Mapping[str, Described]) -> bytes:
    """The ``.metadata`` of a ``torch.distributed.checkpoint`` whose tensors have one box each."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    need(_PLACES)
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for key, (dtype, shape, _, place) in entries.items():
        if dtype is None:
            tensors[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _StorageInfo(*place)
        else:
            origin, size = torch.Size([0] * len(shape)), torch.Size(shape)
            box = ChunkStorageMetadata(offsets=origin, sizes=size)
            tensors[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype), size=size, chunks=[box]
            )
            places[MetadataIndex(key, origin, 0)] = _StorageInfo(*place)
    routes = {key: route for key, (_, _, route, _) in entries.items()}
    return pickle.dumps(Metadata(state_dict_metadata=tensors, planner_data=routes, storage_data=places))
