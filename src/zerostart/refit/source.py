"""Whole tensors of a live model's checkpoint, one after the other, for engines that pull them that way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.recipe import torch_dtype
from zerostart.refit.image import SetSums
from zerostart.refit.pushes import ModelWrites, RefitSettings, prepare_model
from zerostart.refit.runs import Runs
from zerostart.refit.within import Rounds


@dataclass(frozen=True)
class TensorMeta:
    """Name, dtype and whole shape of a tensor of the iteration."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """A stream of whole tensors, made by ``zerostart.weight_source``, which documents it."""

    def __init__(self, model: nn.Module, rank: int | None, settings: RefitSettings) -> None:
        self._world = world = current_world()
        if rank is not None and not 0 <= rank < world.size:
            raise ConfigError(f"rank={rank} is not one of the {world.size} ranks")
        self._model, self._settings = model, settings
        self._takers = range(world.size) if rank is None else (rank,)
        self._image = self._look().image

    def metadata(self) -> list[TensorMeta]:
        """Return name, dtype and whole shape of each tensor, in the order of iteration; not collective."""
        return [
            TensorMeta(name, torch_dtype(dtype, name), tuple(shape))
            for name, dtype, shape in self._image.entries
        ]

    def held_names(self) -> None:
        """Return None: whoever yields tensors yields all of them."""
        return

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over the weights as they are when it begins; collective, to the end."""
        world, image = self._world, self._image
        with world.phase("giving whole tensors of the checkpoint"):
            ready = self._look()
            if ready.image.entries != image.entries:
                raise ConfigError(
                    "the model's tensors have changed since weight_source was called; call it again"
                )
            own = Runs.of_writes(ready.plan, image.layout).to_bytes()
            owns = [Runs.from_bytes(data) for data in world.all_gather_object(own, "planning the messages")]
            wants = [Runs.of([(0, image.nbytes, 0, number in self._takers)]) for number in range(world.size)]
            sums, device = SetSums(image, []), torch.device("cpu")
            rounds = Rounds(ready, owns, wants, sums, world, device)
            wanted = world.rank in self._takers
            for meta in self.metadata():
                entry = image.layout.tensors[meta.name]
                out = torch.empty(meta.shape, dtype=meta.dtype, device=device if wanted else "meta")
                windows = rounds.windows.between(entry.offset, entry.offset + entry.nbytes)
                for _, ranges in rounds.windows.batches((None, [window]) for window in windows):
                    for low, high in ranges:
                        for band in rounds.bring([(low, high)] if wanted else []):
                            flat = out.view(-1).view(torch.uint8)[low - entry.offset : high - entry.offset]
                            flat.copy_(band.rows(low, high - low, 0, 1)[0])
                yield meta.name, out

    def _look(self) -> ModelWrites:
        return prepare_model(self._model, self._settings, self._world, None, lambda entries: entries)
