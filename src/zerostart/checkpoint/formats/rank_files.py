"""accelerate's ``save_state`` of FSDP2 with ``use_dcp=False``: a file of ``torch.save`` from each rank.

``pytorch_model_fsdp_0_rank3.bin`` has that rank's boxes of the weights, ``optimizer_0_rank3.bin`` those of
what ``get_optimizer_state_dict`` gives. Each box is a DTensor, which is read as data: its shape as a whole,
where it is cut, and the tensor in it. Source: ``save_fsdp_model`` and ``save_fsdp_optimizer`` of accelerate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.checkpoint.formats.assembling import (
    STATE,
    ParameterGroup,
    TrainingContents,
    from_boxes,
    is_shape,
    names_of,
)
from zerostart.checkpoint.formats.inert_pickle import InertObject, StoredTensor
from zerostart.checkpoint.formats.located import Located
from zerostart.checkpoint.formats.training import PartFiles, Placing, TrainingFormat, local_tensor
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

_WEIGHTS, _OPTIMIZER = "pytorch_model_fsdp_0_rank", "optimizer_0_rank"
_REMEDY = "load it where it was saved, and save it again with use_dcp=True or by zerostart.save_state"
#: Of a tensor what each rank has: its box, where that lies in its file, and what its files are.
_Parts = dict[str, list[tuple[Any, Placing, str]]]


class RankFiles(TrainingFormat):
    """What accelerate writes of FSDP2, each rank into a file of its own."""

    name = "rank_files"
    stored = True

    def holds(self, directory: Located) -> bool:
        """Whether there is the file of the first rank's weights."""
        return (directory / f"{_WEIGHTS}0.bin").is_file()

    def read(self, directory: Located, files: PartFiles) -> TrainingContents:
        """The files of all ranks."""
        return _read(directory, files)


def _read(directory: Located, files: PartFiles) -> TrainingContents:
    """What the files of all ranks hold together; ``files`` takes what is read.

    Raises CheckpointError for what is not whole, or was cut by a
    mesh of several dimensions, or by anything else than FSDP2.
    """
    found = TrainingContents()
    weights: _Parts = {}
    moments: _Parts = {}
    groups: list[Any] = []
    for value, place, path in _opened(directory, _WEIGHTS, files):
        for name, item in value.items():
            weights.setdefault(str(name), []).append((item, place, path))
    for value, place, path in _opened(directory, _OPTIMIZER, files):
        for name, kinds in _dict(value.get("state"), path).items():
            for kind, item in _dict(kinds, path).items():
                moments.setdefault(f"{kind}{STATE}{name}", []).append((item, place, path))
        groups = groups or value.get("param_groups") or []
    for name, parts in [*weights.items(), *moments.items()]:
        _assemble(name, parts, found, files)
    for group in groups:
        settings = dict(_dict(group, str(directory)))
        found.groups.append(ParameterGroup(settings, names_of(settings.pop("params", ()))))
    return found


def _opened(
    directory: Located, stem: str, files: PartFiles
) -> Iterator[tuple[dict[object, Any], Placing, str]]:
    """The dictionaries in the files of all ranks, in the ranks' order."""
    pattern = re.compile(rf"{stem}(\d+)\.bin")
    ranks = sorted(int(m[1]) for entry in directory.iterdir() if (m := pattern.fullmatch(entry.name)))
    if ranks != list(range(len(ranks))):
        raise CheckpointError(f"{directory}: some of the ranks' files {stem}*.bin are missing: {DAMAGED}")
    for rank in ranks:
        path = directory / f"{stem}{rank}.bin"
        value, place = files.torch_file(path)
        yield _dict(value, str(path)), place, str(path)


def _dict(value: object, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no state dict as FSDP2 saves it; {_REMEDY}")
    return value


def _assemble(
    name: str, parts: list[tuple[object, Placing, str]], found: TrainingContents, files: PartFiles
) -> None:
    """Add a tensor, or a number, of which each rank has a part, or each has the whole."""
    # Rank 0 says what it is: a plain tensor, which each rank has whole; a DTensor, of which each has its box;
    # or no tensor at all.
    item, place, path = parts[0]
    files.reading, files.record = path, name
    key, separator, parameter = name.partition(STATE)
    if not isinstance(item, InertObject):
        if type(item) is not StoredTensor:
            return  # what modules keep beside tensors
        entry = place(f"{name} of rank 0", item)
        if separator and entry.shape == ():
            found.numbers.setdefault(key, {})[parameter] = files.number(entry)
            return
        found.add([entry])
        found.assembled[name] = from_boxes(name, entry.shape, entry.dtype, [(entry, (0,) * len(entry.shape))])
        return
    shape, dim, first = _cut(item, name, path)
    # FSDP2 cuts along one dimension: the boxes lie one after the other, in the order of the ranks, and ranks
    # beyond the last row have an empty one. Whether they fill the tensor, ``check_whole`` says.
    boxes: list[tuple[TensorEntry, tuple[int, ...]]] = []
    at = 0
    for rank, (box, place_of, path_of) in enumerate(parts if dim is not None else parts[:1]):
        cut = _cut(box, name, path_of) if isinstance(box, InertObject) else None
        if cut is None or cut[:2] != (shape, dim):
            raise CheckpointError(
                f"{path_of}: {shown(name)} is sharded differently than on rank 0: {DAMAGED}"
            )
        entry = place_of(f"{name} of rank {rank}", cut[2])
        if entry.numel and len(entry.shape) == len(shape):
            boxes.append((entry, tuple(at if axis == dim else 0 for axis in range(len(shape)))))
            at += entry.shape[dim] if dim is not None else 0
    found.add(entry for entry, _ in boxes)
    found.assembled[name] = from_boxes(name, shape, place(name, first).dtype, boxes)


def _cut(item: InertObject, name: str, path: str) -> tuple[tuple[int, ...], int | None, StoredTensor]:
    """The shape of a tensor as a whole, where ranks cut it (None: each has all), and what this one has."""
    spec = item.get("_spec")
    placements = spec.get("placements") if isinstance(spec, InertObject) else None
    sizes = item.arguments[2] if len(item.arguments) > 2 else None
    local = local_tensor(item)
    if local is None or type(placements) is not tuple or not is_shape(sizes):
        raise CheckpointError(f"{path}: {shown(name)} is a {item.name}, which FSDP2 does not save; {_REMEDY}")
    kinds = [one.name.rpartition(".")[2] if isinstance(one, InertObject) else "" for one in placements]
    if kinds == ["Shard"] and type(dim := placements[0].get("dim")) is int and 0 <= dim < len(sizes):
        return sizes, dim, local
    if kinds == ["Replicate"]:
        return sizes, None, local
    raise CheckpointError(
        f"{path}: {shown(name)} is sharded as {', '.join(kinds)}, but only tensors that FSDP2 "
        f"shards along one dimension are read; {_REMEDY}"
    )
