"""Compare two checkpoints or live models, tensor by tensor, in bounded memory."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan, nan, prod
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import nn

from zerostart.checkpoint import manifest
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, Catalog, TensorEntry
from zerostart.checkpoint.formats.pipeline import components
from zerostart.checkpoint.formats.saved_state import is_stored_state, open_saved_state
from zerostart.checkpoint.paths import expanded, wait_for
from zerostart.checkpoint.source import open_catalog, resolve_source
from zerostart.checkpoint.storage import scheme_of, storage_at
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.distributed.machine import cores
from zerostart.distributed.world import World, current_world
from zerostart.errors import printable
from zerostart.recipe import torch_dtype
from zerostart.state.converting.source import SourceReader, SourceTensor
from zerostart.state.saving.save import SaveRequest, save_model
from zerostart.transfer.staging import view_bytes

#: A checkpoint's path or URL, or a live model.
Comparable = str | os.PathLike[str] | nn.Module
#: Integers by element size in bytes, to compare bits.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Maximum number of tensors that ``str`` lists.
MAX_LISTED = 20


class TensorDifference(NamedTuple):
    """Difference of one tensor: in bits for equal dtypes, otherwise in values."""

    #: Largest absolute difference; nan if only one side is nan, or if shapes differ.
    largest: float
    #: Number of different elements.
    elements: int
    #: Different dtypes or shapes.
    note: str = ""

    def __str__(self) -> str:
        if "shape" in self.note:
            return self.note
        note = f" ({self.note})" if self.note else ""
        return f"{self.elements} elements differ, by {self.largest:.6g} at most{note}"


@dataclass(frozen=True)
class Difference:
    """Names of equal and differing tensors, and of tensors that only one side has."""

    equal: tuple[str, ...]
    differing: Mapping[str, TensorDifference]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def same(self) -> bool:
        """True if there is no difference."""
        return not (self.differing or self.only_a or self.only_b)

    def document(self) -> JsonObject:
        """Return the difference as JSON data."""
        return vars(self) | {"differing": {name: one._asdict() for name, one in self.differing.items()}}

    def __str__(self) -> str:
        lines = [
            f"{len(self.equal)} equal, {len(self.differing)} differing, {len(self.only_a)} only in a, "
            f"{len(self.only_b)} only in b"
        ]
        lines += _truncate([f"  {printable(name)}: {tensor}" for name, tensor in self.differing.items()])
        lines += _truncate([f"  {printable(name)}: only in a" for name in self.only_a])
        lines += _truncate([f"  {printable(name)}: only in b" for name in self.only_b])
        return "\n".join(lines)


def _truncate(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"  and {more} more"]


def _count_differences(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    if a.dtype == b.dtype:
        a_bits, b_bits = _view_bits(a), _view_bits(b)
        if torch.equal(a_bits, b_bits):
            return 0.0, 0
        # A complex element has two words.
        differ = (a_bits != b_bits).view(a.numel(), -1).any(1)
    else:
        a_bits, b_bits = _widen(a), _widen(b)
        # Compare values, since the dtypes differ; nan equals nan.
        differ = (a_bits != b_bits) & ~(a_bits.isnan() & b_bits.isnan())
    count = int(differ.sum())
    if not count:
        return 0.0, 0
    return float((_widen(a[differ]) - _widen(b[differ])).abs().max()), count


def _view_bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.contiguous().view(_WORDS[whole.itemsize])


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


#: Number of elements to compare at once, and maximum number of threads.
_PIECE, _THREADS = 1 << 20, 8
#: Dtype in safetensors' spelling, and shape.
_Kind = tuple[str, tuple[int, ...]]


def compare(a: Comparable, b: Comparable) -> Difference:
    """Compare two checkpoints or live models as ``zerostart.diff`` documents it."""
    if not isinstance(a, nn.Module) and not isinstance(b, nn.Module):
        return compare_files(a, b)
    world = current_world()
    with ExitStack() as stack:
        paths = [_save_model(side, world, stack) if isinstance(side, nn.Module) else side for side in (a, b)]
        return world.broadcast_slow(lambda: compare_files(*paths), "comparing with a live model")


def _save_model(model: nn.Module, world: World, stack: ExitStack) -> str:
    """Save ``model`` to a temporary directory, which is deleted when ``stack`` closes; collective."""
    path = world.broadcast_object(lambda: tempfile.mkdtemp(prefix="zerostart-diff-"), "making a directory")
    if world.rank == 0:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
    save_model(SaveRequest(model), path)
    return path


def compare_files(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference:
    """Compare two checkpoints, each of which is read once."""
    states = is_state(a) and is_state(b)
    counts_by_name: dict[str, tuple[float, int]] = {}
    catalogs = (open_catalogs(one, not states) for one in (a, b))
    with TensorReader(next(catalogs)) as ours, TensorReader(next(catalogs)) as theirs:
        kinds, others = ({n: (e.dtype, e.shape) for n, e in s.tensors.items()} for s in (ours, theirs))
        comparable = [name for name, kind in kinds.items() if _is_comparable(kind, others.get(name))]

        def differences(job: tuple[str, int, int]) -> tuple[str, float, int]:
            return job[0], *_count_differences(ours.values(*job), theirs.values(*job))

        jobs = (
            (name, first, min(_PIECE, ours.count(name) - first))
            for name in comparable
            for first in range(0, ours.count(name), _PIECE)
        )
        with ThreadPoolExecutor(max(1, min(_THREADS, int(cores())))) as pool:
            # In batches: ``map`` would queue all jobs of a large checkpoint at once.
            while batch := list(itertools.islice(jobs, 64)):
                for name, largest, count in pool.map(differences, batch):
                    if count:
                        before = counts_by_name.get(name, (0.0, 0))
                        maximum = max(largest, before[0], key=lambda size: (isnan(size), size))
                        counts_by_name[name] = maximum, before[1] + count
    return _build_difference(kinds, others, counts_by_name)


def _is_comparable(a: _Kind, b: _Kind | None) -> bool:
    if b is None or a[1] != b[1]:
        return False
    return a[0] == b[0] or not any(dtype.startswith(("F4", "F6")) for dtype in (a[0], b[0]))


def _build_difference(
    a: Mapping[str, _Kind], b: Mapping[str, _Kind], counts_by_name: Mapping[str, tuple[float, int]]
) -> Difference:
    equal, differing = [], {}
    for name, kind in a.items():
        if name not in b:
            continue
        if kind == b[name] and name not in counts_by_name:
            equal.append(name)
        elif kind[1] != b[name][1]:
            note = f"shapes {list(kind[1])} and {list(b[name][1])}"
            differing[name] = TensorDifference(nan, prod(kind[1]), note)
        else:
            largest, count = counts_by_name.get(name, (0.0, 0))
            note = "" if kind[0] == b[name][0] else f"dtypes {kind[0]} and {b[name][0]}"
            differing[name] = TensorDifference(largest, count, note)
    only_a, only_b = (tuple(n for n in names if n not in other) for names, other in ((a, b), (b, a)))
    return Difference(tuple(equal), differing, only_a, only_b)


# Reading tensors of checkpoint files.

#: Folder of a training state with the model, under its state-dict names.
MODEL = "model"


def is_state(source: str | os.PathLike[str]) -> bool:
    """Return True if ``source`` is a directory of ``save_state``."""
    if (storage := storage_at(source)) is not None:
        return is_stored_state(storage)
    wait_for(source)
    return manifest.is_state(expanded(source))


def open_catalogs(source: str | os.PathLike[str], model_only: bool) -> list[tuple[str, Catalog]]:
    """Open the catalogs at ``source``; return each with the prefix of its names.

    A pipeline has a catalog for each model, a training state one for each folder (``model_only``: only the
    model's). Raises the errors of ``open_catalog``.
    """
    path = str(source) if scheme_of(source) else resolve_source(source)
    if (isinstance(path, str) or path.is_dir()) and is_state(path):
        if model_only:
            return [("", open_saved_state(path, [MODEL])[1][0])]
        document = open_saved_state(path, ())[0]
        files = [PurePosixPath(name) for name in document.get("files", ()) if name.endswith(".safetensors")]
        folders = sorted({str(file.parent) for file in files})
        catalogs = open_saved_state(path, folders)[1]
        return [(f"{folder}/", catalog) for folder, catalog in zip(folders, catalogs, strict=True)]
    parts = components(path) if isinstance(path, Path) and path.is_dir() else None
    if parts is not None:
        return [(f"{component.name}/", open_catalog(component.path)) for component in parts]
    return [("", open_catalog(path))]


class TensorReader(ExitStack):
    """Reader of the tensors of catalogs by name; threads may share it."""

    def __init__(self, catalogs: Sequence[tuple[str, Catalog]]) -> None:
        super().__init__()
        self._sources = [SourceReader(catalog) for _, catalog in catalogs]
        self._readers = [self.enter_context(catalog.storage.reader()) for _, catalog in catalogs]
        self._number = {
            begin + name: (number, entry)
            for number, (begin, catalog) in enumerate(catalogs)
            for name, entry in catalog.weights.items()
        }
        self.tensors: dict[str, TensorEntry | Assembled] = {
            name: entry for name, (_, entry) in self._number.items()
        }

    def count(self, name: str) -> int:
        """Return the number of elements of a tensor, or of bytes for smaller elements."""
        entry = self.tensors[name]
        return entry.numel if DTYPE_BITS[entry.dtype] >= 8 else entry.nbytes

    def values(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return ``count`` elements from ``first`` on, in row-major order.

        Elements smaller than a byte are returned as bytes. Raises ReadError and CheckpointNotFoundError.
        """
        number, entry = self._number[name]
        dtype = torch.uint8 if DTYPE_BITS[entry.dtype] < 8 else torch_dtype(entry.dtype, name)
        values = torch.empty(count, dtype=dtype, device="cpu")
        if isinstance(entry, TensorEntry) and entry.strides is None:
            if count:
                view = view_bytes(torch.view_as_real(values).view(-1) if dtype.is_complex else values)
                self._readers[number].read(entry.file, entry.offset + first * dtype.itemsize, [view])
            return values
        # A tensor in the shares of ranks, or transposed or sliced in a torch file.
        tensor = SourceTensor(entry.name, dtype, entry.shape, entry.pieces)
        return self._sources[number].read(tensor, first, count)
