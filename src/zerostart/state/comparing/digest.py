"""Compute the digest of each tensor of a sharded live model."""

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

#: Maximum size of one copy of strided elements, in bytes.
MAX_COPY_BYTES = 8 << 20


def digest_model(model: nn.Module) -> dict[str, str]:
    world = current_world()
    with world.phase("digesting the model"):
        with world.phase("looking at the model"):
            live = LiveModel(model, world)
            tensors, tied = live.tensors()
            shards = [replace(item.shard, name=item.name) for item in tensors]
        by_name = compute_digests(shards, world)
    names = (plain_name(name) for name, _, _ in state_names(live.module))
    return {name: by_name[tied.get(name, name)] for name in names}


def compute_digests(shards: Iterable[Shard], world: World) -> dict[str, str]:
    """Compute the digests of the tensors of ``shards`` by name; collective.

    The tensors have the same order on all ranks. Raises CheckpointError, on every rank, if no rank or two
    ranks count an element.
    """
    with world.phase("digesting this rank's shares"):
        own = list(shards)
        digests = Digests((s.name, spelling(s.storage.dtype, s.name), s.layout.shape) for s in own)
        # Each replica of a share counts a part of it.
        for shard, part in zip(own, split_shares(map(share, own)), strict=True):
            if part is not None:
                add_share(digests, shard.name, part, shard.storage.detach())
    return digests.summed(world)


def add_share(digests: Digests, name: str, layout: Layout, storage: torch.Tensor) -> None:
    """Add a share of tensor ``name``, which ``layout`` places in the 1-D ``storage``."""
    for placed in layout.boxes:
        for piece in whole(name, layout.shape):
            for copy in copies_between(piece, placed.box, placed.to, placed.strides):
                loops = list(copy.loops)
                # Digest the two innermost loops at once, as rows and columns; walk the outer loops here.
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
    # In pieces of bounded size, since strided elements are copied.
    wide = max(1, min(length, MAX_COPY_BYTES // storage.itemsize))
    row_count = max(1, MAX_COPY_BYTES // (storage.itemsize * wide))
    for row in range(0, count, row_count):
        for column in range(0, length, wide):
            shape = (min(row_count, count - row), min(wide, length - column))
            place = storage.storage_offset() + row * apart + column * stride
            part = storage.as_strided(shape, (apart, stride), place)
            digests.add_rows(name, first + row * step + column, step, part)
