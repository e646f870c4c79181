"""What a checkpoint of any kind holds, in one form: weights, and what an optimizer keeps for them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.formats.assembling import ParameterGroup
from zerostart.checkpoint.formats.saved_state import is_state_alone, open_saved_state
from zerostart.checkpoint.formats.training import training_states
from zerostart.checkpoint.manifest import STATE_MARKER
from zerostart.checkpoint.paths import inside, located, shown_url
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import storage_at
from zerostart.errors import CheckpointNotFoundError, ConfigError, WriteError
from zerostart.geometry import Piece
from zerostart.state.resuming.document import plain_settings, read_document
from zerostart.state.resuming.retention import complete
from zerostart.state.resuming.training_state import MODEL, STATE
from zerostart.state.resuming.values import decoded

#: What the Trainer calls the checkpoints of a run.
_STEP = re.compile(r"checkpoint-(\d+)")
#: What of a training state an optimizer's masters and states begin with.
_MASTER, _OPTIMIZER = "master", "optimizer"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint: how it is stored, and where its elements lie in which catalog."""

    name: str
    #: In safetensors' spelling.
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    #: Number of the catalog among those of the contents.
    catalog: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass
class Contents:
    """A checkpoint, whoever wrote it."""

    #: Of the weights, and of what an optimizer keeps.
    catalogs: tuple[Catalog, ...]
    weights: dict[str, Stored]
    #: fp32 copies of weights that an optimizer steps, where they are stored beside.
    masters: dict[str, Stored] = field(default_factory=dict)
    #: Tensors that an optimizer keeps, by key (``exp_avg``) and parameter.
    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    #: Numbers that it keeps, the same way.
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)
    #: Other names of weights.
    ties: dict[str, str] = field(default_factory=dict)
    #: Those of the weights that are buffers; None where nothing says so.
    buffers: frozenset[str] | None = None
    #: The dtype in which the model computes, where that is not the one of the weights here; else empty.
    computing: str = ""
    #: The loss scale that the run has come to; None where it has none, or nothing says so.
    scale: float | None = None
    #: Counters of the run.
    counters: dict[str, int] = field(default_factory=dict)
    #: State of the schedule of learning rates.
    schedule: dict[str, Any] | None = None
    #: What the checkpoint has beside, which no other format holds.
    others: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        """The directory with the configuration of the model; empty for none."""
        return self.catalogs[0].root

    def best(self, name: str) -> Stored:
        """The master of a weight, or the weight itself."""
        return self.masters.get(name) or self.weights[name]


def opened(source: str | os.PathLike[str], weights_alone: bool = False) -> Contents:
    """What lies at ``source``: anything that ``open_catalog`` takes, or the directory of a run.

    Of a run's directory the newest complete checkpoint is meant where no model lies in it. With
    ``weights_alone`` nothing of an optimizer is opened. Raises what opening a source raises, and ConfigError
    for a training state without the weights that were frozen.
    """
    place, catalog = _located(source)
    weights = {
        name: Stored(name, tensor.dtype, tensor.shape, tensor.pieces)
        for name, tensor in catalog.weights.items()
    }
    contents = Contents((catalog,), weights)
    state = _state_of(place, catalog)
    if state is not None:
        if open_saved_state(state, ())[0].get("left_out"):
            raise ConfigError(
                f"{shown_url(str(state))} holds only the trained tensors, not the whole model: export the "
                "output directory of its run instead, or a LoRA with --adapter-format"
            )
        if not weights_alone:
            _add_state(contents, state)
    elif catalog.assembled is not None and not weights_alone:
        _add_foreign(contents, Path(place))
    return contents


def _state_of(place: Path | str, catalog: Catalog) -> Path | str | None:
    """The training state of ours whose model ``catalog`` is; None for another one."""
    if isinstance(place, str):
        storage = storage_at(place)
        return place if storage is not None and is_state_alone(storage) else None
    root = Path(catalog.root or ".")
    return root.parent if root.name == MODEL and (root.parent / STATE_MARKER).is_file() else None


def _located(source: str | os.PathLike[str]) -> tuple[Path | str, Catalog]:
    """The place and the catalog of ``source``, or of the newest complete checkpoint of the run that it is."""
    place = located(source)
    try:
        return place, open_catalog(source)
    except CheckpointNotFoundError:
        folders = [place, inside(place, "checkpoints")]
        states = list[Path | str]()
        with contextlib.suppress(ConfigError, WriteError):  # of a server that lists nothing
            states = [state for folder in folders for state in complete(folder)]
        steps = {}
        if isinstance(place, Path):
            steps = {int(m[1]): entry for entry in place.glob("*") if (m := _STEP.fullmatch(entry.name))}
        if not states and not steps:
            raise
        newest = states[-1] if states else steps[max(steps)]
        return newest, open_catalog(newest)


