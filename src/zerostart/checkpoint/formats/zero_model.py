"""What DeepSpeed writes of a model beside its optimizer: names, shapes, frozen parameters, counters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.checkpoint.formats.found import Found, is_shape
from zerostart.checkpoint.formats.inert_pickle import StoredTensor
from zerostart.checkpoint.formats.parts import PartFiles, Placing
from zerostart.checkpoint.formats.shares import from_boxes, from_runs
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
#: What DeepSpeed writes of models that are cut otherwise than by data parallelism.
_CUT = re.compile(r"layer_\d+.*|expp?_rank_.*|.*_expert_\d+_.*")
INSTEAD = "convert it with DeepSpeed's ds_to_universal.py, and load what that writes"
#: The counters of an engine that are saved.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


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
    counters: Mapping[str, Any]
    schedule: dict[str, Any] | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all trained parameters."""
        return {name: shape for group in self.groups for name, shape in group.items()}

    def begun(self) -> Found:
        """What there is beside the trained parameters: frozen ones and buffers, counters.

        Raises CheckpointError where a part of one is not there.
        """
        found = Found(engine=dict(self.counters), schedule=self.schedule, ties=dict(self.shared))
        found.add(self.plain.values())
        for name, entry in self.plain.items():
            found.assembled[name] = from_boxes(
                name, entry.shape, entry.dtype, [(entry, (0,) * len(entry.shape))]
            )
        for name, shape in self.frozen.items():
            parts = [fragments[name] for fragments in self.fragments if name in fragments]
            if not parts:
                raise CheckpointError(
                    f"the frozen parameter {shown(name)} is in no file of the model's states"
                )
            found.add(parts)
            if parts[0].shape == shape:  # whole on every rank
                found.assembled[name] = from_boxes(
                    name, shape, parts[0].dtype, [(parts[0], (0,) * len(shape))]
                )
            else:
                runs = [(part, 0, part.numel) for part in parts]
                found.assembled[name] = from_runs(name, shape, parts[0].dtype, runs)
        return found

    def ended(self, found: Found) -> Found:
        """``found`` with tied parameters under all of their names."""
        for name, other in self.shared.items():
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
                f"{beside} and {path} say different global_steps: files of two moments are mixed; take a "
                "checkpoint that is whole"
            )
    module, shapes = value["module"], value.get("param_shapes")
    if type(shapes) is not list:
        raise CheckpointError(f"{path}: does not say which parameters it has (param_shapes); {INSTEAD}")
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
    return ModelStates(
        groups=groups,
        frozen=frozen,
        fragments=tuple(
            _placed(v.get("frozen_param_fragments") or {}, p, f"rank {r}: frozen ")
            for r, (v, p, _) in enumerate(found)
        ),
        plain=_placed({name: t for name, t in module.items() if name in plain}, place, "whole "),
        shared=tied,
        counters={name: value[name] for name in _COUNTERS if type(value.get(name)) is int},
        schedule=value["lr_scheduler"] if isinstance(value.get("lr_scheduler"), dict) else None,
    )


def by_rank(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of one kind in the order of the ranks; raises CheckpointError where one is missing."""
    names = sorted(entry.name for entry in directory.iterdir())
    if cut := next((name for name in names if _CUT.fullmatch(name)), None):
        raise CheckpointError(f"{directory / cut}: of a model that is cut in stages or experts; {INSTEAD}")
    found = {}
    for name in names:
        if match := pattern.fullmatch(name):
            if int(match["model"]):
                raise CheckpointError(f"{directory / name}: of a model with tensor parallelism; {INSTEAD}")
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
        raise CheckpointError(f"{path}: experts are cut over ranks (AutoEP); {INSTEAD}")


def _shapes(group: Any) -> dict[str, tuple[int, ...]]:
    pairs = list(_pairs(group))
    for name, shape in pairs:
        if type(name) is not str:
            raise CheckpointError(f"the name of a parameter is a {type(name).__name__}: {DAMAGED}")
        if not is_shape(shape):
            raise CheckpointError(f"the shape of parameter {shown(name)} is none: {DAMAGED}")
    return dict(pairs)


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    """Items of a dictionary, or of a list of pairs, which older versions write."""
    yield from value.items() if isinstance(value, dict) else value


def _placed(tensors: Mapping[str, Any], place: Placing, prefix: str) -> dict[str, TensorEntry]:
    return {
        str(name): place(f"{prefix}{name}", tensor)
        for name, tensor in tensors.items()
        if type(tensor) is StoredTensor
    }
