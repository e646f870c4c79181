"""Directories of ``torch.distributed.checkpoint``: boxes of tensors in the ranks' files.

The metadata is a pickle (``.metadata``), which is read as data; each box is an archive of ``torch.save``
within a file. Source: ``metadata.py`` and ``filesystem.py`` of ``torch/distributed/checkpoint`` (torch 2.11
to 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from zerostart.checkpoint.catalog import TORCH_NAMES, TensorEntry
from zerostart.checkpoint.formats.inert_pickle import Global, InertObject, StoredTensor, read_inert_pickle
from zerostart.checkpoint.formats.torch_zip import WRAPPERS, TorchArchive
from zerostart.checkpoint.formats.training import (
    STATE,
    ParameterGroup,
    PartFiles,
    TrainingContents,
    TrainingFormat,
    from_boxes,
    is_shape,
    names_of,
)
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

METADATA = ".metadata"
#: Prefixes of optimizer names saved with ``flatten_optimizer_state_dict=True``.
_FLAT_STATE, _FLAT_GROUPS = "state.", "param_groups."
#: Maximum size of the metadata in bytes; a box takes about 300.
MAX_METADATA_BYTES = 1 << 28


class TorchDistributed(TrainingFormat):
    """Checkpoint of ``torch.distributed.checkpoint``, also as written by accelerate."""

    name = "dcp"

    def holds(self, directory: Path) -> bool:
        """Return True if the directory has the metadata file."""
        return (directory / METADATA).is_file()

    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """Read the metadata and the files of all ranks.

        ``files`` records each file. Weights are at the top, or in one of several entries (``{"model":
        ..., "optim": ...}``). Optimizer states have the names of ``get_optimizer_state_dict``,
        ``optim.state.NAME.exp_avg``. Raises CheckpointError for incomplete or compressed files.
        """
        path = directory / METADATA
        with files.opened(path) as (handle, size, _):
            if size > MAX_METADATA_BYTES:
                raise CheckpointError(
                    f"{path}: its {size} bytes are beyond the limit of {MAX_METADATA_BYTES} for metadata"
                )
            # Check the first and the last byte: a sparse file of any length has neither.
            if handle.read(1, 0) != b"\x80" or handle.read(1, size - 1) != b".":
                raise CheckpointError(f"{path}: is not a pickle, or only a part of one: {DAMAGED}")
            # Not `weights`: the metadata names classes of torch, which become records.
            value = read_inert_pickle(handle.read(size, 0), str(path))
        described = _described(value, path)
        stored, pickled = _stored(directory, value, described, files)
        contents = TrainingContents()
        contents.add(stored.values())
        for key, name in _names(described, value, path).items():
            shape, dtype, boxes = described[key]
            parts = [(stored[key, origin], origin) for origin, _ in boxes if (key, origin) in stored]
            found = [(stored[key, at], size) for at, size in boxes if (key, at) in stored]
            # torch may save an empty part with another shape, such as [0, 0] for [5, 0].
            if any(one.shape != size and (one.numel or prod(size)) for one, size in found):
                raise CheckpointError(
                    f"{path}: a part of {shown(name)} is stored in another shape: {DAMAGED}"
                )
            # A scalar state is a counter such as `step`: its value is read now, and no tensor is planned.
            kind, _, parameter = name.partition(STATE)
            if parameter and shape == () and len(parts) == 1:
                contents.numbers.setdefault(kind, {})[parameter] = files.number(parts[0][0])
            else:
                contents.assembled[name] = from_boxes(name, shape, dtype, parts)
        # A setting may be a tensor, such as the learning rate of a captured graph.
        for (key, _), entry in stored.items():
            route = _route(_routes(value).get(key), key)
            if _is_setting(route) and entry.shape == ():
                pickled[key] = files.number(entry)
        _add_groups(value, pickled, contents)
        return contents


def _is_setting(route: Sequence[str]) -> bool:
    flat = len(route) == 2 and _flat(route[1], _FLAT_GROUPS) is not None
    return flat or (len(route) == 4 and route[1] == "param_groups")


def _add_groups(value: InertObject, pickled: Mapping[str, Any], contents: TrainingContents) -> None:
    """Add parameter groups from entries such as ``optim.param_groups.0.lr``."""
    groups: dict[Any, dict[str, object]] = {}
    flat_groups: dict[str, dict[str, object]] = {}
    for key, item in pickled.items():
        route = _route(_routes(value).get(key), key)
        if len(route) == 4 and route[1] == "param_groups":
            groups.setdefault(route[2], {})[route[3]] = item
        elif len(route) == 2 and (flat := _flat(route[1], _FLAT_GROUPS)) is not None:
            flat_groups.setdefault(flat[0], {})[flat[1]] = item
        elif len(route) == 2 and type(item) in (int, float) and (flat := _flat(route[1], _FLAT_STATE)):
            contents.numbers.setdefault(flat[1], {})[flat[0]] = item
    contents.groups += [ParameterGroup(settings, (name,)) for name, settings in flat_groups.items()]
    for group in groups.values():
        names = group.pop("params", None)
        if type(names) is list:
            contents.groups.append(ParameterGroup(group, names_of(names)))


def _flat(name: str, kind: str) -> tuple[str, str] | None:
    """Split a flat optimizer entry into parameter and key.

    None for any other entry.
    """
    parameter, _, key = name.removeprefix(kind).rpartition(".")
    return (parameter, key) if name.startswith(kind) and parameter else None


#: Shape, dtype, and origins and sizes of the boxes of a tensor.
Described = tuple[tuple[int, ...], str, list[tuple[tuple[int, ...], tuple[int, ...]]]]


def _described(value: object, path: Path) -> dict[str, Described]:
    """Return the tensors that the metadata describes."""
    entries = value.get("state_dict_metadata") if isinstance(value, InertObject) else None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: not a metadata file of torch.distributed.checkpoint: {DAMAGED}")
    out: dict[str, Described] = {}
    for key, entry in entries.items():
        if not isinstance(entry, InertObject) or not entry.name.endswith("TensorStorageMetadata"):
            continue  # pickled values: counters, groups of parameters
        properties, chunks = entry.get("properties"), entry.get("chunks")
        state = properties.state if isinstance(properties, InertObject) else None
        dtype = state.get("dtype") if isinstance(state, dict) else state[0] if type(state) is tuple else None
        spelled = TORCH_NAMES.get(dtype.name.removeprefix("torch.")) if type(dtype) is Global else None
        if spelled is None:
            raise CheckpointError(
                f"{path}: tensor {shown(str(key))} has a type that this version does not read"
            )
        boxes = [
            (_sizes(chunk.get("offsets"), path), _sizes(chunk.get("sizes"), path))
            for chunk in chunks or ()
            if isinstance(chunk, InertObject)
        ]
        out[str(key)] = (_sizes(entry.get("size"), path), spelled, boxes)
    return out


@dataclass(frozen=True)
class _PartLocation:
    key: str
    origin: tuple[int, ...]
    offset: int
    length: int


def _stored(
    directory: Path, value: InertObject, described: Mapping[str, Described], files: PartFiles
) -> tuple[dict[tuple[str, tuple[int, ...]], TensorEntry], dict[str, Any]]:
    by_file: dict[str, list[_PartLocation]] = {}
    for file, place in _places(value, directory / METADATA):
        by_file.setdefault(file, []).append(place)
    out: dict[tuple[str, tuple[int, ...]], TensorEntry] = {}
    pickled: dict[str, object] = {}
    for file, places in sorted(by_file.items()):
        # The name may be hostile: it must stay in the directory.
        if "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{directory}: the metadata places a part in {shown(file)}, outside the checkpoint"
            )
        path = directory / file
        with files.opened(path) as (handle, size, number):
            for place in places:
                if place.offset < 0 or place.length < 0 or place.offset + place.length > size:
                    raise CheckpointError(
                        f"{path}: the metadata places {shown(place.key)} beyond the end of the file: "
                        f"{DAMAGED}"
                    )
                # Each part is a separate archive (`torch.save` into a stream), at an offset of the rank's
                # file.
                archive = TorchArchive(handle, place.length, str(path), place.offset)
                tensor = archive.value()
                if place.key not in described:
                    pickled[place.key] = tensor
                    continue
                if type(tensor) is not StoredTensor:
                    raise CheckpointError(
                        f"{path}: {shown(place.key)} is not a tensor in this file: {DAMAGED}"
                    )
                name = f"{place.key} at {list(place.origin)}"
                out[place.key, place.origin] = archive.entry(name, tensor, number)
    return out, pickled


def _places(value: InertObject, path: Path) -> Iterator[tuple[str, _PartLocation]]:
    storage = value.get("storage_data")
    if not isinstance(storage, dict):
        raise CheckpointError(f"{path}: does not say where tensors are stored: {DAMAGED}")
    for index, info in storage.items():
        if not isinstance(index, InertObject) or not isinstance(info, InertObject):
            raise CheckpointError(f"{path}: does not say where tensors are stored: {DAMAGED}")
        origin = index.get("offset") or ()  # only tensors have an offset
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: parts are compressed, which is not read; save the checkpoint again without "
                "extensions"
            )
        file, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if [type(one) for one in (index.get("fqn"), file, offset, length)] != [str, str, int, int]:
            raise CheckpointError(f"{path}: the metadata gives no file and offset for a part: {DAMAGED}")
        yield file, _PartLocation(index.get("fqn"), _sizes(origin, path), offset, length)


def _names(described: Mapping[str, Described], value: InertObject, path: Path) -> dict[str, str]:
    routes = _routes(value)
    keyed = {key: _route(routes.get(key), key) for key in described}
    tops = {route[0] for route in keyed.values() if len(route) > 1}
    wrapped = [name for name in WRAPPERS if name in tops]
    if len(wrapped) > 1:
        raise CheckpointError(
            f"{path}: holds several sets of weights ({' and '.join(wrapped)}), and it is not clear "
            "which one to load; save the one that is meant by itself"
        )
    out = {}
    for key, route in keyed.items():
        if wrapped and route[0] == wrapped[0]:
            out[key] = ".".join(route[1:])
        elif not wrapped and len(route) == 1:
            out[key] = route[0]
        elif len(route) == 4 and route[1] == "state":
            out[key] = f"{route[3]}{STATE}{route[2]}"
        elif len(route) == 2 and (flat := _flat(route[1], _FLAT_STATE)) is not None:
            out[key] = f"{flat[1]}{STATE}{flat[0]}"
    if not out:
        raise CheckpointError(
            f"{path}: holds no weights at its top level or under {', '.join(WRAPPERS)}; it holds "
            f"{', '.join(map(shown, sorted(tops)[:8]))}"
        )
    return out


def _routes(value: InertObject) -> dict[object, object]:
    routes = value.get("planner_data")
    return routes if isinstance(routes, dict) else {}


def _route(route: Any, key: str) -> tuple[str, ...]:
    named = type(route) is tuple and route and all(type(part) in (str, int) for part in route)
    return tuple(map(str, route)) if named else (key,)


def _sizes(value: object, path: Path) -> tuple[int, ...]:
    if not is_shape(value):
        raise CheckpointError(f"{path}: a shape is not a list of sizes: {DAMAGED}")
    return value
