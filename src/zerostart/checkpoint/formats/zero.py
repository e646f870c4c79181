"""Checkpoints that DeepSpeed's ZeRO writes, stages 1 to 3: flat buffers of the ranks, and what lies where.

Weights are the fp32 masters of what is trained; frozen parameters and buffers are as the model held them. The
order of the elements is that of DeepSpeed's own ``utils/zero_to_fp32.py`` (0.19.8): at stages 1 and 2 the
buffers of a parameter group, rank after rank, hold the parameters one after the other, with padding between;
at stage 3 each rank has an equal part of each parameter, the last one padded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

from zerostart.checkpoint.catalog import Assembled, TensorEntry
from zerostart.checkpoint.formats.inert_pickle import Made
from zerostart.checkpoint.formats.parts import PartFiles, Placing
from zerostart.checkpoint.formats.shares import from_boxes, from_runs
from zerostart.checkpoint.formats.weights_pickle import StoredTensor
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

__all__ = ["MASTERS", "ModelStates", "is_zero", "read_model_states", "read_zero"]

_OPTIMIZER = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
#: What DeepSpeed writes of models that are cut otherwise than by data parallelism.
_CUT = re.compile(r"layer_\d+.*|expp?_rank_.*|.*_expert_\d+_.*")
_INSTEAD = "convert it with DeepSpeed's ds_to_universal.py, and load what that writes"
#: What the fp32 masters are called among the states of a parameter.
MASTERS = "fp32"

#: Rank, its buffer, the first element there, and how many.
Run = tuple[int, int, int, int]


def is_zero(directory: Path) -> bool:
    """Whether ``directory`` holds the files of ZeRO's ranks."""
    return any(_OPTIMIZER.fullmatch(entry.name) for entry in directory.iterdir())


def read_zero(directory: Path, files: PartFiles) -> tuple[dict[str, TensorEntry], dict[str, Assembled]]:
    """What is stored, and the tensors that it makes up; ``files`` takes what is read.

    A weight has its own name, the states of its optimizer are ``exp_avg:NAME`` and the like. Raises
    CheckpointError for files that are not whole, or not of one job.
    """
    stored: dict[str, TensorEntry] = {}
    states = read_model_states(directory, files)
    assembled = weights_beside(states, stored)
    ranks = [_Rank.read(path, number, files) for number, path in enumerate(_by_rank(directory, _OPTIMIZER))]
    first = ranks[0]
    for rank in ranks:
        if (rank.stage, rank.partitions) != (first.stage, len(ranks)):
            raise CheckpointError(
                f"{rank.path}: written by one of {rank.partitions} ranks at stage {rank.stage}, and here are "
                f"the files of {len(ranks)} ranks, the first of stage {first.stage}: some are missing, or "
                "those of two jobs are mixed"
            )
        for buffers in rank.buffers.values():
            stored.update({entry.name: entry for entry in buffers})
    runs = _at_stage_3(states, ranks) if first.stage == 3 else _below_stage_3(states, ranks)
    for name, shape, places in runs:
        for kind in first.buffers:
            parts = [(ranks[r].buffers[kind][buffer], at, count) for r, buffer, at, count in places]
            key = name if kind == MASTERS else f"{kind}:{name}"
            assembled[key] = from_runs(key, shape, first.buffers[kind][0].dtype, parts)
    return stored, shared(assembled, states)


@dataclass(frozen=True)
class ModelStates:
    """What the files of the model's states say.

    ``groups`` has the shapes of trained parameters by their groups, ``frozen`` those of the others; of these
    ``fragments`` has each rank's part, of rank 0 alone where parameters are whole. ``plain`` tensors, buffers
    and at stage 1 frozen parameters, are stored as they are; ``shared`` names are other names of a parameter.
    """

    groups: tuple[Mapping[str, tuple[int, ...]], ...]
    frozen: Mapping[str, tuple[int, ...]]
    fragments: tuple[Mapping[str, TensorEntry], ...]
    plain: Mapping[str, TensorEntry]
    shared: Mapping[str, str]


