"""``zerostart.load_state``: a load of a training checkpoint into the layouts that the engine has now."""

from __future__ import annotations

import logging
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.saved_state import (
    is_stored_state,
    open_saved_state,
    state_in,
    tell_of_newer,
)
from zerostart.checkpoint.formats.training import TrainingContents, training_states
from zerostart.checkpoint.manifest import check_seal
from zerostart.checkpoint.paths import shown_url
from zerostart.checkpoint.storage import storage_at
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, read_json
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard, plain_name, whole_shard
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CoverageError
from zerostart.geometry.layout import Layout, dimension_shard, replicated
from zerostart.live.model import LiveModel
from zerostart.live.training import LiveTraining, StateTensor
from zerostart.loading.source import open_source
from zerostart.recipe import Recipe, Target
from zerostart.state.resuming.background import finish_last
from zerostart.state.resuming.optimizer import (
    LOCAL,
    check_local,
    check_rule,
    check_saveable,
    optimizers_of,
    restore_groups,
    restored_local,
    restored_moments,
)
from zerostart.state.resuming.training_state import (
    FORMAT,
    MARKER,
    MODEL,
    STATE,
    check_restorable,
    random_rows,
    set_random_rows,
)
from zerostart.state.resuming.values import decoded, dtype_of, encoded
from zerostart.state.saving.writing import agreed_place
from zerostart.transfer import Progress, Tuning
from zerostart.transfer.collective import execute_together
from zerostart.transfer.planning import Destination, Plan, join
from zerostart.transfer.tuning import tune

logger = logging.getLogger("zerostart")

#: A tensor of the checkpoint, and where this rank's share of it goes: the name, the layout, 1-D storage.
_Wanted = tuple[str, Layout, torch.Tensor]
#: What tensors of the state are kept for, in the first part of their names; other ones are whole.
_OF_PARAMETERS = frozenset({"master", "optimizer", "gradient", "random", LOCAL})
#: accelerate's and the Trainer's files of an optimizer that one rank has gathered.
_WHOLE_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")


#: Entries of a document and of its entry ``optimizer``, and the types that they have.
_FIELDS = {
    "world_size": int,
    "ties": dict,
    "left_out": list,
    "optimizer": dict,
    "engine": dict,
    "extra": object,
}
_OPTIMIZER = {"class": str, "numbers": dict, "groups": list}
#: Entries that a document may lack.
_OPTIONAL = {"modules": dict, "beside": list, "around": dict}


def read_document(state: Path) -> dict[str, object]:
    """The document of the training state in a directory.

    Raises ReadError, and CheckpointError for a damaged one.
    """
    path = state / MARKER
    document = read_json(path, "training state", MAX_DOCUMENT_BYTES)
    version = document.get("format")
    if type(version) is not int or version > FORMAT:
        raise CheckpointError(
            f"{path} has the format {version!r}, and this zerostart knows formats up to {FORMAT}; update "
            "zerostart"
        )
    check_seal(document, path)
    optional = {name: kind for name, kind in _OPTIONAL.items() if name in document}
    _check_fields(path, document, {**_FIELDS, **optional}, "")
    if document["optimizer"]:
        _check_fields(path, document["optimizer"], _OPTIMIZER, "optimizer.")
    return document


def _check_fields(path: Path, found: Mapping[str, object], fields: Mapping[str, type], where: str) -> None:
    for name, kind in fields.items():
        if name not in found or not isinstance(found[name], kind):
            what = "no" if name not in found else "another kind of"
            raise CheckpointError(
                f"{path} has {what} entry {where}{name}: it is damaged, or is not the document of a "
                "training state; use another checkpoint"
            )


# Training states that others wrote, in the words of our own.

#: The world size in their documents: it is of no use, as random states of ranks are not there.
OTHERS = 0
#: Settings of a parameter group that JSON can hold.
_SIMPLE = (bool, int, float, str, type(None))


