"""Checkpoints of DeepSpeed's ZeRO stages 1 to 3: flat buffers of the ranks.

Weights are the fp32 masters of trained parameters; frozen parameters and buffers have the model's dtype. The
order of elements is that of DeepSpeed's ``utils/zero_to_fp32.py`` (0.19.8). At stages 1 and 2 the buffers of
a parameter group, rank after rank, hold the parameters one after the other, with padding between. At stage 3
each rank has an equal part of each parameter, the last one padded.
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
#: Name of the fp32 masters among the states of a parameter.
MASTERS = "fp32"
#: Keys of the masters in ZeRO's optimizer, at stage 3 and below.
_PARTITIONED, _FLAT = "fp32_flat_groups", "single_partition_of_fp32_groups"

#: Rank, buffer number, first element and number of elements.
Run = tuple[int, int, int, int]


class Zero(TrainingFormat):
    """Checkpoint of DeepSpeed's ZeRO stages 1 to 3."""

    name = "zero"

    def holds(self, directory: Path) -> bool:
        """Return True if there are optimizer states of ranks."""
        return any(_OPTIMIZER.fullmatch(entry.name) for entry in directory.iterdir())

    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """Read the files of all ranks.

        ``files`` records each file. Raises CheckpointError for files that are incomplete or of
        several jobs.
        """
        states = read_model_states(directory, files)
        contents = states.contents
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
                contents.add(buffers)
        runs = _partitioned(states, ranks) if first.partitioned else _flat(states, ranks)
        for name, shape, places in runs:
            for kind in first.buffers:
                parts = [(ranks[r].buffers[kind][buffer], at, count) for r, buffer, at, count in places]
                key = name if kind == MASTERS else f"{kind}{STATE}{name}"
                files.reading = str(first.path)
                contents.assembled[key] = from_runs(key, shape, first.buffers[kind][0].dtype, parts)
        first.base.describe(contents, states, files)
        contents.engine |= {"stage": first.stage, "scale": dict(first.scale)}
        return add_ties(contents)


@dataclass(frozen=True)
class Base:
    """States and settings of the optimizer that ZeRO wraps."""

    buffer_states: Sequence[dict[str, Any]]
    grouped: Sequence[int]
    settings: Sequence[dict[str, Any]]
    place: Placing

    @classmethod
    def of(cls, states: Mapping[str, object], place: Placing) -> Base:
        """Parse the pickled ``states`` of ZeRO's optimizer.

        ``place`` locates tensors.
        """
        base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
        if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
            return cls((), (), (), place)
        groups = [group for group in base.get("param_groups") or () if isinstance(group, dict)]
        numbers = [(n, g) for g, group in enumerate(groups) for n in group.get("params") or ()]
        buffer_states = [base["state"].get(n) for n, _ in numbers]
        if any(not isinstance(item, dict) for item in buffer_states):  # no step was taken
            buffer_states = []
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return cls(buffer_states, [g for _, g in numbers], settings, place)

    def step(self, files: PartFiles) -> float:
        """Return the optimizer step; 0 if unknown."""
        value = self.buffer_states[0].get("step") if self.buffer_states else None
        if value is None and self.settings:
            value = self.settings[0].get("step")
        if type(value) is StoredTensor and value.shape == ():
            value = files.number(self.place("step", value))
        return float(value) if isinstance(value, int | float) else 0.0

    def like(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[StoredTensor]]:
        """Return the states with the shapes of the masters."""
        if len(self.buffer_states) != len(shapes):
            return {}
        return {
            str(key): [item[key] for item in self.buffer_states]
            for key in (self.buffer_states[0] if self.buffer_states else ())
            if all(type(item.get(key)) is StoredTensor for item in self.buffer_states)
            and all(item[key].shape == shape for item, shape in zip(self.buffer_states, shapes, strict=True))
        }

    def describe(self, contents: TrainingContents, states: ModelStates, files: PartFiles) -> None:
        """Add the scalar states and the groups."""
        # A group of stage 3 has several buffers, its sub-groups; ``states.groups`` lists the sub-groups.
        for item, shapes in zip(self.buffer_states, states.groups, strict=False):
            for key, value in item.items():
                if type(value) is StoredTensor and value.shape == ():
                    value = files.number(self.place(str(key), value))
                if type(value) in (int, float):
                    contents.numbers.setdefault(str(key), {}).update(dict.fromkeys(shapes, float(value)))
        for group, settings in enumerate(self.settings):
            names_of_buffers = [
                names for names, own in zip(states.groups, self.grouped, strict=False) if own == group
            ]
            names_of_group = tuple(name for names in names_of_buffers for name in names)
            contents.groups.append(ParameterGroup(files.settings(settings, self.place), names_of_group))


