"""Write a ``torch.distributed.checkpoint`` directory in bounded memory."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from zerostart.checkpoint.write.folders import check_space, sync_directory
from zerostart.checkpoint.write.staging import write_errors
from zerostart.distributed.world import World
from zerostart.state.converting.source import SourceReader, SourceTensor

#: Maximum size of the rows that are in memory at once, in bytes.
_CHUNK_BYTES = 32 << 20


def save_distributed(
    reader: SourceReader,
    tensors: Mapping[str, SourceTensor],
    directory: Path,
    world: World,
    copy_settings: Callable[[Path], None],
) -> tuple[str, ...]:
    """Write ``tensors`` to ``directory``, which appears whole or not at all; collective.

    Returns the names of the files. Raises ReadError and WriteError.
    """
    target = Path(os.path.realpath(directory))
    part = target.with_name(f".{target.name}.zerostart-part")

    def make() -> None:
        with write_errors(target, "nothing was converted"):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            check_space(part, sum(tensor.nbytes for tensor in tensors.values()), "the checkpoint")
            copy_settings(part)

    def publish() -> tuple[str, ...]:
        with write_errors(target, "nothing was converted"):
            sync_directory(part)
            part.rename(target)
            sync_directory(target.parent)
            return tuple(sorted(path.name for path in target.glob("*.distcp")))

    try:
        world.broadcast_object(make, "making the directory")
        with world.phase("writing the tensors"), write_errors(target, "nothing was converted"):
            _save(reader, tensors, part, world)
        return world.broadcast_object(publish, "naming the directory")
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _save(reader: SourceReader, tensors: Mapping[str, SourceTensor], part: Path, world: World) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled"
            )  # conversions may run in one process
            save(
                {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()},
                storage_writer=FileSystemWriter(part, per_thread_copy_ahead=0),
                planner=_StreamingPlanner(reader, tensors, world),
                no_dist=world.size == 1,
            )
    except CheckpointException as error:  # every rank has the failures of all
        rank = min(error.failures)
        raise error.failures[rank][0] from error


class _StreamingPlanner(DefaultSavePlanner):
    """Planner that saves runs of rows, each read when it is written."""

    def __init__(self, reader: SourceReader, tensors: Mapping[str, SourceTensor], world: World) -> None:
        super().__init__()
        self._reader, self._tensors, self._world = reader, tensors, world
        self._last: torch.Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        """Give every rank its share of the row runs."""
        items = [item for tensor in self._tensors.values() for item in _write_items(tensor)]
        self.plan = SavePlan(items[self._world.rank :: self._world.size], planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read the rows of one item."""
        # The writer keeps all tensors of a file until its end, but has written the last one by now.
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        data = write_item.tensor_data
        assert data is not None, "all items are tensors"
        tensor, chunk = self._tensors[write_item.index.fqn], data.chunk
        first = chunk.offsets[0] * (tensor.numel // tensor.shape[0]) if tensor.numel and tensor.shape else 0
        # A copy, since memory that numpy has seen cannot be given back by `resize_`.
        self._last = self._reader.read(tensor, first, chunk.sizes.numel()).view(chunk.sizes).clone()
        return self._last


def _write_items(tensor: SourceTensor) -> Iterator[WriteItem]:
    shape = torch.Size(tensor.shape)
    rows = shape[0] if shape and tensor.numel else 1
    step = max(1, _CHUNK_BYTES * rows // max(1, tensor.nbytes))
    for first in range(0, rows, step):
        offsets, sizes = list[int]([0] * len(shape)), list(shape)
        if step < rows:
            offsets[0], sizes[0] = first, min(step, rows - first)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        properties = TensorProperties(dtype=tensor.dtype)
        yield WriteItem(
            MetadataIndex(tensor.name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, shape),
        )