def foreign_state(place: Path) -> tuple[dict[str, object], Catalog, Catalog] | None:
    """The document and the catalogs of a state of DeepSpeed's, torch's or accelerate's.

    It has what these save of a model and its optimizer; random states, schedules and the positions in the
    data are left to who saved them. None where ``place`` is no such directory.
    """
    if not place.is_dir() or (read := training_states(place)) is None:
        return None
    found, model, state = read
    return _document(found), model, state


def _document(found: TrainingContents) -> dict[str, object]:
    engine: dict[str, object] = {"name": "deepspeed", **found.engine} if found.engine else {"name": "torch"}
    if found.schedule is not None:
        engine["schedule"] = _encoded(found.schedule)
    return {
        "format": 1,
        "world_size": OTHERS,
        "ties": found.ties,
        "left_out": [],
        "optimizer": {
            "class": "",
            "numbers": {
                key: [[value, [name]] for name, value in by_name.items()]
                for key, by_name in found.numbers.items()
            },
            "groups": [
                {"settings": _encoded(group.settings), "parameters": list(group.parameters)}
                for group in found.groups
            ],
        }
        if found.groups
        else {},
        "engine": engine,
        "extra": None,
    }


def _encoded(values: Mapping[Any, Any]) -> dict[str, object]:
    """Encode the settings that are numbers, words, or tuples and lists of these."""
    return {
        str(key): encoded(value, key, {})
        for key, value in values.items()
        if type(value) in _SIMPLE
        or (type(value) in (tuple, list) and all(type(item) in _SIMPLE for item in value))
    }


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its document, and the catalogs of its two folders."""

    path: Path | str
    document: JsonObject
    model: Catalog
    state: Catalog

    @property
    def stored(self) -> dict[str, str]:
        """The dtype of each tensor, those of the model as ``model/NAME``."""
        found = {name: entry.dtype for name, entry in self.state.weights.items()}
        return found | {f"{MODEL}/{name}": entry.dtype for name, entry in self.model.weights.items()}


def opened(path: Path | str, world: World) -> Saved:
    """The training state at ``path``, which rank 0 finds, on every rank; collective.

    Raises CheckpointNotFoundError where there is none, and CheckpointError for a damaged one.
    """
    found = world.broadcast_object(lambda: _described(path), "reading the checkpoint's document")
    return replace(found, model=open_source(found.model, world), state=open_source(found.state, world))


def _described(path: Path | str) -> Saved:
    """Open the training state at ``path``, ours first, then one of another library."""
    if isinstance(path, str):
        storage = storage_at(path)
        assert storage is not None, "it is a URL"
        if not is_stored_state(storage):
            raise CheckpointNotFoundError(
                f"{shown_url(path)} is not a complete training state: {MARKER}, which zerostart.save_state "
                "writes last, is missing. A checkpoint of another library is not read at a URL: copy its "
                "directory to this machine first"
            )
        own: Path | str = path
    else:
        found = state_in(path)
        if found is None:
            return _foreign(path)
        tell_of_newer(path, found)
        own = found
    document, (weights, state) = open_saved_state(own, (MODEL, STATE), read_document)
    return Saved(own, document, weights, state)


def _foreign(path: Path) -> Saved:
    """Open what DeepSpeed, torch or accelerate saved in ``path``."""
    if (found := foreign_state(path)) is not None:
        return Saved(path, *found)
    for name in _WHOLE_OPTIMIZERS:
        if (path / name).is_file():
            raise CheckpointNotFoundError(
                f"{path / name} has the optimizer of all ranks in one pickle, which cannot be read in "
                "parts: resume it once with the library that saved it, and save again with "
                "zerostart.save_state, or with accelerate and fsdp_state_dict_type: "
                "SHARDED_STATE_DICT; zerostart.load can load the weights alone"
            )
    raise CheckpointNotFoundError(
        f"{path} is not a complete training state: {MARKER}, which zerostart.save_state writes last, is "
        "missing"
    )


def restore_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    beside: Sequence[StateTensor] = (),
    stepped: bool = True,
    counters: bool = True,
) -> Any:
    """See ``zerostart.load_state``, which raises what this raises.

    ``beside`` are tensors that were kept for parameters, to be filled; raises CheckpointError where one was
    not saved. Without ``stepped`` an engine's masters come with the weights, and what the optimizer keeps for
    them, gradients and random states stay as they are; without ``counters`` what the engine counts does.
    """
    world = current_world()
    with world.phase("restoring the training state"):
        place = agreed_place(path, world, "restoring from")
        # A save in the background that goes to this very place has to be there before it is read.
        finish_last(world, place)
        saved = opened(place, world)
        with world.phase("looking at what is restored"):
            training = LiveTraining(model, optimizer, world)
            # From here on steps of the optimizer are noted, so that a save right after this knows where its
            # window stands.
            training.state.watch()
            check_restorable(training)
            _check_names(training, saved)
            if stepped:
                _check_optimizers(training, saved, world)
            wanted = [*_parameters(training, saved, world), *_beside(beside, saved)]
        # Room only; both are filled by the same reads as everything else.
        extra, rows = _extra(saved), _random_rows(saved) if stepped else {}
        # From here on the optimizer is changed: what could be refused has been.
        with torch.no_grad(), world.phase("planning what is restored"):
            wanted += _masters(training, saved)
            if stepped:
                wanted += _moments(training, saved, world)
            wanted += [(name, replicated(tensor.shape), tensor.view(-1)) for name, tensor in extra.items()]
            wanted += [(name, _row(saved, name, world), row) for name, row in rows.items()]
            plans = [
                planned_reads(saved.model, _of(MODEL, wanted)),
                planned_reads(saved.state, _of("", wanted)),
            ]
        with torch.no_grad():
            # Collective, the model first: its plan and that of the state are of other files.
            for plan, storages, tuning in plans:
                execute_together(plan, storages, Progress(plan.read_bytes, False), tuning, world)
            training.drop_gathered()
        # Random states come last: nothing after them may draw.
        with world.phase("restoring counters and random states"):
            if counters:
                _restore_engine(training, saved, extra, stepped)
            _restore_around(training, saved, extra)
            _restore_modules(training, saved, extra)
            _restore_random(saved, rows, world)
        return decoded(saved.document["extra"], extra)


def _check_names(live: LiveModel, saved: Saved) -> None:
    """Raise CoverageError unless the checkpoint has the model's tensors, with their shapes."""
    shapes = {name: shard.layout.shape for name, shard in live.shards.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in live.buffers.items()}
    ties = saved.document["ties"]
    known = {_name(name, saved) for name in shapes}
    if saved.document["world_size"] == OTHERS:  # who write a tied tensor under each of its names
        known |= set(live.ties) | {ties.get(name, name) for name in live.ties}
    left_out = set(saved.document["left_out"])
    # What was left out by the save is frozen, and has its values from the load of the model.
    missing = sorted(n for n in shapes.keys() - left_out if _name(n, saved) not in saved.model.weights)
    unexpected = sorted((saved.model.weights.keys() - known) | (left_out - shapes.keys()))
    mismatched = {
        name: (saved.model.weights[_name(name, saved)].shape, shape)
        for name, shape in shapes.items()
        if name not in missing
        and name not in left_out
        and saved.model.weights[_name(name, saved)].shape != shape
    }
    if missing or unexpected or mismatched:
        first = (missing or unexpected or sorted(mismatched))[0]
        raise CoverageError(
            f"{saved.path} belongs to another model: {len(missing)} tensors are missing, "
            f"{len(unexpected)} are unexpected, {len(mismatched)} have another shape, among them "
            f"{first}; build the model as it was when the state was saved, with the same adapters",
            missing,
            unexpected,
            mismatched,
        )


