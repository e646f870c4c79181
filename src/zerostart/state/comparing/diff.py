"""Compare two checkpoints, or a live model and a checkpoint, in bounded memory."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan, prod
from pathlib import PurePosixPath
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn

from zerostart.checkpoint import manifest
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, Catalog, TensorEntry
from zerostart.checkpoint.formats.pipeline import components
from zerostart.checkpoint.formats.saved_state import is_stored_state, open_saved_state
from zerostart.checkpoint.paths import expanded, wait_for
from zerostart.checkpoint.source import open_catalog, resolve_source
from zerostart.checkpoint.storage import Reader, scheme_of, storage_at
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.distributed.machine import cores
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard
from zerostart.errors import ConfigError, printable
from zerostart.geometry.layout.layout import flat_run
from zerostart.live.model import LiveModel, LogicalTensor
from zerostart.recipe import Recipe, Target, spelling, torch_dtype
from zerostart.state.saving.contents import Contents, contents_of
from zerostart.state.saving.writing import Entry, plain, planned
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, join
from zerostart.transfer.staging import view_bytes
from zerostart.transfer.writing import write_out

#: Integers as wide as an element, in which elements are compared bit for bit.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Tensors that are listed in words.
_LISTED = 20


class TensorDifference(NamedTuple):
    """How one tensor differs: in bits where dtypes are the same (0.0 and -0.0 by 0.0), else in values."""

    #: Largest absolute difference; nan where a nan meets something else, or shapes differ.
    largest: float
    #: How many differ.
    elements: int
    #: Dtypes and shapes that are not the same.
    note: str = ""

    def __str__(self) -> str:
        if "shape" in self.note:
            return self.note
        note = f" ({self.note})" if self.note else ""
        return f"{self.elements} elements differ, by {self.largest:.6g} at most{note}"


@dataclass(frozen=True)
class Difference:
    """Two sets of tensors, by name: ``equal`` in shape, dtype and bits, ``differing``, or in one alone."""

    equal: tuple[str, ...]
    differing: Mapping[str, TensorDifference]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not (self.differing or self.only_a or self.only_b)

    def document(self) -> JsonObject:
        """The same as JSON has it."""
        differing = {name: one._asdict() for name, one in self.differing.items()}
        return {
            "equal": list(self.equal),
            "differing": differing,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }

    def __str__(self) -> str:
        counts = {"equal": self.equal, "differing": self.differing, "only in a": self.only_a}
        counts["only in b"] = self.only_b
        lines = [", ".join(f"{len(names)} {what}" for what, names in counts.items())]
        lines += _listed([f"  {printable(name)}: {one}" for name, one in self.differing.items()])
        lines += _listed([f"  {printable(name)}: only in a" for name in self.only_a])
        lines += _listed([f"  {printable(name)}: only in b" for name in self.only_b])
        return "\n".join(lines)


def _listed(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines if more <= 0 else [*lines[:_LISTED], f"  and {more} more"]


class Tally:
    """Counts differences of tensors whose pieces come in any order, from several threads."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def compare(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare the same elements of a tensor, as two 1-D host tensors of any dtypes."""
        largest, count = _differences(a, b)
        if count:
            with self._lock:
                self._found[name] = _both(self._found.get(name, (0.0, 0)), (largest, count))

    def summed(self, world: World) -> dict[str, tuple[float, int]]:
        """What all ranks have found; collective, with a message as long as the list of what differs."""
        total: dict[str, tuple[float, int]] = {}
        for found in world.all_gather_object(self._found, "putting differences together"):
            for name, one in found.items():
                total[name] = _both(total.get(name, (0.0, 0)), one)
        return total


def _both(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, int]:
    largest = torch.tensor([one[0], other[0]], dtype=torch.float64, device="cpu").max()  # a nan stays
    return float(largest), one[1] + other[1]


