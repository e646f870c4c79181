"""Checkpoints of DeepSpeed's ZeRO: flat buffers of ranks, as engines of stages 1 to 3 save them.

Source: ``state_dict`` of ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``, ``_common_checkpoint_state`` of
``runtime/engine.py`` and ``utils/zero_to_fp32.py`` (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from zerostart.checkpoint.write.images import Image, Room, Run, archived
from zerostart.errors import ConfigError
from zerostart.geometry.layout.flat import FlatRules
from zerostart.recipe.dtypes import torch_dtype
from zerostart.state.converting.contents import Contents, Stored
from zerostart.state.converting.models import ModelForm, as_model, numbers_of, state_keys
from zerostart.state.converting.targets import (
    Options,
    Target,
    TargetFormat,
    kept_torch_dtype,
    others_left_out,
)
from zerostart.upstream.deepspeed import checkpoints as deepspeed

#: Elements of a rank's part of a group of stage 3 from which on a new sub-group begins: DeepSpeed's default.
SUB_GROUP = 1_000_000_000
#: Masters and states of an optimizer are in this dtype, and have so many bytes an element.
KEPT, WIDTH = torch.float32, 4
#: What a state or a master is asked for by: None for the master.
Key = str | None
#: What of which parameters lies in a buffer: the name, its first element there, the place, and how many.
Places = Sequence[tuple[str, int, int, int]]


class Zero(TargetFormat):
    """What ``load_checkpoint`` of a DeepSpeed engine and ``zero_to_fp32.py`` open."""

    name = "zero"

    def target(self, contents: Contents, options: Options, scratch: Path) -> Target:
        """A directory for the step, with the files of each rank, and ``latest``, which names it."""
        check(options)
        form = as_model(contents)
        target = Target(left_out=others_left_out(contents))
        target.dequantised, target.settings = form.dequantised, form.settings
        return _Checkpoint(form, options, scratch, target).target()


@dataclass(frozen=True, slots=True)
class Partitioning:
    """What a stage means for files: of stage 1 those of stage 2, but for what is frozen."""

    #: Whether weights lie in parts on the ranks.
    weights: bool
    #: Whether frozen parameters are listed.
    frozen: bool


_BY_STAGE = {1: Partitioning(False, False), 2: Partitioning(False, True), 3: Partitioning(True, True)}


def partitioning(options: Options) -> Partitioning:
    """That of the stage. Raises ConfigError for one that is none."""
    found = _BY_STAGE.get(options.zero_stage)
    if found is None:
        raise ConfigError(f"zero_stage={options.zero_stage} is not 1, 2 or 3")
    return found


def check(options: Options) -> None:
    """Raise ConfigError for a stage or a number of ranks that is none."""
    partitioning(options)
    if options.world_size < 1:
        raise ConfigError(f"world_size={options.world_size} is not a number of ranks")


def tag_of(contents: Contents) -> str:
    """What DeepSpeed calls the directory of a checkpoint."""
    return f"global_step{contents.counters.get('global_steps', 0)}"


class _Checkpoint:
    def __init__(self, form: ModelForm, options: Options, scratch: Path, target: Target) -> None:
        self._form, self._options, self._scratch, self._target = form, options, scratch, target
        self._world, self._parted = options.world_size, partitioning(options).weights
        self._keys, left = state_keys(form)
        self._target.left_out += left
        self._numbers: dict[tuple[str, Key], int] = {}

    def target(self) -> Target:
        tag, target = tag_of(self._form.contents), self._target
        weights = model_states(self._form, self._options, target)
        ranks = range(self._world) if self._parted else [0]
        for rank in ranks:
            prefix = f"zero_pp_rank_{rank}_" if self._parted else ""
            self._add(f"{tag}/{prefix}mp_rank_00_model_states.pt", weights(rank))
        # DeepSpeed looks for this name, and for no other, where its engine computes in bf16.
        kind = "bf16_" if stepped_dtype(self._form, self._options) == torch.bfloat16 else ""
        states = self._partitioned if self._parted else self._flat
        for rank in range(self._world):
            value = {"optimizer_state_dict": states(rank), "ds_config": {}, "ds_version": deepspeed.version()}
            self._add(f"{tag}/{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", value)
        script = deepspeed.recovery_script()
        target.images.append(Image("zero_to_fp32.py", len(script), ((0, script),)))
        target.images.append(Image("latest", len(tag), ((0, tag.encode()),)))
        target.tensors = len(self._form.trained) * (1 + len(self._keys))
        target.nbytes = sum(row.count * row.dtype.itemsize for image in target.images for row in image.rows)
        return target

    def _add(self, name: str, value: object) -> None:
        self._target.images.append(archived(name, value, self._scratch))

    def _source(self, name: str, key: Key) -> int | None:
        """The number of a master, or of a state; None where the parameter has none."""
        contents = self._form.contents
        stored = contents.best(name) if key is None else contents.states[key].get(name)
        if stored is None:
            return None
        if (name, key) not in self._numbers:
            self._numbers[name, key] = self._target.source(stored)
        return self._numbers[name, key]

    def _flat(self, rank: int) -> dict[str, Any]:
        """Stages 1 and 2: of each group a part of its one buffer, in which parameters follow each other."""
        buffers: list[Room] = []
        state: dict[int, dict[str, Any]] = {}
        slices, paddings = [], []
        for number, group in enumerate(self._form.groups):
            weights = self._form.contents.weights
            numels = [weights[name].numel for name in group.parameters]
            flat = FlatRules(self._world).group(numels, WIDTH)
            size = flat.numel // self._world
            low, high = rank * size, (rank + 1) * size
            # What of this rank's part lies behind the last parameter.
            padding = min(size, max(0, high - sum(numels)))
            places = [
                (name, max(at, low) - at, max(at, low) - low, min(at + numel, high) - max(at, low))
                for name, at, numel in zip(group.parameters, flat.offsets, numels, strict=True)
                if max(at, low) < min(at + numel, high)
            ]
            buffers.append(self._buffer(None, size - padding, places))
            slices.append(OrderedDict((n, deepspeed.slice_of(to, count)) for n, _, to, count in places))
            paddings.append(padding)
            if held := self._held(group.parameters, size, places):
                state[number] = held
        groups = [{**group.settings, "params": [number]} for number, group in enumerate(self._form.groups)]
        return {
            "base_optimizer_state": {"state": state, "param_groups": self._kept(groups, state)},
            "single_partition_of_fp32_groups": buffers,
            "zero_stage": deepspeed.stage_of(self._options.zero_stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group.parameters) for group in self._form.groups],
            "partition_count": [self._world] * len(self._form.groups),
            "ds_version": deepspeed.version(),
            "param_slice_mappings": slices,
        }

    def _partitioned(self, rank: int) -> dict[str, Any]:
        """Stage 3: an equal part of each parameter, the last one padded, in buffers of its sub-group."""
        buffers: list[Room] = []
        state: dict[int, dict[str, Any]] = {}
        groups = []
        weights = self._form.contents.weights
        for group in self._form.groups:
            members = []
            for names in sub_groups([(name, weights[name].numel) for name in group.parameters], self._world):
                places, end = [], 0
                for name in names:
                    numel = weights[name].numel
                    part = -(-numel // self._world)
                    count = max(0, min(part, numel - rank * part))
                    if count:
                        places.append((name, rank * part, end, count))
                    end += part
                members.append(len(buffers))
                buffers.append(self._buffer(None, end, places))
                if held := self._held(names, end, places):
                    state[len(buffers) - 1] = held
            groups.append({**group.settings, "params": members})
        return {
            "zero_stage": deepspeed.stage_of(3),
            **deepspeed.scaling(stepped_dtype(self._form, self._options), self._form.contents.scale),
            "partition_count": self._world,
            "optimizer_state_dict": {"state": state, "param_groups": self._kept(groups, state)},
            "fp32_flat_groups": buffers,
        }

    def _kept(self, groups: list[dict[str, Any]], state: object) -> list[dict[str, Any]]:
        """The parameter groups of an optimizer; of weights alone there is none."""
        return groups if state or any(group.settings for group in self._form.groups) else []

    def _held(self, names: Sequence[str], count: int, places: Places) -> dict[str, Any]:
        """The optimizer's state of one buffer: numbers, and tensors that lie as it does."""
        states = self._form.contents.states
        keys = [key for key in self._keys if any(name in states[key] for name in names)]
        tensors = {key: self._buffer(key, count, places) for key in keys}
        return {**numbers_of(self._form, names), **tensors}

    def _buffer(self, key: Key, count: int, places: Places) -> Room:
        """A buffer of ``count`` elements."""
        runs = []
        for name, first, at, numel in places:
            source = self._source(name, key)
            if source is not None:
                runs.append(Run(source, first, numel, at))
        return Room(KEPT, (count,), tuple(runs))