def _check_optimizers(training: LiveTraining, saved: Saved, world: World) -> None:
    """Raise unless what steps now can go on with what was saved, before anything is changed."""
    document = saved.document["optimizer"]
    if training.steps and not document:
        raise ConfigError(f"{saved.path} was saved without an optimizer; leave optimizer out")
    check_saveable(training)
    for optimizer in optimizers_of(training.steps):
        check_rule(optimizer, document)
    with_gradients = bool(_with_gradients(saved))
    training.state.check_window(saved.document["engine"], with_gradients, str(saved.path))
    check_local(training, document, world)


def _name(name: str, saved: Saved) -> str:
    """The name under which the checkpoint has a tensor, which may be tied there."""
    found: str = name if name in saved.model.weights else saved.document["ties"].get(name, name)
    return found


def _parameters(training: LiveTraining, saved: Saved, world: World) -> list[_Wanted]:
    """Parameters, those of more bits than were saved from their masters, and buffers."""
    wanted: list[_Wanted] = []
    for name, shard in training.shards.items():
        if name in saved.document["left_out"]:
            continue  # frozen, and as the model was loaded
        wanted.append((_source(name, shard.storage.dtype, saved), shard.layout, shard.storage))
    for name, buffer in training.buffers.items():
        shard = whole_shard(name, buffer, world)
        wanted.append((f"{MODEL}/{name}", shard.layout, shard.storage))
    return wanted


