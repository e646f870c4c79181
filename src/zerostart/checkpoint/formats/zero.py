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
from zerostart.checkpoint.formats.inert_pickle import InertObject, StoredTensor
from zerostart.checkpoint.formats.training import (
    STATE,
    ParameterGroup,
    PartFiles,
    Placing,
    TrainingContents,
    TrainingFormat,
    from_boxes,
    from_runs,
    is_shape,
)
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

_OPTIMIZER = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
#: What the fp32 masters are called among the states of a parameter.
MASTERS = "fp32"
#: Where ZeRO's optimizer has them, at stage 3 and below.
_PARTITIONED, _FLAT = "fp32_flat_groups", "single_partition_of_fp32_groups"

#: Rank, its buffer, the first element there, and how many.
Run = tuple[int, int, int, int]


class Zero(TrainingFormat):
    """What DeepSpeed writes at ZeRO stages 1 to 3."""

    name = "zero"

    def holds(self, directory: Path) -> bool:
        """Whether a rank's optimizer states are there."""
        return any(_OPTIMIZER.fullmatch(entry.name) for entry in directory.iterdir())

    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """Read what the files of all ranks hold together; ``files`` takes what is read.

        Raises CheckpointError for files that are not whole, or not of one job.
        """
        states = read_model_states(directory, files)
        found = states.found
        ranks = [
            _Rank.read(path, number, files) for number, path in enumerate(by_rank(directory, _OPTIMIZER))
        ]
        first = ranks[0]
        for rank in ranks:
            if rank.partitions != len(ranks) or rank.form != first.form:
                raise CheckpointError(
                    f"{rank.path} holds {rank.form} of {rank.partitions} ranks, but {first.path}, of "
                    f"{len(ranks)} ranks, holds {first.form}; all ranks' must be equal: a file is missing or "
                    "truncated, or files of two jobs, or of two moments, are mixed"
                )
            for buffers in rank.buffers.values():
                found.add(buffers)
        runs = _partitioned(states, ranks) if first.partitioned else _flat(states, ranks)
        for name, shape, places in runs:
            for kind in first.buffers:
                parts = [(ranks[r].buffers[kind][buffer], at, count) for r, buffer, at, count in places]
                key = name if kind == MASTERS else f"{kind}{STATE}{name}"
                files.reading = str(first.path)
                found.assembled[key] = from_runs(key, shape, first.buffers[kind][0].dtype, parts)
        first.base.describe(found, states, files)
        found.engine |= {"stage": first.stage, "scale": dict(first.scale)}
        return add_ties(found)


@dataclass(frozen=True)
class Base:
    """The optimizer that ZeRO wraps: the state of each buffer with its group, and the groups' settings."""

    held: Sequence[dict[str, Any]]
    grouped: Sequence[int]
    settings: Sequence[dict[str, Any]]
    place: Placing

    @classmethod
    def of(cls, states: Mapping[str, object], place: Placing) -> Base:
        """What the pickled ``states`` of ZeRO's optimizer say of it; ``place`` places the tensors there."""
        base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
        if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
            return cls((), (), (), place)
        groups = [group for group in base.get("param_groups") or () if isinstance(group, dict)]
        numbers = [(n, g) for g, group in enumerate(groups) for n in group.get("params") or ()]
        held = [base["state"].get(n) for n, _ in numbers]
        if any(not isinstance(item, dict) for item in held):  # none yet
            held = []
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return cls(held, [g for _, g in numbers], settings, place)

    def step(self, files: PartFiles) -> float:
        """The step of the optimizer that the first buffer had taken, 0 where it does not say."""
        value = self.held[0].get("step") if self.held else None
        if value is None and self.settings:
            value = self.settings[0].get("step")
        if type(value) is StoredTensor and value.shape == ():
            value = files.number(self.place("step", value))
        return float(value) if isinstance(value, int | float) else 0.0

    def like(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[StoredTensor]]:
        """The states that lie as the masters do, which have the ``shapes``, by name."""
        if len(self.held) != len(shapes):
            return {}
        return {
            str(key): [item[key] for item in self.held]
            for key in (self.held[0] if self.held else ())
            if all(type(item.get(key)) is StoredTensor for item in self.held)
            and all(item[key].shape == shape for item, shape in zip(self.held, shapes, strict=True))
        }

    def describe(self, found: TrainingContents, states: ModelStates, files: PartFiles) -> None:
        """Add the states that are one number, and the groups."""
        # A group of stage 3 has several buffers, its sub-groups, and ``states.groups`` are these.
        for item, shapes in zip(self.held, states.groups, strict=False):
            for key, value in item.items():
                if type(value) is StoredTensor and value.shape == ():
                    value = files.number(self.place(str(key), value))
                if type(value) in (int, float):
                    found.numbers.setdefault(str(key), {}).update(dict.fromkeys(shapes, float(value)))
        for group, settings in enumerate(self.settings):
            held = [names for names, own in zip(states.groups, self.grouped, strict=False) if own == group]
            names_of_group = tuple(name for names in held for name in names)
            found.groups.append(ParameterGroup(files.settings(settings, self.place), names_of_group))


