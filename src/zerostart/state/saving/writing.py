"""Shards to safetensors files: each rank writes its own bytes at their final place, without a gather."""

from __future__ import annotations

import os
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from zerostart import geometry
from zerostart.checkpoint.digest import ROOM, Digests
from zerostart.checkpoint.write.shards import SaveLayout, parse_size, plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.machine import cores, local_ranks
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Layout
from zerostart.recipe import Recipe, Target
from zerostart.transfer.buffers import rounds_up
from zerostart.transfer.planning.writes import GRAIN, Origin, WritePlan, own_part, plan_writes
from zerostart.transfer.tuning import MIN_CHUNK
from zerostart.transfer.writing import SLACK, Change, Source, write_out

#: Name, dtype in safetensors' spelling, and shape of a tensor of the files.
Entry = tuple[str, str, Sequence[int]]

MiB = 1 << 20
#: Bytes of one write, and of a thread's staging buffer, where no limit asks for less.
CHUNK = 8 * MiB
#: Most threads that write on one rank.
THREADS = 4


@dataclass(frozen=True)
class Outgoing:
    """A share of one logical tensor that goes into the files.

    ``recipe`` says for each element of its target which element of which tensor of the files it is; ``shard``
    which of them this rank has. ``change``, if any, is asked for what is written in the place of the shard's
    elements, some at a time.
    """

    recipe: Recipe
    shard: Shard
    change: Change | None = None


@dataclass(frozen=True)
class Written:
    """What a save has put where: ``bytes`` are those of this rank, ``seconds`` from its call to its return.

    ``digests`` has the digest of each tensor of the files by its name.
    """

    layout: SaveLayout
    bytes: int
    seconds: float
    digests: Mapping[str, str] = field(default_factory=dict)


def plain(name: str, shard: Shard, dtype: torch.dtype | None = None) -> Outgoing:
    """``shard`` as the tensor ``name`` of the files, as it is; ``dtype`` is the one that it has there."""
    target = Target(name, shard.layout.shape, dtype or shard.storage.dtype)
    return Outgoing(Recipe(target, geometry.whole(name, shard.layout.shape)), shard)


def write_tensors(
    directory: str | os.PathLike[str],
    entries: Iterable[Entry],
    outgoing: Iterable[Outgoing],
    world: World,
    *,
    stem: str = "model",
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    parameters: int | None = None,
    memory_limit: int | None = None,
    before: Mapping[str, int] | None = None,
) -> Written:
    """Write the tensors ``entries`` into safetensors files in ``directory``; collective.

    ``entries``, and the targets of ``outgoing``, are in one order on all ranks, which together have each
    element of each entry once (``Shard.held`` tells replicas). ``stem``, ``max_shard_size``, ``metadata``,
    ``parameters`` and ``before`` are as in ``plan_shards``. Beside the shards a rank takes at most
    ``memory_limit`` bytes; None: 40 MiB. Raises WriteError, ConfigError and, where an element is on no rank
    or counted by two, CheckpointError, on every rank; then no file is left.
    """
    begun = time.perf_counter()
    writer: CheckpointWriter | None = None

    def begin() -> str:
        nonlocal writer
        token = uuid.uuid4().hex[:12]
        writer = CheckpointWriter(directory, layout, token)
        writer.create()
        return token

    try:
        # All ranks leave this together: nobody still writes when the files are removed.
        with world.phase("writing the tensors"):
            listed = list(entries)
            layout = plan_shards(listed, max_shard_size, stem, metadata, parameters, before)
            digests = Digests(listed)
            chunk, threads = _tuned(memory_limit)
            plan, storages = planned(layout, outgoing, chunk)
            described = repr((listed, parse_size(max_shard_size), metadata, parameters, before)).encode()
            # With other tensors, or other files, a rank would write to places that are another's: told here.
            place = f"writing {stem} files with the checksum {zlib.crc32(described):08x}"
            token = world.broadcast_object(begin, place)
            writer = writer or CheckpointWriter(directory, layout, token)
            write_out(plan, storages, writer, threads, digests.add_rows)
            writer.close()
            known = digests.summed(world)
            if world.rank == 0:
                writer.commit()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return Written(layout, plan.nbytes, time.perf_counter() - begun, known)


def planned(
    layout: SaveLayout, outgoing: Iterable[Outgoing], chunk_size: int
) -> tuple[WritePlan, list[Source]]:
    """What this rank writes of ``outgoing``, and the storages that the plan is about."""
    storages: list[Source] = []

    def own() -> Iterator[tuple[Recipe, Layout, Origin]]:
        turn = 0
        for item in outgoing:
            storage = item.shard.storage.detach()
            held = item.shard.layout
            part = own_part(held, item.shard.held, held.owned * storage.itemsize, turn)
            # Of the whole tensor, which is the same on all ranks, and so is everybody's turn.
            turn += 1 + prod(held.shape) * storage.itemsize // GRAIN
            if part is not None and part.boxes:
                direct = storage.device.type == "cpu" and item.change is None
                origin = Origin(item.recipe.target.name, storage.dtype, direct)
                storages.append(Source(storage, item.change))
                yield item.recipe, part, origin

    return plan_writes(layout, own(), chunk_size), storages


def _tuned(memory_limit: int | None) -> tuple[int, int]:
    """Bytes of a chunk, and threads."""
    if memory_limit is not None and memory_limit < MIN_CHUNK:
        raise ConfigError(f"memory_limit={memory_limit} must be a number of bytes, at least {MIN_CHUNK}")
    beside = ROOM + SLACK
    limit = THREADS * (CHUNK + beside) if memory_limit is None else memory_limit
    threads = min(THREADS, max(2, int(cores()) // local_ranks()), max(1, limit // (MIN_CHUNK + beside)))
    chunk = min(CHUNK, max(MIN_CHUNK, limit // threads - beside))
    if rounds_up():  # so that a buffer, which is a chunk and SLACK, is a power of two
        chunk = max(MIN_CHUNK, (1 << ((chunk + SLACK).bit_length() - 1)) - SLACK)
    return chunk - chunk % 4096, threads