def read_model_states(directory: Path, files: PartFiles) -> ModelStates:
    """The states of the model beside the optimizer's; raises CheckpointError where they are not whole."""
    found = []
    for path in _by_rank(directory, _MODEL):
        value, place = files.torch_file(path)
        if type(value) is not dict or type(value.get("module")) is not dict:
            raise CheckpointError(f"{path}: no states of a model: {DAMAGED}")
        _refuse_experts(value, path)
        found.append((value, place, path))
    value, place, path = found[0]
    module, shapes = value["module"], value.get("param_shapes")
    if type(shapes) is not list:
        raise CheckpointError(f"{path}: does not say which parameters it has (param_shapes); {_INSTEAD}")
    groups = tuple(_shapes(group) for group in shapes)
    frozen = _shapes(value.get("frozen_param_shapes") or {})
    tied = {str(name): str(other) for name, other in _pairs(value.get("shared_params") or {})}
    plain = set(value.get("buffer_names") or ())
    if path.name.startswith("mp_rank"):
        # Whole parameters: one that nothing else names is frozen, at stage 1. At stage 3 they are empty here.
        plain |= {str(name) for name in module} - {*frozen, *tied, *(n for group in groups for n in group)}
    return ModelStates(
        groups=groups,
        frozen=frozen,
        fragments=tuple(
            _placed(v.get("frozen_param_fragments") or {}, p, f"rank {r}: frozen ")
            for r, (v, p, _) in enumerate(found)
        ),
        plain=_placed({name: t for name, t in module.items() if name in plain}, place, "whole "),
        shared=tied,
    )


def weights_beside(states: ModelStates, stored: dict[str, TensorEntry]) -> dict[str, Assembled]:
    """Frozen parameters and buffers, whose parts go into ``stored``."""
    out = {}
    for name, entry in states.plain.items():
        stored[entry.name] = entry
        out[name] = from_boxes(name, entry.shape, entry.dtype, [(entry, (0,) * len(entry.shape))])
    for name, shape in states.frozen.items():
        parts = [fragments[name] for fragments in states.fragments if name in fragments]
        if not parts:
            raise CheckpointError(f"the frozen parameter {shown(name)} is in no file of the model's states")
        stored.update({part.name: part for part in parts})
        if parts[0].shape == shape:  # whole on every rank
            out[name] = from_boxes(name, shape, parts[0].dtype, [(parts[0], (0,) * len(shape))])
        else:
            out[name] = from_runs(name, shape, parts[0].dtype, [(part, 0, part.numel) for part in parts])
    return out


def shared(assembled: dict[str, Assembled], states: ModelStates) -> dict[str, Assembled]:
    """``assembled`` with tied parameters under all of their names."""
    for name, other in states.shared.items():
        if other in assembled:
            # Whatever else is stored under the name: a universal checkpoint has its rounded value there.
            assembled[name] = replace(assembled[other], name=name)
    return assembled


@dataclass(frozen=True)
class _Rank:
    """One rank's file: its buffers by what they are (the masters, an optimizer state) and their number."""

    path: Path
    stage: int
    partitions: int
    buffers: Mapping[str, Sequence[TensorEntry]]
    #: Elements of padding after each parameter of each group; None where there are none.
    paddings: Sequence[Sequence[int]] | None

    @classmethod
    def read(cls, path: Path, number: int, files: PartFiles) -> _Rank:
        value, place = files.torch_file(path)
        states = value.get("optimizer_state_dict") if type(value) is dict else None
        if type(states) is not dict or "zero_stage" not in states:
            raise CheckpointError(f"{path}: no states of a ZeRO optimizer: {DAMAGED}")
        stage, partitions = _number(states["zero_stage"]), states.get("partition_count")
        if type(partitions) is list:
            if len(set(partitions)) > 1:
                raise CheckpointError(f"{path}: experts are shared by fewer ranks than the rest; {_INSTEAD}")
            partitions = partitions[0] if partitions else 1
        masters = states.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
        if type(masters) is not list or any(type(t) is not StoredTensor for t in masters):
            raise CheckpointError(
                f"{path}: holds no fp32 masters, and weights are read from these: {DAMAGED}"
            )
        kinds = {MASTERS: masters, **_optimizer_states(states, [t.shape for t in masters])}
        buffers = {
            kind: [place(f"rank {number}: {kind} {group}", t) for group, t in enumerate(tensors)]
            for kind, tensors in kinds.items()
        }
        return cls(path, stage, _number(partitions), buffers, states.get("param_alignment_paddings"))