def _beside(beside: Sequence[StateTensor], saved: Saved) -> list[_Wanted]:
    for kept in beside:
        if f"{kept.key}/{kept.name}" not in saved.state.weights:
            raise CheckpointError(
                f"{saved.path} has no {kept.key} of {kept.name}: the state was saved without it; leave "
                f"{kept.key} out, or start anew"
            )
    return [(f"{kept.key}/{kept.name}", kept.shard.layout, kept.shard.storage) for kept in beside]


def _source(name: str, dtype: torch.dtype, saved: Saved) -> str:
    # The master has all bits of which the parameter's were rounded. Where what is restored has the dtype that
    # was saved, the parameter's own bits are taken, so that they come back exactly.
    name = _name(name, saved)
    master = f"master/{name}"
    if master in saved.state.weights and dtype_of(saved.model.weights[name].dtype) != dtype:
        return master
    return f"{MODEL}/{name}"


def _of(folder: str, wanted: Sequence[_Wanted]) -> list[_Wanted]:
    prefix = f"{MODEL}/"
    if not folder:
        return [item for item in wanted if not item[0].startswith(prefix)]
    return [(n.removeprefix(prefix), layout, room) for n, layout, room in wanted if n.startswith(prefix)]


def planned_reads(catalog: Catalog, wanted: Iterable[_Wanted]) -> tuple[Plan, list[torch.Tensor], Tuning]:
    """What this rank reads to fill storages, those that have elements, and how.

    Raises CheckpointError for a tensor that has another shape in the checkpoint.
    """
    parts = []
    storages: list[torch.Tensor] = []
    staged = False
    for name, layout, storage in wanted:
        # A rank may hold nothing of a tensor: there is nothing to be read, and all else of the load is
        # collective without it.
        if not storage.numel():
            continue
        entry, direct = catalog.weights[name], storage.device.type == "cpu"
        if entry.shape != layout.shape:
            raise CheckpointError(f"{name} has the shape {entry.shape} in the checkpoint, not {layout.shape}")
        recipe = Recipe(Target(name, layout.shape, storage.dtype), entry.pieces)
        # Engines pad shares, and some keep less of the padding than the layout has: what is not kept cannot
        # be filled.
        owned = min(layout.owned, storage.numel())
        parts.append((recipe, layout, Destination(name, storage.numel(), owned, storage.dtype, direct)))
        storages.append(storage)
        staged = staged or not direct
    tuning = tune(catalog.storage, staged)
    return join(catalog, parts, tuning.options()), storages, tuning


def _masters(training: LiveTraining, saved: Saved) -> list[_Wanted]:
    return [
        (_source(kept.name, kept.shard.storage.dtype, saved), kept.shard.layout, kept.shard.storage)
        for kept in training.masters()
        if kept.name not in saved.document["left_out"]
        # A master in the parameter's own dtype may be the parameter itself: it is read once.
        and not _same_memory(kept.shard, training.shards[kept.name])
    ]


