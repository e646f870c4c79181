"""Two checkpoints, two live models, or one of each, tensor by tensor, in bounded memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan, prod

import torch
from torch import nn

from zerostart.checkpoint.catalog import Assembled, TensorEntry
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.distributed.machine import cores
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard
from zerostart.errors import ConfigError
from zerostart.live.model import LiveModel, LogicalTensor
from zerostart.recipe import spelling
from zerostart.state.comparing.difference import Difference, Tally, TensorDifference
from zerostart.state.comparing.digest import digest
from zerostart.state.comparing.stored import Stored, catalogs_at, is_state
from zerostart.state.saving.contents import Contents, contents_of
from zerostart.state.saving.writing import Entry, plain, planned
from zerostart.transfer.planning.writes import own_part
from zerostart.transfer.writing import write_out

#: Elements that are compared at a time, and most threads that do.
_PIECE, _THREADS = 1 << 20, 8
#: Bytes of a live model that are put together at a time.
_CHUNK = 8 << 20
Comparable = str | os.PathLike[str] | nn.Module
#: Dtype in safetensors' spelling, and shape.
_Kind = tuple[str, tuple[int, ...]]


def diff(a: Comparable, b: Comparable) -> Difference:
    """See ``zerostart.diff``, which raises what this raises."""
    for one in (a, b):
        if not isinstance(one, (str, os.PathLike, nn.Module)):
            raise ConfigError(f"a {type(one).__name__} cannot be compared; pass a path or a model")
    if isinstance(a, nn.Module):
        return _models(a, b) if isinstance(b, nn.Module) else _model_and_files(a, b)
    if isinstance(b, nn.Module):
        return _swapped(_model_and_files(b, a))
    return _files(a, b)


def _swapped(found: Difference) -> Difference:
    return Difference(found.equal, found.differing, found.only_b, found.only_a)


def _files(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference:
    """Each process by itself; both are read once."""
    states = is_state(a) and is_state(b)
    tally = Tally()
    with Stored(catalogs_at(a, not states)) as one, Stored(catalogs_at(b, not states)) as other:
        comparable = [n for n in one.tensors if _comparable(_kind(one.tensors[n]), other.tensors.get(n))]

        def compare(job: tuple[str, int, int]) -> None:
            tally.compare(job[0], one.values(*job), other.values(*job))

        jobs = (
            (name, first, min(_PIECE, one.count(name) - first))
            for name in comparable
            for first in range(0, one.count(name), _PIECE)
        )
        with ThreadPoolExecutor(max(1, min(_THREADS, int(cores())))) as pool:
            while batch := list(itertools.islice(jobs, 64)):
                list(pool.map(compare, batch))
        kinds = {name: _kind(entry) for name, entry in one.tensors.items()}
        others = {name: _kind(entry) for name, entry in other.tensors.items()}
    return _difference(kinds, others, tally.summed(World(0, 1, None)))


def _kind(entry: TensorEntry | Assembled) -> _Kind:
    return entry.dtype, entry.shape


def _comparable(kind: _Kind, entry: TensorEntry | Assembled | None) -> bool:
    """Whether values can be subtracted: in dtypes of less than a byte only where both have it."""
    if entry is None or entry.shape != kind[1]:
        return False
    return entry.dtype == kind[0] or not any(name.startswith(("F4", "F6")) for name in (entry.dtype, kind[0]))


def _difference(
    a: Mapping[str, _Kind], b: Mapping[str, _Kind], found: Mapping[str, tuple[float, int]]
) -> Difference:
    equal, differing = [], {}
    for name, kind in a.items():
        if name not in b:
            continue
        if kind == b[name] and name not in found:
            equal.append(name)
        elif kind[1] != b[name][1]:
            note = f"shapes {list(kind[1])} and {list(b[name][1])}"
            differing[name] = TensorDifference(nan, prod(kind[1]), note)
        else:
            largest, count = found.get(name, (0.0, 0))
            note = "" if kind[0] == b[name][0] else f"dtypes {kind[0]} and {b[name][0]}"
            differing[name] = TensorDifference(largest, count, note)
    only_a, only_b = (tuple(n for n in one if n not in other) for one, other in ((a, b), (b, a)))
    return Difference(tuple(equal), differing, only_a, only_b)


def _model_and_files(model: nn.Module, path: str | os.PathLike[str]) -> Difference:
    """Each rank reads of the files what it holds itself."""
    world = current_world()
    tally = Tally()
    with world.phase("comparing the model"):
        catalogs = world.broadcast_object(lambda: catalogs_at(path, True), "opening the checkpoint")
        with world.phase("comparing own shares"), Stored(catalogs) as stored:
            contents = _contents(model, stored.tensors, is_state(path), world)
            kinds = {name: (dtype, tuple(shape)) for name, dtype, shape in contents.entries}

            def compare(name: str, first: int, step: int, rows: torch.Tensor) -> None:
                if _comparable(kinds[name], stored.tensors.get(name)):
                    _compare_rows(tally, stored, name, first, step, rows)

            layout = plan_shards(contents.entries, 1 << 62)
            plan, sources = planned(layout, contents.outgoing, _CHUNK)
            write_out(plan, sources, None, max(1, min(4, int(cores()))), compare)
        found = tally.summed(world)
    return _difference(kinds, {name: _kind(entry) for name, entry in stored.tensors.items()}, found)


def _compare_rows(tally: Tally, stored: Stored, name: str, first: int, step: int, rows: torch.Tensor) -> None:
    many, count = rows.shape
    if step <= 4 * count:  # near each other: what lies between is read, too
        span = stored.values(name, first, (many - 1) * step + count)
        tally.compare(name, rows.reshape(-1), span.as_strided((many, count), (step, 1)).reshape(-1))
        return
    for row in range(many):
        tally.compare(name, rows[row], stored.values(name, first + row * step, count))


def _contents(model: nn.Module, names: Mapping[str, object], state: bool, world: World) -> Contents:
    """What the model is in files: as it was loaded, but by its own name what only has that there."""
    live = LiveModel(model, world)
    tensors, tied = live.tensors()
    shards = {item.name: item.shard for item in tensors}
    found = _as_they_are(tensors) if state else contents_of(live, tensors, None)
    entries: dict[str, Entry] = {name: (name, dtype, shape) for name, dtype, shape in found.entries}
    outgoing = []
    for item in found.outgoing:
        own = item.recipe.target.name
        sources = {str(source) for piece in item.recipe.pieces for source in piece.source}
        if own in names and sources.isdisjoint(names):
            for source in sources:
                entries.pop(source, None)
            item = plain(own, item.shard)
            entries[own] = _entry(own, item.shard)
        outgoing.append(item)
    for follower, kept in tied.items():
        if follower in names and follower not in entries:
            outgoing.append(plain(follower, shards[kept]))
            entries[follower] = _entry(follower, shards[kept])
    return Contents(list(entries.values()), outgoing)


def _as_they_are(tensors: Sequence[LogicalTensor]) -> Contents:
    entries = [_entry(item.name, item.shard) for item in tensors]
    return Contents(entries, [plain(item.name, item.shard) for item in tensors])


def _entry(name: str, shard: Shard) -> Entry:
    return name, spelling(shard.storage.dtype, name), shard.layout.shape


def _models(a: nn.Module, b: nn.Module) -> Difference:
    """By digests; tensors that differ meet segment by segment."""
    world = current_world()
    tally = Tally()
    with world.phase("comparing two models"):
        one, other = _shards(a, world), _shards(b, world)
        digests, others = digest(a), digest(b)
        for name in digests:
            if name in others and digests[name] != others[name] and _shape(one[name]) == _shape(other[name]):
                _compare_segments(tally, name, one[name], other[name], world)
        kinds, theirs = ({name: _entry(name, s)[1:] for name, s in shards.items()} for shards in (one, other))
        found = tally.summed(World(0, 1, None))  # every rank has compared everything
    return _difference(_ordered(kinds, digests), _ordered(theirs, others), found)


def _ordered(kinds: Mapping[str, tuple[str, Sequence[int]]], names: Mapping[str, str]) -> dict[str, _Kind]:
    return {name: (kinds[name][0], tuple(kinds[name][1])) for name in names}


def _shape(shard: Shard) -> tuple[int, ...]:
    return shard.layout.shape


def _shards(model: nn.Module, world: World) -> dict[str, Shard]:
    """Shards by all names, tied ones included."""
    tensors, tied = LiveModel(model, world).tensors()
    shards = {item.name: item.shard for item in tensors}
    return shards | {name: shards[kept] for name, kept in tied.items()}


def _compare_segments(tally: Tally, name: str, a: Shard, b: Shard, world: World) -> None:
    parts = [(shard.storage.detach(), _runs(shard)) for shard in (a, b)]
    for first in range(0, prod(a.layout.shape), _PIECE):
        count = min(_PIECE, prod(a.layout.shape) - first)
        one, other = (_segment(storage, runs, first, count, world) for storage, runs in parts)
        tally.compare(name, one, other)


def _runs(shard: Shard) -> list[tuple[int, int, int]]:
    """The runs of this rank's share of which it is the one holder that counts."""
    part = own_part(shard.layout, shard.held, 0, 0)
    return [] if part is None else part.runs()


def _segment(
    storage: torch.Tensor, runs: Sequence[tuple[int, int, int]], first: int, count: int, world: World
) -> torch.Tensor:
    """A run of a tensor's elements on every rank: each gives its own, and zero bytes for all others."""
    own = torch.zeros(count, dtype=storage.dtype, device="cpu")
    for start, length, place in runs:
        low, high = max(start, first), min(start + length, first + count)
        if low < high:
            own[low - first : high - first] = storage[place + low - start : place + high - start].cpu()
    octets = (torch.view_as_real(own) if own.is_complex() else own).view(-1).view(torch.uint8)
    octets.copy_(world.all_reduce_sum(octets, f"comparing {count} elements"))
    return own
