"""Whole tensors of a live model's checkpoint, one after the other, for engines that pull them that way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError
from zerostart.live.full_tensors import carried
from zerostart.live.model import LiveModel
from zerostart.recipe import torch_dtype
from zerostart.state.refitting.image import Image
from zerostart.state.saving.save import contents_to_serve
from zerostart.state.saving.writing import planned
from zerostart.transfer.planning.writes import Write, WritePlan
from zerostart.transfer.writing import Source, write_out

MiB = 1 << 20
#: Bytes of a tensor that travel at a time, and that each rank has a buffer for.
WINDOW = 32 * MiB
#: Bytes of one write of a rank into it.
CHUNK = 8 * MiB


@dataclass(frozen=True)
class TensorMeta:
    """What an iteration yields under a name; the shape is the whole tensor's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """See ``zerostart.weight_source``, which makes it."""

    def __init__(
        self, model: nn.Module, rank: int | None, dtype: torch.dtype | None, merge_adapters: bool
    ) -> None:
        self._world = world = current_world()
        if rank is not None and not 0 <= rank < world.size:
            raise ConfigError(f"rank={rank} is not one of the {world.size} ranks")
        self._model, self._rank = model, rank
        self._dtype, self._merge = dtype, merge_adapters
        self._image = self._looked_at()[0]

    def metadata(self) -> list[TensorMeta]:
        """Name, dtype and whole shape of each tensor, in the order of the iteration; not collective."""
        return [
            TensorMeta(name, torch_dtype(dtype, name), tuple(shape))
            for name, dtype, shape in self._image.entries
        ]

    def held_names(self) -> None:
        """None: whoever yields tensors yields all of them."""
        return

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the weights as they are when it begins; collective, to the end."""
        world = self._world
        with world.phase("giving whole tensors of the checkpoint"):
            image, plan, storages = self._looked_at()
            if image.entries != self._image.entries:
                raise ConfigError(
                    "the model's tensors have changed since weight_source was called; call it again"
                )
            writes: dict[str, list[Write]] = {}
            for write in plan.writes:
                writes.setdefault(write.name, []).append(write)
            for meta in self.metadata():
                yield (
                    meta.name,
                    self._whole(meta, replace(plan, writes=tuple(writes.get(meta.name, ()))), storages),
                )

    def _looked_at(self) -> tuple[Image, WritePlan, list[Source]]:
        """The checkpoint that a save would write, and what this rank has of it; collective."""
        world = self._world
        with world.phase("looking at the model"):
            live = LiveModel(self._model, world)
            contents = contents_to_serve(self._model, live, self._dtype, self._merge)
            image = Image.of(contents.entries)
            plan, storages = planned(image.layout, contents.outgoing, CHUNK)
        return image, plan, storages

    def _whole(self, meta: TensorMeta, plan: WritePlan, storages: list[Source]) -> torch.Tensor:
        """One tensor, where it is wanted; without memory elsewhere."""
        wanted = self._rank in (None, self._world.rank)
        out = torch.empty(meta.shape, dtype=meta.dtype, device="cpu" if wanted else "meta")
        total = out.numel() * out.element_size()
        flat = out.view(-1).view(torch.uint8) if wanted and total else None
        for low in range(0, total, WINDOW):
            window = _Window(low, torch.zeros(min(WINDOW, total - low), dtype=torch.uint8, device="cpu"))

            def fill(window: _Window = window) -> torch.Tensor:
                writes = tuple(w for w in plan.writes if window.meets(w))
                write_out(replace(plan, writes=writes), storages, window, 1)
                return carried(window.bytes)

            with self._world.collectives(f"giving {meta.name}", fill) as part:
                _add_up(part, self._rank, self._world)
            if flat is not None:
                flat[low : low + part.numel()] = part.cpu()
        return out


def _add_up(part: torch.Tensor, rank: int | None, world: World) -> None:
    """Each byte is one rank's, and zero on the others: their sum is what all have together."""
    if world.size == 1:
        return
    if rank is None:
        dist.all_reduce(part)
    else:
        dist.reduce(part, dst=rank)


class _Window:
    """Bytes ``low`` and on of one tensor: what ``write_out`` writes into."""

    def __init__(self, low: int, data: torch.Tensor) -> None:
        self._low, self.bytes = low, data

    def meets(self, write: Write) -> bool:
        """Whether any of a write may lie in it."""
        first, width = write.first * write.dtype.itemsize, write.span * write.dtype.itemsize
        return first < self._low + self.bytes.numel() and first + width > self._low

    def goes_round(self, nbytes: int) -> bool:
        """Nothing is written to a disk."""
        return False

    def lead(self, name: str, offset: int) -> int:
        """Any place in a page will do."""
        return 0

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """Take rows, ``step`` bytes apart from byte ``offset`` of the tensor on, as far as they are here."""
        given, mine = np.frombuffer(data, dtype=np.uint8), self.bytes.numpy()
        at, stop = offset - self._low, offset - self._low + (rows - 1) * step + length
        if at >= 0 and stop <= len(mine):
            shape, strides = (rows, length), (step, 1)
            into = np.lib.stride_tricks.as_strided(mine[at:stop], shape, strides)
            into[:] = np.lib.stride_tricks.as_strided(given, shape, strides)
            return
        for row in range(rows):
            low, high = max(0, at + row * step), min(len(mine), at + row * step + length)
            if low < high:
                mine[low:high] = given[low - at : high - at]
