"""The digest of each tensor of a live model, whoever holds which part of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from zerostart.checkpoint.digest import Digests
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard, plain_name
from zerostart.geometry import copies_between, whole
from zerostart.geometry.layout import Layout
from zerostart.live.model import LiveModel
from zerostart.models import state_names
from zerostart.recipe import spelling
from zerostart.state.saving.writing import share
from zerostart.transfer.planning.writes import split_shares

#: Bytes of elements that lie scattered in a storage and are put together at a time.
_TOGETHER = 8 << 20


def digest_model(model: nn.Module) -> dict[str, str]:
    """See ``zerostart.digest``."""
    world = current_world()
    with world.phase("digesting the model"):
        with world.phase("looking at the model"):
            live = LiveModel(model, world)
            tensors, tied = live.tensors()
            shards = [replace(item.shard, name=item.name) for item in tensors]
        found = digests_of(shards, world)
    names = (plain_name(name) for name, _, _ in state_names(live.module))
    return {name: found[tied.get(name, name)] for name in names}


def digests_of(shards: Iterable[Shard], world: World) -> dict[str, str]:
    """The digest of each tensor of which the ranks have ``shards``, by its name; collective.

    The tensors are in one order on all ranks. Raises CheckpointError, on every rank, where an element is on
    no rank or counted by two.
    """
    with world.phase("digesting this rank's shares"):
        own = list(shards)
        digests = Digests((s.name, spelling(s.storage.dtype, s.name), s.layout.shape) for s in own)
        # Of a share that others have too, each rank counts a part.
        for shard, part in zip(own, split_shares(map(share, own)), strict=True):
            if part is not None:
                add_share(digests, shard.name, part, shard.storage.detach())
    return digests.summed(world)


def add_share(digests: Digests, name: str, layout: Layout, storage: torch.Tensor) -> None:
    """Add the elements of tensor ``name`` that ``layout`` places in the 1-D ``storage``, on its device."""
    for placed in layout.boxes:
        for piece in whole(name, layout.shape):
            for copy in copies_between(piece, placed.box, placed.to, placed.strides):
                loops = list(copy.loops)
                # The two innermost loops are handed on as rows and columns, so that many short runs are
                # digested in one go; the loops around them are walked here.
                columns = loops.pop() if loops and loops[-1][1] == 1 else (1, 1, 1)
                rows = loops.pop() if loops else (1, columns[0], 0)
                for index in itertools.product(*(range(size) for size, _, _ in loops)):
                    first = copy.start + sum(i * s for i, (_, s, _) in zip(index, loops, strict=True))
                    place = copy.to + sum(i * d for i, (_, _, d) in zip(index, loops, strict=True))
                    _add_rows(digests, name, first, storage[place:], rows, columns)


def _add_rows(
    digests: Digests,
    name: str,
    first: int,
    storage: torch.Tensor,
    rows: tuple[int, int, int],
    columns: tuple[int, int, int],
) -> None:
    (count, step, apart), (length, _, stride) = rows, columns
    if stride == 1 and (count == 1 or (step == length and apart == length)):
        digests.add(name, first, storage[: count * length])
        return
    # In pieces of bounded size: what is not contiguous is copied for the arithmetic.
    wide = max(1, min(length, _TOGETHER // storage.itemsize))
    many = max(1, _TOGETHER // (storage.itemsize * wide))
    for row in range(0, count, many):
        for column in range(0, length, wide):
            shape = (min(many, count - row), min(wide, length - column))
            place = storage.storage_offset() + row * apart + column * stride
            part = storage.as_strided(shape, (apart, stride), place)
            digests.add_rows(name, first + row * step + column, step, part)