def sub_groups(parameters: Sequence[tuple[str, int]], world: int) -> list[list[str]]:
    """The sub-groups of a group of stage 3, whose parameters have so many elements."""
    parts = [-(-numel // world) for _, numel in parameters]
    if sum(parts) <= SUB_GROUP:
        return [[name for name, _ in parameters]]
    found: list[list[str]] = [[]]
    filled = 0
    for (name, _), part in zip(parameters, parts, strict=True):
        if filled >= SUB_GROUP:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += part
    return found


def stepped_dtype(form: ModelForm, options: Options) -> torch.dtype:
    """The dtype in which the engine computes: the one asked for, that of the run, or of the first weight."""
    if options.dtype is not None or form.contents.computing:
        return options.dtype or torch_dtype(form.contents.computing)
    first = next(iter(form.trained.values()), None)
    return KEPT if first is None else torch_dtype(first.dtype, first.name)


def model_states(form: ModelForm, options: Options, target: Target) -> Callable[[int], dict[str, Any]]:
    """What the file of model states of a rank holds; of stages 1 and 2 there is one, with all weights."""
    contents, world, partitioned = form.contents, options.world_size, partitioning(options).weights
    weights = contents.weights
    sources = {name: target.source(weights[name]) for name in (*form.frozen, *form.buffers)}
    whole = {} if partitioned else {name: target.source(stored) for name, stored in form.trained.items()}

    def room(name: str, number: int, dtype: torch.dtype | None) -> Room:
        stored = weights[name]
        return Room(dtype or torch_dtype(stored.dtype), stored.shape, (Run(number, 0, stored.numel),))

    def fragment(name: str, rank: int, dtype: torch.dtype) -> Room:
        numel = weights[name].numel
        part = -(-numel // world)
        count = max(0, min(part, numel - rank * part))
        return Room(dtype, (part,), (Run(sources[name], rank * part, count),))

    def dtype_of(stored: Stored) -> torch.dtype:
        if stored.name in form.frozen:
            return kept_torch_dtype(stored, options.dtype)
        return kept_torch_dtype(stored, options.dtype or stepped_dtype(form, options))

    def states(rank: int) -> dict[str, Any]:
        module: OrderedDict[str, Any] = OrderedDict(
            (name, room(name, sources[name], None)) for name in form.buffers
        )
        for name, stored in {**form.trained, **form.frozen}.items():
            if partitioned:
                module[name] = torch.empty(0, dtype=dtype_of(stored), device="cpu")
            else:
                module[name] = room(name, whole.get(name, sources.get(name, -1)), dtype_of(stored))
        for name, other in form.ties.items():
            if other in module:
                module[name] = module[other]
        shapes = [
            OrderedDict((name, torch.Size(weights[name].shape)) for name in group.parameters)
            for group in shape_groups(form, options)
        ]
        frozen = OrderedDict((name, torch.Size(stored.shape)) for name, stored in form.frozen.items())
        fragments = OrderedDict(
            (name, fragment(name, rank, dtype_of(stored)) if partitioned else module[name])
            for name, stored in form.frozen.items()
        )
        saved = partitioning(options).frozen
        return {
            "module": module,
            "buffer_names": list(form.buffers),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": frozen if saved else None,
            "shared_params": dict(form.ties),
            "frozen_param_fragments": fragments if saved else None,
            "lr_scheduler": contents.schedule,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": contents.counters.get("skipped_steps", 0),
            "global_steps": contents.counters.get("global_steps", 0),
            "global_samples": contents.counters.get("global_samples", 0),
            "dp_world_size": world,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": deepspeed.version(),
        }

    return states


def shape_groups(form: ModelForm, options: Options) -> list[Any]:
    """The parameters of each buffer, as groups: of stage 3 the sub-groups."""
    if not partitioning(options).weights:
        return list(form.groups)
    from zerostart.checkpoint.formats.assembling import ParameterGroup

    weights = form.contents.weights
    return [
        ParameterGroup(group.settings, tuple(names))
        for group in form.groups
        for names in sub_groups([(n, prod(weights[n].shape)) for n in group.parameters], options.world_size)
    ]