@dataclass(frozen=True)
class _Rank:
    """One rank's file: its buffers by what they are (the masters, an optimizer state) and their number."""

    path: Path
    stage: int
    #: Whether each parameter is cut, as at stage 3, and not the buffer of a group.
    partitioned: bool
    partitions: int
    buffers: Mapping[str, Sequence[TensorEntry]]
    #: Elements of padding after each parameter of each group; None where there are none.
    paddings: Sequence[Sequence[int]] | None
    base: Base
    scale: Mapping[str, object]
    #: What is the same on all ranks: the stage, the states and their buffers, the step, and lengths.
    form: str

    @classmethod
    def read(cls, path: Path, number: int, files: PartFiles) -> _Rank:
        value, place = files.torch_file(path)
        states = value.get("optimizer_state_dict") if isinstance(value, dict) else None
        if not isinstance(states, dict) or "zero_stage" not in states:
            raise CheckpointError(f"{path}: not a file of ZeRO optimizer states: {DAMAGED}")
        stage, partitions = _number(states["zero_stage"]), states.get("partition_count")
        if type(partitions) is list:
            if len(set(partitions)) > 1:
                raise CheckpointError(
                    f"{path}: experts are shared by fewer ranks than the other parameters; {INSTEAD}"
                )
            partitions = partitions[0] if partitions else 1
        masters = states.get(_PARTITIONED if _PARTITIONED in states else _FLAT)
        if type(masters) is not list or any(type(t) is not StoredTensor for t in masters):
            raise CheckpointError(
                f"{path}: holds no fp32 masters, from which the weights are read: {DAMAGED}"
            )
        base = Base.of(states, place)
        # Masters are stored without the padding at a group's end, which states of an optimizer keep.
        ends = states.get("group_paddings")
        ends = ends if type(ends) is list and all(type(n) is int for n in ends) else []
        lengths = [t.shape for t in masters]
        padded = [(s[0] + end,) if len(s) == 1 else s for s, end in zip(lengths, ends, strict=False)]
        kinds = {MASTERS: masters, **(base.like(padded) or base.like(lengths))}
        buffers = {
            kind: [place(f"rank {number}: {kind} {group}", t) for group, t in enumerate(tensors)]
            for kind, tensors in kinds.items()
        }
        kinds_held = {kind: len(of_kind) for kind, of_kind in sorted(buffers.items())}
        form = f"{kinds_held} of stage {stage} and step {base.step(files):g}"
        if _PARTITIONED in states:
            form += f" with {[buffer.numel for buffer in buffers[MASTERS]]} elements"
        return cls(
            form=form,
            path=path,
            stage=stage,
            partitioned=_PARTITIONED in states,
            partitions=_number(partitions),
            buffers=buffers,
            paddings=_paddings(states.get("param_alignment_paddings")),
            base=base,
            scale=_scale(states.get("loss_scaler")),
        )


def _paddings(value: object) -> Sequence[Sequence[int]] | None:
    groups = value if type(value) is list else []
    if any(type(n) is not int or n < 0 for group in groups for n in group):
        raise CheckpointError(f"the padding behind parameters is not a number: {DAMAGED}")
    return groups or None


def _scale(scaler: object) -> dict[str, object]:
    """The numbers in a loss scaler's state."""
    state = scaler.state if isinstance(scaler, InertObject) and isinstance(scaler.state, dict) else {}
    return {str(key): value for key, value in state.items() if type(value) in (int, float)}