def _moments(training: LiveTraining, saved: Saved, world: World) -> list[_Wanted]:
    if not training.steps:
        return []
    document = saved.document["optimizer"]
    restore_groups(training, document)
    moments = restored_moments(training, document, saved.stored)
    wanted = [(f"optimizer/{k.key}/{k.name}", k.shard.layout, k.shard.storage) for k in moments]
    local = restored_local(training, document, world)
    wanted += [(shard.name, shard.layout, shard.storage) for shard in local]
    gradients = _gradients(training, saved)
    return wanted + [(f"gradient/{k.name}", k.shard.layout, k.shard.storage) for k in gradients]


def _same_memory(a: Shard, b: Shard) -> bool:
    return a.storage.dtype == b.storage.dtype and a.storage.data_ptr() == b.storage.data_ptr()


def _gradients(training: LiveTraining, saved: Saved) -> Iterator[StateTensor]:
    """Room for the gradients that were saved; those that were not are none.

    Raises ConfigError for a window that another kind of engine has to end.
    """
    names = _with_gradients(saved)
    wanted = {id(parameter) for name, parameter in training.parameters.items() if name in names}
    made = training.state.make_gradients(wanted, saved.document["engine"])
    if made is None:
        raise ConfigError(
            f"{saved.path} was saved in the middle of gradient accumulation, which this engine "
            "cannot complete: resume with the engine that saved it, or save after "
            "optimizer.step() and zero_grad()"
        )
    return training.shard_gradients(made)


def _with_gradients(saved: Saved) -> set[str]:
    """The parameters whose gradients were saved."""
    return {name.partition("/")[2] for name in saved.state.weights if name.startswith("gradient/")}


def _extra(saved: Saved) -> dict[str, torch.Tensor]:
    kept = _OF_PARAMETERS | set(saved.document.get("beside", ()))
    return {
        name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="cpu")
        for name, entry in saved.state.weights.items()
        if name.partition("/")[0] not in kept
    }


def _restore_engine(
    training: LiveTraining, saved: Saved, tensors: Mapping[str, torch.Tensor], gradients: bool
) -> None:
    found = saved.document["engine"]
    if not gradients:  # without which no window goes on
        found = {key: value for key, value in found.items() if key != "window"}
    training.state.restore_counters(found)
    for key, component in training.state.components().items():
        if found.get(key):
            component.load_state_dict(decoded(found[key], tensors))


def _restore_around(training: LiveTraining, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
    values = decoded(saved.document.get("around", {}), tensors)
    for name, buffer in training.wrapper_buffers.items():
        if name in values:
            with torch.no_grad():
                buffer.copy_(values[name])


def _restore_modules(training: LiveTraining, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
    modules = {plain_name(name): module for name, module in training.module.named_modules()}
    for name, state in saved.document.get("modules", {}).items():
        if name not in modules:
            raise CoverageError(
                f"{saved.path} has a state of the module {name}, and the model has no such module"
            )
        modules[name].set_extra_state(decoded(state, tensors))


def _random_rows(saved: Saved) -> dict[str, torch.Tensor]:
    found = {f"random/{name}": now for name, now in random_rows().items()}
    stored = {name: saved.state.weights[name].shape[1] for name in found if name in saved.state.weights}
    return {name: torch.empty_like(now) for name, now in found.items() if stored.get(name) == now.numel()}


def _row(saved: Saved, name: str, world: World) -> Layout:
    shape = saved.state.weights[name].shape
    same = saved.document["world_size"] == world.size
    return dimension_shard(shape, 0, world.rank if same else 0, shape[0])


def _restore_random(saved: Saved, rows: Mapping[str, torch.Tensor], world: World) -> None:
    if "random/torch" not in rows:
        return
    if saved.document["world_size"] == world.size:
        set_random_rows({name.removeprefix("random/"): row for name, row in rows.items()})
        return
    # The rank is added, so that ranks do not draw alike; the rest is the first saved row, so that two
    # resumptions of one state draw the same.
    seed = zlib.crc32(rows["random/torch"].numpy().tobytes()) + world.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