def _optimizer_states(
    states: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> dict[str, list[StoredTensor]]:
    """The optimizer's own states that lie as the masters do, by name, in the order of the masters."""
    base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
    if type(base) is not dict or type(base.get("state")) is not dict:
        return {}
    numbers = [n for group in base.get("param_groups") or () for n in group.get("params") or ()]
    held = [base["state"].get(n) for n in numbers]
    if len(held) != len(shapes) or any(type(item) is not dict for item in held):
        return {}
    return {
        str(key): [item[key] for item in held]
        for key in held[0]
        if all(type(item.get(key)) is StoredTensor for item in held)
        and all(item[key].shape == shape for item, shape in zip(held, shapes, strict=True))
    }


def _below_stage_3(
    states: ModelStates, ranks: Sequence[_Rank]
) -> Iterator[tuple[str, tuple[int, ...], list[Run]]]:
    """Where each parameter lies: the ranks' buffers of a group are one row of elements."""
    for group, shapes in enumerate(states.groups):
        lengths = [rank.buffers[MASTERS][group].numel for rank in ranks]
        starts = [0, *accumulate(lengths)]
        paddings = ranks[0].paddings[group] if ranks[0].paddings else [0] * len(shapes)
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            stop = at + prod(shape)
            places = []
            for rank, (low, high) in enumerate(pairwise(starts)):
                first, last = max(at, low), min(stop, high)
                if first < last:
                    places.append((rank, group, first - low, last - first))
            yield name, shape, places
            at = stop + padding


def _at_stage_3(
    states: ModelStates, ranks: Sequence[_Rank]
) -> Iterator[tuple[str, tuple[int, ...], list[Run]]]:
    """Where each parameter lies: an equal part of it at the same place on each rank."""
    starts = [0, *accumulate(buffer.numel for buffer in ranks[0].buffers[MASTERS])]
    at = 0
    for name, shape in (item for group in states.groups for item in group.items()):
        stop = at - (-prod(shape) // len(ranks))
        places = []
        for rank in range(len(ranks)):
            for buffer, (low, high) in enumerate(pairwise(starts)):
                first, last = max(at, low), min(stop, high)
                if first < last:
                    places.append((rank, buffer, first - low, last - first))
        yield name, shape, places
        at = stop


def _by_rank(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of one kind in the order of the ranks; raises CheckpointError where one is missing."""
    names = sorted(entry.name for entry in directory.iterdir())
    if cut := next((name for name in names if _CUT.fullmatch(name)), None):
        raise CheckpointError(f"{directory / cut}: of a model that is cut in stages or experts; {_INSTEAD}")
    found = {}
    for name in names:
        if match := pattern.fullmatch(name):
            if int(match["model"]):
                raise CheckpointError(f"{directory / name}: of a model with tensor parallelism; {_INSTEAD}")
            found[int(match["rank"] or 0)] = directory / name
    missing = next((rank for rank in range(max(found, default=0) + 1) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"{directory}: the file of rank {missing} is not here ({pattern.pattern}): copy the checkpoint "
            "again"
        )
    return [found[rank] for rank in range(len(found))]


def _refuse_experts(value: Mapping[str, Any], path: Path) -> None:
    if any("autoep" in key.lower() and value[key] for key in value if type(key) is str):
        raise CheckpointError(f"{path}: experts are cut over ranks (AutoEP); {_INSTEAD}")


def _shapes(group: Any) -> dict[str, tuple[int, ...]]:
    pairs = list(_pairs(group))
    if any(type(shape) is not tuple for _, shape in pairs):
        raise CheckpointError(f"the shapes of parameters are no shapes: {DAMAGED}")
    return {str(name): shape for name, shape in pairs}


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    """Items of a dictionary, or of a list of pairs, which older versions write."""
    yield from value.items() if type(value) is dict else value


def _placed(tensors: Mapping[str, Any], place: Placing, prefix: str) -> dict[str, TensorEntry]:
    return {
        str(name): place(f"{prefix}{name}", tensor)
        for name, tensor in tensors.items()
        if type(tensor) is StoredTensor
    }


def _number(value: Any) -> int:
    """An integer, or that of an enumeration's member."""
    if type(value) is Made and len(value.arguments) == 1:
        value = value.arguments[0]
    if type(value) is not int:
        raise CheckpointError(f"{value!r} stands where a number is expected: {DAMAGED}")
    return value