def _differences(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    if a.dtype == b.dtype:
        one, other = _bits(a), _bits(b)
        if torch.equal(one, other):
            return 0.0, 0
        # A complex element is two words of bits here: it differs where one of them does.
        differ = (one != other).view(a.numel(), -1).any(1)
    else:
        one, other = _wide(a), _wide(b)
        # Values and not bits, since the dtypes differ; a nan on both sides is equal.
        differ = (one != other) & ~(one.isnan() & other.isnan())
    count = int(differ.sum())
    if not count:
        return 0.0, 0
    return float((_wide(a[differ]) - _wide(b[differ])).abs().max()), count


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.contiguous().view(_WORDS[whole.itemsize])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


#: Elements that are compared at a time, and most threads that do.
_PIECE, _THREADS = 1 << 20, 8
#: Bytes of a live model that are put together at a time.
_CHUNK = 8 << 20
Comparable = str | os.PathLike[str] | nn.Module
#: Dtype in safetensors' spelling, and shape.
_Kind = tuple[str, tuple[int, ...]]


def compare(a: Comparable, b: Comparable) -> Difference:
    """See ``zerostart.diff``, which raises what this raises."""
    for one in (a, b):
        if not isinstance(one, (str, os.PathLike, nn.Module)):
            raise ConfigError(f"a {type(one).__name__} cannot be compared; pass a path or a model")
    if not isinstance(a, nn.Module):
        if not isinstance(b, nn.Module):
            return _files(a, b)
        found = _model_and_files(b, a)
        return Difference(found.equal, found.differing, found.only_b, found.only_a)
    if isinstance(b, nn.Module):
        raise ConfigError("two live models cannot be compared: compare their zerostart.digest, or save one")
    return _model_and_files(a, b)


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
            # In batches: ``map`` over all jobs would put every one of a large checkpoint into its queue at
            # once.
            while batch := list(itertools.islice(jobs, 64)):
                list(pool.map(compare, batch))
        kinds = {name: _kind(entry) for name, entry in one.tensors.items()}
        others = {name: _kind(entry) for name, entry in other.tensors.items()}
    return _difference(kinds, others, tally.summed(World(0, 1, None)))


def _kind(entry: TensorEntry | Assembled) -> _Kind:
    return entry.dtype, entry.shape


def _comparable(kind: _Kind, entry: TensorEntry | Assembled | None) -> bool:
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
    world = current_world()
    tally = Tally()
    with world.phase("comparing the model"):
        catalogs = world.broadcast_object(lambda: catalogs_at(path, True), "opening the checkpoint")
        with world.phase("comparing own shares"), Stored(catalogs) as stored:
            contents = _contents(model, stored.tensors, is_state(path), world)
            kinds = {name: (dtype, tuple(shape)) for name, dtype, shape in contents.entries}

            def compare(name: str, first: int, step: int, rows: torch.Tensor) -> None:
                if _comparable(kinds[name], stored.tensors.get(name)):
                    _compare_rows(tally, stored, name, first, step, rows.cpu())

            # The plan of a save, of which nothing is written: its chunks go to ``compare``, so that the model
            # is compared in the very layout that it would be saved in.
            # In one file, whatever its size: names and offsets are wanted, and no file is made.
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
            # What it would have been saved as goes: the files have it under the model's own name.
            for source in sources:
                entries.pop(source, None)
            item = plain(own, item.shard)
            entries[own] = _entry(own, item.shard)
        outgoing.append(item)
    # A tied name that the files have is compared as well; by a save it would not be written.
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


# Tensors of checkpoint files, any run of which can be read.

#: Where a training state has the model, under its state-dict names.
MODEL = "model"


def is_state(source: str | os.PathLike[str]) -> bool:
    """Whether ``source`` is a directory of ``save_state``."""
    if (storage := storage_at(source)) is not None:
        return is_stored_state(storage)
    wait_for(source)
    return manifest.is_state(expanded(source))


def catalogs_at(source: str | os.PathLike[str], model_alone: bool) -> list[tuple[str, Catalog]]:
    """The catalogs at ``source``, each with what its names begin with in a comparison.

    A pipeline has one for each model, a training state one for each folder (``model_alone``: the model's).
    Raises what ``open_catalog`` does.
    """
    path = str(source) if scheme_of(source) else resolve_source(source)
    if (isinstance(path, str) or path.is_dir()) and is_state(path):
        if model_alone:
            return [("", open_saved_state(path, [MODEL])[1][0])]
        document = open_saved_state(path, ())[0]
        files = [PurePosixPath(name) for name in document.get("files", ()) if name.endswith(".safetensors")]
        folders = sorted({str(file.parent) for file in files})
        catalogs = open_saved_state(path, folders)[1]
        return [(f"{folder}/", catalog) for folder, catalog in zip(folders, catalogs, strict=True)]
    if isinstance(path, str):
        return [("", open_catalog(path))]
    found = components(path) if path.is_dir() else None
    if found is not None:
        return [(f"{component.name}/", open_catalog(component.path)) for component in found]
    return [("", open_catalog(path))]


class Stored:
    """The tensors of catalogs, by name; inside the block their elements can be read, from several threads."""

    def __init__(self, catalogs: Sequence[tuple[str, Catalog]]) -> None:
        self._catalogs = [catalog for _, catalog in catalogs]
        self._readers: list[Reader] = []
        self._stack = ExitStack()
        self._number = {
            begin + name: (number, entry)
            for number, (begin, catalog) in enumerate(catalogs)
            for name, entry in catalog.weights.items()
        }
        self.tensors: dict[str, TensorEntry | Assembled] = {
            name: entry for name, (_, entry) in self._number.items()
        }

    def __enter__(self) -> Stored:
        self._readers = [self._stack.enter_context(catalog.storage.reader()) for catalog in self._catalogs]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def count(self, name: str) -> int:
        """Elements of a tensor; bytes, where an element is less than one."""
        entry = self.tensors[name]
        return entry.numel if DTYPE_BITS[entry.dtype] >= 8 else entry.nbytes

    def values(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return ``count`` elements from ``first`` on, row-major; bytes, where an element is less than one.

        Raises ReadError and CheckpointNotFoundError.
        """
        number, entry = self._number[name]
        dtype = torch.uint8 if DTYPE_BITS[entry.dtype] < 8 else torch_dtype(entry.dtype, name)
        values = torch.empty(count, dtype=dtype, device="cpu")
        if isinstance(entry, TensorEntry) and entry.strides is None:
            if count:
                view = view_bytes(torch.view_as_real(values).view(-1) if dtype.is_complex else values)
                self._readers[number].read(entry.file, entry.offset + first * dtype.itemsize, [view])
            return values
        # It lies in the shares of ranks, or transposed or sliced in a torch file.
        recipe = Recipe(Target(entry.name, entry.shape, dtype), entry.pieces)
        destination = Destination(entry.name, count, count, dtype, True)
        layout = flat_run(entry.shape, first, first + count)
        plan = join(self._catalogs[number], [(recipe, layout, destination)])
        execute(plan, [values], Progress(plan.read_bytes, shown=False), 1)
        return values