def _overlaps(starts: Sequence[int], at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, first element and count for the intervals between ``starts`` that hold [at, stop)."""
    for number, (low, high) in enumerate(pairwise(starts)):
        first, last = max(at, low), min(stop, high)
        if first < last:
            yield number, first - low, last - first


def _flat(states: ModelStates, ranks: Sequence[_Rank]) -> Iterator[tuple[str, tuple[int, ...], list[Run]]]:
    for group, shapes in enumerate(states.groups):
        # The ranks' parts laid end to end are the group's flat buffer, in which parameters follow each other
        # (with the padding of each behind it): a parameter may begin on one rank and end on the next.
        starts = [0, *accumulate(rank.buffers[MASTERS][group].numel for rank in ranks)]
        paddings = ranks[0].paddings[group] if ranks[0].paddings else [0] * len(shapes)
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            stop = at + prod(shape)
            yield name, shape, [(rank, group, first, n) for rank, first, n in _overlaps(starts, at, stop)]
            at = stop + padding


def _partitioned(
    states: ModelStates, ranks: Sequence[_Rank]
) -> Iterator[tuple[str, tuple[int, ...], list[Run]]]:
    starts = [0, *accumulate(buffer.numel for buffer in ranks[0].buffers[MASTERS])]
    at = 0
    for name, shape in states.shapes.items():
        # Stage 3 gives each rank an equal part, the last one padded: rounded up. `at` counts on one rank, and
        # is the same on all.
        stop = at - (-prod(shape) // len(ranks))
        parts = list(_overlaps(starts, at, stop))
        yield name, shape, [(rank, *part) for rank in range(len(ranks)) for part in parts]
        at = stop


def _number(value: object) -> int:
    """An integer, or that of an enumeration's member."""
    if isinstance(value, InertObject) and len(value.arguments) == 1:
        value = value.arguments[0]
    if type(value) is not int:
        raise CheckpointError(f"a {type(value).__name__} stands where a number is expected: {DAMAGED}")
    return value


_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
#: What DeepSpeed writes of models that are cut otherwise than by data parallelism.
_CUT = re.compile(r"layer_\d+.*|expp?_rank_.*|.*_expert_\d+_.*")
INSTEAD = "convert it with DeepSpeed's ds_to_universal.py, and load what that writes"
#: The counters of an engine that are saved.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class ModelStates:
    """What the files of the model's states hold besides the trained parameters, and the shapes of these."""

    found: TrainingContents
    #: Shapes of trained parameters, by their groups.
    groups: tuple[Mapping[str, tuple[int, ...]], ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}


def _add_whole(found: TrainingContents, name: str, entry: TensorEntry) -> None:
    found.add([entry])
    boxes = [(entry, (0,) * len(entry.shape))]
    found.assembled[name] = from_boxes(name, entry.shape, entry.dtype, boxes)


def add_ties(found: TrainingContents) -> TrainingContents:
    """Add tied parameters under all of their names."""
    for name, other in found.ties.items():
        if other in found.assembled:
            # Whatever else is stored under the name: a universal checkpoint has its rounded value there.
            found.assembled[name] = replace(found.assembled[other], name=name)
    return found


def read_model_states(directory: Path, files: PartFiles) -> ModelStates:
    """The states of the model beside the optimizer's; raises CheckpointError where they are not whole."""
    found = []
    for path in by_rank(directory, _MODEL):
        value, place = files.torch_file(path)
        if not isinstance(value, dict) or not isinstance(value.get("module"), dict):
            raise CheckpointError(f"{path}: not a file of model states: {DAMAGED}")
        _refuse_experts(value, path)
        found.append((value, place, path))
    value, place, path = found[0]
    for other, _, beside in found[1:]:
        if other.get("global_steps") != value.get("global_steps"):
            raise CheckpointError(
                f"{beside} and {path} have different global_steps: files of two moments are mixed; use a "
                "complete checkpoint"
            )
    module, shapes = value["module"], value.get("param_shapes")
    if type(shapes) is not list:
        raise CheckpointError(f"{path}: does not list its parameters (param_shapes); {INSTEAD}")
    groups = tuple(_shapes(group) for group in shapes)
    frozen = _shapes(value.get("frozen_param_shapes") or {})
    tied = dict(_pairs(value.get("shared_params") or {}))
    buffers = value.get("buffer_names") or ()
    if any(type(name) is not str for name in (*tied, *tied.values(), *buffers)):
        raise CheckpointError(f"{path}: a tied parameter or a buffer has no name: {DAMAGED}")
    plain = set(buffers)
    if path.name.startswith("mp_rank"):
        # Whole parameters: one that nothing else names is frozen, at stage 1. At stage 3 they are empty here.
        plain |= {str(name) for name in module} - {*frozen, *tied, *(n for group in groups for n in group)}
    contents = TrainingContents(
        engine={name: value[name] for name in _COUNTERS if type(value.get(name)) is int},
        schedule=value["lr_scheduler"] if isinstance(value.get("lr_scheduler"), dict) else None,
        ties=tied,
    )
    for name, tensor in module.items():
        if name in plain and type(tensor) is StoredTensor:
            _add_whole(contents, name, place(f"whole {name}", tensor))
    for name, shape in frozen.items():
        parts = []
        for rank, (held, place_of, _) in enumerate(found):
            fragment = (held.get("frozen_param_fragments") or {}).get(name)
            if type(fragment) is StoredTensor:
                parts.append(place_of(f"rank {rank}: frozen {name}", fragment))
        if not parts:
            raise CheckpointError(
                f"the frozen parameter {shown(name)} is in none of the files of model states: a file is "
                "missing, or files of two jobs are mixed"
            )
        if parts[0].shape == shape:  # whole on every rank
            _add_whole(contents, name, parts[0])
        else:
            contents.add(parts)
            runs = [(part, 0, part.numel) for part in parts]
            contents.assembled[name] = from_runs(name, shape, parts[0].dtype, runs)
    return ModelStates(contents, groups)


def by_rank(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of one kind in the order of the ranks; raises CheckpointError where one is missing."""
    names = sorted(entry.name for entry in directory.iterdir())
    if cut := next((name for name in names if _CUT.fullmatch(name)), None):
        raise CheckpointError(
            f"{directory / cut}: belongs to a model that is split into pipeline stages or experts; {INSTEAD}"
        )
    found = {}
    for name in names:
        if match := pattern.fullmatch(name):
            if int(match["model"]):
                raise CheckpointError(
                    f"{directory / name}: belongs to a model with tensor parallelism; {INSTEAD}"
                )
            found[int(match["rank"] or 0)] = directory / name
    missing = next((rank for rank in range(max(found, default=0) + 1) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"{directory}: the file of rank {missing} is missing ({pattern.pattern}): copy the "
            "checkpoint again"
        )
    return [found[rank] for rank in range(len(found))]


def _refuse_experts(value: Mapping[str, object], path: Path) -> None:
    if any("autoep" in key.lower() and value[key] for key in value if type(key) is str):
        raise CheckpointError(f"{path}: experts are sharded over ranks (AutoEP); {INSTEAD}")


def _shapes(group: object) -> dict[str, tuple[int, ...]]:
    pairs = list(_pairs(group))
    for name, shape in pairs:
        if type(name) is not str:
            raise CheckpointError(
                f"a parameter has a {type(name).__name__} for a name, not a string: {DAMAGED}"
            )
        if not is_shape(shape):
            raise CheckpointError(f"parameter {shown(name)} has no valid shape: {DAMAGED}")
    return dict(pairs)


def _pairs(value: Any) -> Iterator[tuple[Any, object]]:
    """Items of a dictionary, or of a list of pairs, which older versions write."""
    yield from value.items() if isinstance(value, dict) else value


class Universal(TrainingFormat):
    """What DeepSpeed's ds_to_universal.py writes."""

    name = "universal"

    def holds(self, directory: Path) -> bool:
        """Whether a parameter has a folder with its masters."""
        zero = directory / "zero"
        return zero.is_dir() and any((entry / f"{MASTERS}.pt").is_file() for entry in zero.iterdir())

    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """What the folders of all parameters hold; ``files`` takes what is read.

        Raises CheckpointError for files that are not as ds_to_universal.py writes them.
        """
        states = read_model_states(directory, files)
        found, shapes = states.found, states.shapes
        for folder in sorted(entry for entry in (directory / "zero").iterdir() if entry.is_dir()):
            name = folder.name
            for path in sorted(folder.glob("*.pt")):
                kind = path.stem
                value, place = files.torch_file(path)
                tensor = value.get("param") if isinstance(value, dict) else value
                if type(tensor) is not StoredTensor:
                    raise CheckpointError(f"{path}: holds no tensor: {DAMAGED}")
                key = name if kind == MASTERS else f"{kind}{STATE}{name}"
                entry = place(f"stored {key}", tensor)
                if entry.shape == () and kind != MASTERS:
                    found.numbers.setdefault(kind, {})[name] = files.number(entry)
                else:
                    found.add([entry])
                    found.assembled[key] = _shaped(key, entry, shapes.get(name, entry.shape), path)
        absent = [name for name in shapes if name not in found.assembled]
        if absent:
            raise CheckpointError(
                f"{directory / 'zero' / absent[0]} is missing, and {len(absent) - 1} more files are"
            )
        _add_groups(directory / "zero" / "optimizer_state.pt", states, found, files)
        return add_ties(found)


def _add_groups(path: Path, states: ModelStates, found: TrainingContents, files: PartFiles) -> None:
    value, place = files.torch_file(path) if path.is_file() else (None, None)
    if not isinstance(value, dict) or place is None:
        return
    base = Base.of(value, place)
    base.describe(found, states, files)
    groups = () if base.settings else value.get("param_groups") or ()
    for settings, shapes in zip(groups, states.groups, strict=False):
        if isinstance(settings, dict):
            kept = {key: item for key, item in settings.items() if key != "params"}
            found.groups.append(ParameterGroup(files.settings(kept, place), tuple(shapes)))


def _shaped(key: str, entry: TensorEntry, shape: tuple[int, ...], path: Path) -> Assembled:
    if entry.shape in (shape, ()):
        return from_boxes(key, entry.shape, entry.dtype, [(entry, (0,) * len(entry.shape))])
    if entry.shape == (prod(shape),):
        return from_runs(key, shape, entry.dtype, [(entry, 0, entry.numel)])
    raise CheckpointError(
        f"{path}: the file has the shape {list(entry.shape)}, but the model has {list(shape)}; "
        "which of the file's elements belong to the model is unknown"
    )