@dataclass(frozen=True)
class _Rank:
    """Buffers of one rank's file, by kind and number."""

    path: Path
    stage: int
    #: True if each parameter is sharded, as at stage 3; otherwise the buffer of a group is.
    partitioned: bool
    partitions: int
    buffers: Mapping[str, Sequence[TensorEntry]]
    #: Elements of padding after each parameter of each group; None without padding.
    paddings: Sequence[Sequence[int]] | None
    base: Base
    scale: Mapping[str, object]
    #: Summary that must be equal on all ranks: stage, states, numbers of buffers, step, and lengths.
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
        # Masters are stored without the padding at a group's end; optimizer states have it.
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
    """Return the numbers of a loss scaler's state."""
    state = scaler.state if isinstance(scaler, InertObject) and isinstance(scaler.state, dict) else {}
    return {str(key): value for key, value in state.items() if type(value) in (int, float)}


def _overlaps(starts: Sequence[int], at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and count of overlaps with [at, stop)."""
    for number, (low, high) in enumerate(pairwise(starts)):
        first, last = max(at, low), min(stop, high)
        if first < last:
            yield number, first - low, last - first


def _flat(states: ModelStates, ranks: Sequence[_Rank]) -> Iterator[tuple[str, tuple[int, ...], list[Run]]]:
    for group, shapes in enumerate(states.groups):
        # The concatenated parts of the ranks are the group's flat buffer. It holds the parameters in order,
        # each followed by its padding. A parameter may begin on one rank and end on the next.
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
        # Stage 3 gives each rank an equal part, rounded up; the last one is padded. `at` counts on one rank,
        # and is the same on all.
        stop = at - (-prod(shape) // len(ranks))
        parts = list(_overlaps(starts, at, stop))
        yield name, shape, [(rank, *part) for rank in range(len(ranks)) for part in parts]
        at = stop


#: DeepSpeed's names of the stages, by which Python 3.11.0 to 3.11.3 pickle them.
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def _number(value: object) -> int:
    """Return an integer, or that of an enum member."""
    if isinstance(value, InertObject) and value.arguments:
        value = value.arguments[-1]
        value = _STAGES.get(value, value) if isinstance(value, str) else value
    if type(value) is not int:
        raise CheckpointError(f"a {type(value).__name__} stands where a number is expected: {DAMAGED}")
    return value


_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
#: Files of models with parallelism other than data parallelism.
_PARALLEL = re.compile(r"layer_\d+.*|expp?_rank_.*|.*_expert_\d+_.*")
INSTEAD = "convert it with DeepSpeed's ds_to_universal.py, and load what that writes"
#: Saved counters of an engine.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class ModelStates:
    """Contents of model state files, and parameter shapes."""

    contents: TrainingContents
    #: Shapes of trained parameters, by their groups.
    groups: tuple[Mapping[str, tuple[int, ...]], ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}


def _add_whole(contents: TrainingContents, name: str, entry: TensorEntry) -> None:
    contents.add([entry])
    boxes = [(entry, (0,) * len(entry.shape))]
    contents.assembled[name] = from_boxes(name, entry.shape, entry.dtype, boxes)


def add_ties(contents: TrainingContents) -> TrainingContents:
    """Add tied parameters under all of their names."""
    for name, other in contents.ties.items():
        if other in contents.assembled:
            # A universal checkpoint has a rounded value under this name: replace it.
            contents.assembled[name] = replace(contents.assembled[other], name=name)
    return contents


def read_model_states(directory: Path, files: PartFiles) -> ModelStates:
    """Read the model state files. Raises CheckpointError.

    Fails if they are incomplete.
    """
    files_of_ranks = []
    for path in by_rank(directory, _MODEL):
        value, place = files.torch_file(path)
        if not isinstance(value, dict) or not isinstance(value.get("module"), dict):
            raise CheckpointError(f"{path}: not a file of model states: {DAMAGED}")
        _refuse_experts(value, path)
        files_of_ranks.append((value, place, path))
    value, place, path = files_of_ranks[0]
    for other, _, beside in files_of_ranks[1:]:
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
        # Whole parameters: an unnamed one is frozen, at stage 1. At stage 3 they are empty here.
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
        for rank, (state, place_of, _) in enumerate(files_of_ranks):
            fragment = (state.get("frozen_param_fragments") or {}).get(name)
            if type(fragment) is StoredTensor:
                parts.append(place_of(f"rank {rank}: frozen {name}", fragment))
        if not parts:
            raise CheckpointError(
                f"the frozen parameter {shown(name)} is in none of the files of model states: a file is "
                "missing, or files of two jobs are mixed"
            )
        if parts[0].shape == shape:  # whole on each rank
            _add_whole(contents, name, parts[0])
        else:
            contents.add(parts)
            runs = [(part, 0, part.numel) for part in parts]
            contents.assembled[name] = from_runs(name, shape, parts[0].dtype, runs)
    return ModelStates(contents, groups)


def by_rank(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of one kind in rank order.

    Raises CheckpointError if one is missing.
    """
    names = sorted(entry.name for entry in directory.iterdir())
    if cut := next((name for name in names if _PARALLEL.fullmatch(name)), None):
        raise CheckpointError(
            f"{directory / cut}: belongs to a model that is split into pipeline stages or experts; {INSTEAD}"
        )
    paths = {}
    for name in names:
        if match := pattern.fullmatch(name):
            if int(match["model"]):
                raise CheckpointError(
                    f"{directory / name}: belongs to a model with tensor parallelism; {INSTEAD}"
                )
            paths[int(match["rank"] or 0)] = directory / name
    missing = next((rank for rank in range(max(paths, default=0) + 1) if rank not in paths), None)
    if missing is not None:
        raise CheckpointError(
            f"{directory}: the file of rank {missing} is missing ({pattern.pattern}): copy the "
            "checkpoint again"
        )
    return [paths[rank] for rank in range(len(paths))]


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
    """Yield the items of a dictionary or pair list."""
    yield from value.items() if isinstance(value, dict) else value


class Universal(TrainingFormat):
    """Checkpoint of DeepSpeed's ds_to_universal.py."""

    name = "universal"

    def holds(self, directory: Path) -> bool:
        """Return True if a parameter folder has masters."""
        zero = directory / "zero"
        return zero.is_dir() and any((entry / f"{MASTERS}.pt").is_file() for entry in zero.iterdir())

    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """Read the folders of all parameters.

        ``files`` records each file. Raises CheckpointError for files that ds_to_universal.py does not
        write.
        """
        states = read_model_states(directory, files)
        contents, shapes = states.contents, states.shapes
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
                    contents.numbers.setdefault(kind, {})[name] = files.number(entry)
                else:
                    contents.add([entry])
                    contents.assembled[key] = _shaped(key, entry, shapes.get(name, entry.shape), path)
        absent = [name for name in shapes if name not in contents.assembled]
        if absent:
            raise CheckpointError(
                f"{directory / 'zero' / absent[0]} is missing, and {len(absent) - 1} more files are"
            )
        _add_groups(directory / "zero" / "optimizer_state.pt", states, contents, files)
        return add_ties(contents)


def _add_groups(path: Path, states: ModelStates, contents: TrainingContents, files: PartFiles) -> None:
    value, place = files.torch_file(path) if path.is_file() else (None, None)
    if not isinstance(value, dict) or place is None:
        return
    base = Base.of(value, place)
    base.describe(contents, states, files)
    groups = () if base.settings else value.get("param_groups") or ()
    for settings, shapes in zip(groups, states.groups, strict=False):
        if isinstance(settings, dict):
            plain_settings = {key: item for key, item in settings.items() if key != "params"}
            contents.groups.append(ParameterGroup(files.settings(plain_settings, place), tuple(shapes)))


def _shaped(key: str, entry: TensorEntry, shape: tuple[int, ...], path: Path) -> Assembled:
    if entry.shape in (shape, ()):
        return from_boxes(key, entry.shape, entry.dtype, [(entry, (0,) * len(entry.shape))])
    if entry.shape == (prod(shape),):
        return from_runs(key, shape, entry.dtype, [(entry, 0, entry.numel)])
    raise CheckpointError(
        f"{path}: the file has the shape {list(entry.shape)}, but the model has {list(shape)}; "
        "which of the file's elements belong to the model is unknown"
    )
