"""DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its states."""

from __future__ import annotations

from math import prod
from pathlib import Path

from zerostart.checkpoint.catalog import Assembled, TensorEntry
from zerostart.checkpoint.formats.assembling import (
    STATE,
    ParameterGroup,
    TrainingContents,
    from_boxes,
    from_runs,
)
from zerostart.checkpoint.formats.inert_pickle import StoredTensor
from zerostart.checkpoint.formats.training import PartFiles, TrainingFormat
from zerostart.checkpoint.formats.zero import MASTERS, Base, ModelStates, read_model_states
from zerostart.checkpoint.strict_json import DAMAGED
from zerostart.errors import CheckpointError


class Universal(TrainingFormat):
    """What DeepSpeed's ds_to_universal.py writes."""

    name = "universal"

    def holds(self, directory: Path) -> bool:
        """Whether a parameter has a folder with its masters."""
        zero = directory / "zero"
        return zero.is_dir() and any((entry / f"{MASTERS}.pt").is_file() for entry in zero.iterdir())

    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """The folders of all parameters."""
        return _read(directory, files)


def _read(directory: Path, files: PartFiles) -> TrainingContents:
    """What the folders of all parameters hold; ``files`` takes what is read.

    Raises CheckpointError for files that are not as ds_to_universal.py writes them.
    """
    states = read_model_states(directory, files)
    found, shapes = states.begun(), states.shapes
    for folder in sorted(entry for entry in (directory / "zero").iterdir() if entry.is_dir()):
        name = folder.name
        for path in sorted(folder.glob("*.pt")):
            kind = path.stem
            value, place = files.torch_file(path)
            tensor = value.get("param") if isinstance(value, dict) else value
            if type(tensor) is not StoredTensor:
                raise CheckpointError(f"{path}: holds no tensor: {DAMAGED}")
            key = name if kind == MASTERS else f"{kind}{STATE}{name}"
            files.record = key
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
    return states.ended(found)


def _add_groups(path: Path, states: ModelStates, found: TrainingContents, files: PartFiles) -> None:
    """The settings of the parameter groups, which one file has for all; at stage 3 numbers of theirs, too."""
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
    """The state of a parameter of ``shape``: as it is, or as one row, which stage 3 leaves, or a number."""
    if entry.shape in (shape, ()):
        return from_boxes(key, entry.shape, entry.dtype, [(entry, (0,) * len(entry.shape))])
    if entry.shape == (prod(shape),):
        return from_runs(key, shape, entry.dtype, [(entry, 0, entry.numel)])
    raise CheckpointError(
        f"{path}: the file has the shape {list(entry.shape)}, but the model has {list(shape)}; "
        "which of the file's elements belong to the model is unknown"
    )