def _add_foreign(contents: Contents, place: Path) -> None:
    """Add what DeepSpeed, torch or accelerate keep of an optimizer."""
    read = training_states(place)
    if read is None:  # shares of ranks that are no training checkpoint
        return
    found, model, state = read
    contents.catalogs = (model, state)
    contents.weights = {n: Stored(n, t.dtype, t.shape, t.pieces) for n, t in model.weights.items()}
    _add_states(contents, state, 1)
    contents.numbers = found.numbers
    contents.groups = [replace(group, settings=plain_settings(group.settings)) for group in found.groups]
    contents.ties, contents.buffers = found.ties, found.buffers
    contents.computing = found.computing
    contents.scale = _scale(found.engine.get("scale"))
    contents.counters = {key: value for key, value in found.engine.items() if type(value) is int}
    contents.counters.pop("stage", None)
    contents.schedule = None if found.schedule is None else plain_settings(found.schedule)


def _add_state(contents: Contents, place: Path | str) -> None:
    """Add what a training state of ours has."""
    document, (_, state) = open_saved_state(place, (MODEL, STATE), read_document)
    contents.catalogs = (contents.catalogs[0], state)
    _add_states(contents, state, 1)
    described: Mapping[str, Any] = document["optimizer"]
    for key, values in described.get("numbers", {}).items():
        for value, names in values:
            number = decoded(value, {})
            number = number.item() if isinstance(number, torch.Tensor) else number
            contents.numbers.setdefault(key, {}).update(dict.fromkeys(names, float(number)))
    contents.groups = [
        ParameterGroup(
            {key: decoded(value, {}) for key, value in group["settings"].items()}, tuple(group["parameters"])
        )
        for group in described.get("groups", ())
    ]
    contents.ties = dict(document["ties"])
    engine: Mapping[str, Any] = document["engine"]
    contents.counters = {key: value for key, value in engine.items() if type(value) is int}
    contents.scale = _scale(engine.get("scale"))
    kinds = {name.partition("/")[0].partition(".")[0] for name in state.weights} - {_MASTER, _OPTIMIZER}
    kept = [key for key in ("extra", "modules", "around") if document.get(key)]
    # The schedule and the like, which are in the words of whoever has made them.
    kept += [key for key, value in engine.items() if isinstance(value, dict)]
    kept += ["own"] if described.get("own") else []
    contents.others = tuple(dict.fromkeys((*sorted(kinds), *kept)))


def _scale(value: object) -> float | None:
    """The loss scale out of the state of what scales, which may be none."""
    scale = value.get("cur_scale") if isinstance(value, dict) else None
    return float(scale) if isinstance(scale, int | float) else None


def _add_states(contents: Contents, state: Catalog, number: int) -> None:
    for path, tensor in state.weights.items():
        kind, _, rest = path.partition("/")
        key, _, name = rest.partition("/")
        if kind == _MASTER:
            contents.masters[rest] = Stored(rest, tensor.dtype, tensor.shape, tensor.pieces, number)
        elif kind == _OPTIMIZER and name:
            stored = Stored(path, tensor.dtype, tensor.shape, tensor.pieces, number)
            contents.states.setdefault(key, {})[name] = stored


def once(weights: Mapping[str, Stored], catalog: Catalog, tied: bool) -> dict[str, Stored]:
    """The weights, of one that has several names the first, where the model ties them itself."""
    if not tied or catalog.assembled is None:
        # In ordinary files each name is one that somebody wrote.
        return dict(weights)
    seen: set[object] = set()
    out = {}
    for name, tensor in weights.items():
        # In shares of ranks what lies at the same places of the same files is the same tensor.
        key = tuple(_places(tensor, catalog.tensors)), tensor.shape
        if key not in seen or not tensor.numel:  # which lies nowhere
            seen.add(key)
            out[name] = tensor
    return out


def _places(tensor: Stored, stored: Mapping[str, TensorEntry]) -> Iterator[object]:
    for piece in tensor.pieces:
        where = [(e.file, e.offset, e.dtype, e.strides) for s in piece.source if (e := stored.get(str(s)))]
        yield piece.origin, piece.axes, tuple(where), piece.unit, piece.offset
