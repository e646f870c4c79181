"""Plan the files of a safetensors checkpoint, equal on every rank."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import SupportsIndex

from zerostart.checkpoint.catalog import DTYPE_BITS, TensorEntry
from zerostart.checkpoint.strict_json import MAX_JSON_BYTES, JsonObject
from zerostart.errors import CheckpointError, ConfigError

DEFAULT_STEM = "model"
#: Units of huggingface_hub, which are decimal, and binary ones.
_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
#: Maximum size of the header of one file in bytes, less than the limit of readers.
MAX_HEADER_BYTES = MAX_JSON_BYTES * 7 // 8
#: Order of types in a file: wide ones first, as `DTYPE_BITS` lists them in reverse.
_RANK = {dtype: position for position, dtype in enumerate(DTYPE_BITS)}


@dataclass(frozen=True)
class ShardFile:
    """File to write."""

    name: str
    #: First bytes of the file: the length of the JSON, and the JSON.
    header: bytes
    #: File size in bytes, header included.
    size: int


@dataclass(frozen=True)
class SaveLayout:
    """Offsets of all tensors of a checkpoint in its files."""

    files: tuple[ShardFile, ...]
    #: Entries by name: ``file`` is a position in ``files``, ``offset`` counts from the start of that file.
    tensors: Mapping[str, TensorEntry]
    #: Size of all tensors in bytes.
    total_size: int
    stem: str
    #: Content of ``index_name``; None for a single file.
    index: JsonObject | None

    @property
    def index_name(self) -> str:
        """Name of the index file for ``stem``."""
        return f"{self.stem}.safetensors.index.json"


def parse_size(size: int | str) -> int:
    """Parse a size in bytes: an integer, or a number with a unit.

    "5GB" is 5e9, "5GiB" is 5 * 2**30. Raises ConfigError for anything else, and for less than a byte.
    """
    count = 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?I?B)?\s*", size, re.IGNORECASE | re.ASCII)
        unit = match and _UNITS.get((match[2] or "B").upper())
        if match and unit:
            count = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    elif isinstance(size, SupportsIndex) and not isinstance(size, bool):
        count = operator.index(size)  # also numpy's integers
    if count < 1:
        raise ConfigError(
            f"{size!r} is not a size: give bytes, or a number with KB, MB, GB or TB, as in '5GB'"
        )
    return count


def plan_shards(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    max_shard_size: int | str = "5GB",
    stem: str = DEFAULT_STEM,
    metadata: Mapping[str, str] | None = None,
    total_parameters: int | None = None,
    before: Mapping[str, int] | None = None,
) -> SaveLayout:
    """Distribute tensors over files as save_pretrained does.

    In the given order each file takes as many tensors as fit into ``max_shard_size`` bytes and into a
    readable header; a larger tensor gets its own file. One file is called ``model.safetensors``, several
    ``model-00001-of-0000N.safetensors`` with an index (``stem`` replaces "model"). ``metadata`` is
    written into each header, {"format": "pt"} by default; ``total_parameters`` into the index, if given.
    ``before`` has the number of the source file of each tensor: if that division is possible with this
    size, it is kept. Raises CheckpointError on a repeated name, and on a dtype or shape that cannot be
    stored.
    """
    limit = parse_size(max_shard_size)
    entries: dict[str, TensorEntry] = {}
    for name, dtype, shape in tensors:
        if name in entries or name == "__metadata__":
            raise CheckpointError(
                f"tensor {name!r} cannot be saved: another tensor has this name already; rename one of the "
                "two"
            )
        entries[name] = _unplaced(name, dtype, shape)
    groups = _as_before(entries, before or {}, limit) or _filled(entries.values(), limit)
    files, placed = _place(groups, stem, {"format": "pt"} if metadata is None else metadata)
    total = sum(entry.nbytes for entry in placed)
    index: JsonObject | None = None
    if len(files) > 1:
        facts = {"total_size": total}
        if total_parameters is not None:
            facts["total_parameters"] = total_parameters
        index = {"metadata": facts, "weight_map": {entry.name: files[entry.file].name for entry in placed}}
    return SaveLayout(files, {entry.name: entry for entry in placed}, total, stem, index)


def _unplaced(name: str, dtype: str, shape: Sequence[int]) -> TensorEntry:
    bits = prod(shape) * DTYPE_BITS.get(dtype, 0)
    if dtype not in DTYPE_BITS or bits % 8 or any(size < 0 for size in shape):
        raise CheckpointError(f"tensor {name!r}: {dtype} {list(shape)} cannot be stored in safetensors")
    return TensorEntry(name, dtype, tuple(shape), 0, 0, bits // 8)


def _filled(entries: Iterable[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = []
    current: list[TensorEntry] = []
    nbytes = header = 0
    for entry in entries:
        if entry.nbytes > limit:
            groups.append([entry])
            continue
        nbytes, header = nbytes + entry.nbytes, header + _header_bytes(entry)
        if current and (nbytes > limit or header > MAX_HEADER_BYTES):
            groups.append(current)
            # The tensor that did not fit begins the next file.
            current, nbytes, header = [], entry.nbytes, _header_bytes(entry)
        current.append(entry)
    if current or not groups:
        groups.append(current)
    return groups


def _header_bytes(entry: TensorEntry) -> int:
    """Return the header bytes of a tensor, at most."""
    return 128 + 20 * len(entry.shape) + len(json.dumps(entry.name))


def _as_before(
    entries: Mapping[str, TensorEntry], before: Mapping[str, int], limit: int
) -> list[list[TensorEntry]] | None:
    """Return the source files if ``limit`` allows them."""
    # A tensor without a source file has no place among the old ones.
    if not entries or not entries.keys() <= before.keys():
        return None
    groups: dict[int, list[TensorEntry]] = {}
    for entry in entries.values():
        groups.setdefault(before[entry.name], []).append(entry)
    files = [groups[number] for number in sorted(groups)]
    filled = 0
    for group in files:
        sizes = [entry.nbytes for entry in group]
        if len(group) == 1 and sizes[0] > limit:  # it has its own file, and ends no other
            continue
        # A file with room for the largest tensor of this one was not filled by this limit.
        if sum(sizes) > limit or 0 < filled <= limit - max(sizes):
            return None
        filled = sum(sizes)
    headers = (sum(map(_header_bytes, group)) for group in files)
    return None if any(header > MAX_HEADER_BYTES for header in headers) else files


def _place(
    groups: Sequence[Sequence[TensorEntry]], stem: str, metadata: Mapping[str, str]
) -> tuple[tuple[ShardFile, ...], list[TensorEntry]]:
    files = []
    placed = []
    for number, group in enumerate(groups):
        suffix = "" if len(groups) == 1 else f"-{number + 1:05d}-of-{len(groups):05d}"
        # The order of safetensors: wide elements first keeps every tensor aligned.
        ordered = sorted(group, key=lambda entry: (-_RANK[entry.dtype], entry.name))
        header, size = _header(ordered, metadata)
        files.append(ShardFile(f"{stem}{suffix}.safetensors", header, len(header) + size))
        offset = len(header)
        for entry in ordered:
            placed.append(TensorEntry(entry.name, entry.dtype, entry.shape, number, offset, entry.nbytes))
            offset += entry.nbytes
    return tuple(files), placed


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    document: JsonObject = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for entry in entries:
        span = [position, position + entry.nbytes]
        document[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        position += entry.nbytes
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    return len(text).to_bytes(8, "little") + text, position
