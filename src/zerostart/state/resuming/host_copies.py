"""Copies in host memory of what a rank is to write, for a save that goes on while training does.

The memory stays for as long as the model lives: the next copies go into pages that are there, which takes a
fraction of the time that fresh ones do. Copies off an accelerator are page-locked.

What lies in host memory and only a step of the optimizer changes may be copied later, until that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import nn

from zerostart.checkpoint.storage.direct import PAGE
from zerostart.distributed.machine import available_memory, local_ranks
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.errors import EngineError, InsufficientMemoryError
from zerostart.geometry.layout import Layout
from zerostart.geometry.layout.layout import LocalBox
from zerostart.state.resuming.training_state import Content
from zerostart.state.saving.writing import Outgoing
from zerostart.transfer.buffers import Arena, page_locked
from zerostart.transfer.planning.writes import GRAIN, own_part

#: Bytes of a tensor from which on it may be copied later; and integers as wide as its elements.
LATER = 16 * PAGE
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: For each model the memory of its last copies. At most one save is under way, so nobody reads from it still.
#: By whether it is page-locked.
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[bool, torch.Tensor]] = weakref.WeakKeyDictionary()


def kept_on_host(
    content: Content, world: World, budget: int | None, later: bool = False
) -> tuple[Content, Callable[[], None] | None]:
    """``content`` with copies in host memory of what this rank is to write, as it is at this moment.

    With ``later``, what is ``content.stepped`` and on the host is copied by the function that is also given,
    which has to be called once, and to return, before the optimizer makes a step; it raises EngineError if
    anything else has changed it. No save of the same model may be under way. Raises InsufficientMemoryError,
    on every rank, if the copies are more than ``budget`` bytes.
    """
    left: list[Callable[[], None]] = []
    own = [_own(outgoing) for outgoing in (content.model[1], content.state[1])]
    needed = sum(piece.nbytes for part in own for piece in part)
    with world.phase("copying the state to host memory"):
        there = sum(buffer.nbytes for buffer in _buffers.get(content.module, {}).values())
        limit = available_memory() // max(1, local_ranks()) + there if budget is None else budget
        if needed > limit:
            raise InsufficientMemoryError(
                f"rank {world.rank} would copy {needed / 2**20:.1f} MiB to host memory to save in the "
                f"background, and {limit / 2**20:.1f} MiB are free for it; use wait=True"
            )
        devices = {piece.device for part in own for piece in part if piece.locked}
        of = next(iter(devices), None)
        arenas = {
            locked: Arena(torch.device("cpu"), partial(_buffer, content.module, locked, of))
            for locked in (False, True)
        }
        places = [[piece.reserved(arenas) for piece in part] for part in own]
        model, state = (
            [
                piece.copied(arenas, place, left if later and piece.name in content.stepped else None)
                for piece, place in zip(part, at, strict=True)
            ]
            for part, at in zip(own, places, strict=True)
        )
        for device in devices:
            torch.accelerator.synchronize(device)  # not the current one, which may be another
    found = replace(content, model=(content.model[0], model), state=(content.state[0], state))
    return found, partial(_all, left) if later else None


def _all(copies: Sequence[Callable[[], None]]) -> None:
    for copy in copies:
        copy()


def _buffer(module: nn.Module, locked: bool, device: torch.device | None, nbytes: int) -> torch.Tensor:
    """The model's memory for copies, page-locked for ``device`` or not, made anew where it is too small."""
    own = _buffers.setdefault(module, {})
    if locked not in own or own[locked].nbytes < nbytes:
        own.pop(locked, None)  # Before the new one is made.
        own[locked] = (
            page_locked(nbytes, device) if locked else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        )
    return own[locked]


class _Own:
    """The part of a share that this rank writes, and the range of its storage in which that lies."""

    def __init__(self, item: Outgoing, part: Layout | None) -> None:
        self._item = item
        self._boxes: Sequence[LocalBox] = part.boxes if part is not None else ()
        self._low = min((placed.to for placed in self._boxes), default=0)
        high = max((placed.to + _span(placed) for placed in self._boxes), default=0)
        self._storage = item.shard.storage.detach()[self._low : high]

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def locked(self) -> bool:
        """Whether its copy is page-locked: what comes from an accelerator."""
        return self.device.type != "cpu"

    def reserved(self, arenas: Mapping[bool, Arena]) -> int:
        """Its place among the copies of its kind."""
        return arenas[self.locked].reserve(self._storage.numel(), self._storage.dtype)

    @property
    def name(self) -> str:
        return self._item.shard.name

    def copied(
        self, arenas: Mapping[bool, Arena], place: int, later: list[Callable[[], None]] | None
    ) -> Outgoing:
        """The part in host memory; copied by what is added to ``later``, where it is given and serves."""
        storage, low = self._storage, self._low
        kept = arenas[self.locked].take(place, storage.numel(), storage.dtype)
        if self.locked or later is None or storage.nbytes < LATER or storage.itemsize not in _BITS:
            kept.copy_(storage, non_blocking=self.locked)
        else:
            later.append(partial(self._copy_later, kept, _samples(storage).clone()))
        shard = self._item.shard
        boxes = tuple(replace(placed, to=placed.to - low) for placed in self._boxes)
        layout = Layout(shard.layout.shape, kept.numel(), kept.numel(), boxes)
        return replace(self._item, shard=Shard(shard.name, layout, kept, lambda _: layout))

    def _copy_later(self, kept: torch.Tensor, samples: torch.Tensor) -> None:
        kept.copy_(self._storage)
        if not torch.equal(_samples(kept), samples):
            raise EngineError(
                f"{self.name} was changed before it was copied for the checkpoint, by something that is no "
                "step of an optimizer; call settle() of what save_state returned before that, or save "
                "without copy_later (in a run: checkpoint.background: false)"
            )


def _samples(storage: torch.Tensor) -> torch.Tensor:
    """The bits of one element of each page of memory."""
    return storage.view(_BITS[storage.itemsize])[:: PAGE // storage.itemsize]


def _own(outgoing: Sequence[Outgoing]) -> list[_Own]:
    found: list[_Own] = []
    turn = 0
    for item in outgoing:
        shard = item.shard
        size = shard.storage.itemsize
        part = own_part(shard.layout, shard.held, shard.layout.owned * size, turn)
        turn += 1 + prod(shard.layout.shape) * size // GRAIN
        found.append(_Own(item, part))
    return found


def _span(placed: LocalBox) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(placed.box.extent, placed.strides, strict=True))
