"""Load a training checkpoint into the present layouts of an engine."""

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
    warn_of_newer,
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
    create_local_states,
    create_moments,
    list_optimizers,
    restore_groups,
)
from zerostart.state.resuming.training_state import (
    FORMAT,
    MARKER,
    MODEL,
    STATE,
    check_restorable,
    get_random_rows,
    set_random_rows,
)
from zerostart.state.resuming.values import decode, dtype_of, encode
from zerostart.state.saving.writing import agree_on_place
from zerostart.transfer import Progress, Tuning
from zerostart.transfer.collective import execute_together
from zerostart.transfer.planning import Destination, Plan, join
from zerostart.transfer.tuning import tune

logger = logging.getLogger("zerostart")

#: A tensor to read: its name, and the layout and 1-D storage of this rank's share.
_Target = tuple[str, Layout, torch.Tensor]
#: First parts of names of tensors that belong to parameters; all others are whole.
_OF_PARAMETERS = frozenset({"master", "optimizer", "gradient", "random", LOCAL})
#: Files of accelerate and the Trainer with a gathered optimizer.
_WHOLE_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")


#: Required entries of a document and of its entry ``optimizer``, with their types.
_FIELDS = {
    "world_size": int,
    "ties": dict,
    "left_out": list,
    "optimizer": dict,
    "engine": dict,
    "extra": object,
}
_OPTIMIZER = {"class": str, "numbers": dict, "groups": list}
#: Optional entries of a document.
_OPTIONAL = {"modules": dict, "beside": list, "around": dict}


def read_document(state: Path) -> dict[str, object]:
    """Read the document of the training state in a directory.

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
    document = {name: kind() for name, kind in _OPTIONAL.items()} | document
    _check_fields(path, document, _FIELDS | _OPTIONAL)
    if document["optimizer"]:
        _check_fields(path, document["optimizer"], _OPTIMIZER)
    return document


def _check_fields(path: Path, entries: Mapping[str, object], fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        if name not in entries or not isinstance(entries[name], kind):
            raise CheckpointError(
                f"{path} has no entry {name}, or one of another kind: it is damaged, or is not the document "
                "of a training state; use another checkpoint"
            )


# Training states of other libraries.

#: World size in the documents of other libraries, which have no random states of ranks.
FOREIGN_WORLD_SIZE = 0
#: Types of group settings that JSON can hold.
_SIMPLE = (bool, int, float, str, type(None))


def _describe_foreign(contents: TrainingContents) -> dict[str, object]:
    """Describe another library's state of a model and optimizer as a document of ours."""
    engine: dict[str, object] = (
        {"name": "deepspeed", **contents.engine} if contents.engine else {"name": "torch"}
    )
    if contents.schedule is not None:
        engine["schedule"] = _encode_settings(contents.schedule)
    return {
        "format": 1,
        "world_size": FOREIGN_WORLD_SIZE,
        "ties": contents.ties,
        "left_out": [],
        "optimizer": {
            "class": "",
            "numbers": {
                key: [[value, [name]] for name, value in by_name.items()]
                for key, by_name in contents.numbers.items()
            },
            "groups": [
                {"settings": _encode_settings(group.settings), "parameters": list(group.parameters)}
                for group in contents.groups
            ],
        }
        if contents.groups
        else {},
        "engine": engine,
        "extra": None,
    }


def _encode_settings(values: Mapping[Any, Any]) -> dict[str, object]:
    """Encode settings that are numbers, strings, or tuples and lists of these."""
    return {
        str(key): encode(value, key, {})
        for key, value in values.items()
        if type(value) in _SIMPLE
        or (type(value) in (tuple, list) and all(type(item) in _SIMPLE for item in value))
    }


@dataclass(frozen=True)
class Saved:
    """A training checkpoint: its document and the catalogs of its two folders."""

    path: Path | str
    document: JsonObject
    model: Catalog
    state: Catalog

    @property
    def stored(self) -> dict[str, str]:
        """Dtypes by name; tensors of the model have names ``model/NAME``."""
        state = {name: entry.dtype for name, entry in self.state.weights.items()}
        return state | {f"{MODEL}/{name}": entry.dtype for name, entry in self.model.weights.items()}


def open_state(path: Path | str, world: World) -> Saved:
    """Open the training state at ``path`` on rank 0 for all ranks; collective.

    Raises CheckpointNotFoundError if there is none, and CheckpointError for a damaged one.
    """
    saved = world.broadcast_object(lambda: _open(path), "reading the checkpoint's document")
    return replace(saved, model=open_source(saved.model, world), state=open_source(saved.state, world))


def _open(path: Path | str) -> Saved:
    """Open the training state at ``path``, of zerostart or of another library."""
    if isinstance(path, str):
        storage = storage_at(path)
        assert storage is not None, "it is a URL"
        if not is_stored_state(storage):
            raise CheckpointNotFoundError(
                f"{shown_url(path)} is not a complete training state: {MARKER}, which zerostart.save_state "
                "writes last, is missing. Checkpoints of other libraries are not read from URLs: copy the "
                "directory to this machine first"
            )
        place: Path | str = path
    else:
        directory = state_in(path)
        if directory is None:
            return _open_foreign(path)
        warn_of_newer(path, directory)
        place = directory
    document, (weights, state) = open_saved_state(place, (MODEL, STATE), read_document)
    return Saved(place, document, weights, state)


def _open_foreign(path: Path) -> Saved:
    """Open the checkpoint of DeepSpeed, torch or accelerate in ``path``."""
    if path.is_dir() and (read := training_states(path)) is not None:
        contents, model, state = read
        return Saved(path, _describe_foreign(contents), model, state)
    for name in _WHOLE_OPTIMIZERS:
        if (path / name).is_file():
            raise CheckpointNotFoundError(
                f"{path / name} has the optimizer of all ranks in one pickle, which cannot be read in "
                "parts: resume it once with the library that saved it, and save again with "
                "zerostart.save_state, or with accelerate and fsdp_state_dict_type: "
                "SHARDED_STATE_DICT; zerostart.load can load only the weights"
            )
    raise CheckpointNotFoundError(
        f"{path} is not a complete training state: {MARKER}, which zerostart.save_state writes last, is "
        "missing"
    )


def restore_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra_tensors: Sequence[StateTensor] = (),
    with_optimizer: bool = True,
    counters: bool = True,
) -> Any:
    """Load a training checkpoint as ``zerostart.load_state`` documents it.

    ``extra_tensors`` are further tensors of parameters to fill; raises CheckpointError for one that was not
    saved. Without ``with_optimizer`` only weights and masters are read: states, gradients and random
    states are unchanged. Without ``counters`` the engine's counters are unchanged.
    """
    world = current_world()
    with world.phase("restoring the training state"):
        place = agree_on_place(path, world, "restoring from")
        # A background save to this path must end before it is read.
        finish_last(world, place)
        saved = open_state(place, world)
        with world.phase("checking the checkpoint"):
            training = LiveTraining(model, optimizer, world)
            # Watch steps from now on, so that the next save knows whether gradients were used.
            training.state.watch()
            check_restorable(training)
            _check_names(training, saved)
            if with_optimizer:
                _check_optimizers(training, saved, world)
            targets = [*_list_parameters(training, saved, world), *_list_extra_tensors(extra_tensors, saved)]
        # Empty tensors that the same reads fill.
        extra, rows = _allocate_extra(saved), _allocate_random_rows(saved) if with_optimizer else {}
        # All checks are done: the optimizer changes from here on.
        with torch.no_grad(), world.phase("planning the reads"):
            targets += _list_masters(training, saved)
            if with_optimizer:
                targets += _list_optimizer_state(training, saved, world)
            targets += [(name, replicated(tensor.shape), tensor.view(-1)) for name, tensor in extra.items()]
            targets += [(name, _row_layout(saved, name, world), row) for name, row in rows.items()]
            plans = [
                plan_reads(saved.model, _select(MODEL, targets)),
                plan_reads(saved.state, _select("", targets)),
            ]
        with torch.no_grad():
            # Two plans, since model and state have separate files.
            for plan, storages, tuning in plans:
                execute_together(plan, storages, Progress(plan.read_bytes, False), tuning, world)
            training.drop_gathered()
        # Random states last: nothing may draw random numbers after them.
        with world.phase("restoring counters and random states"):
            if counters:
                _restore_engine(training, saved, extra, with_optimizer)
            _restore_around(training, saved, extra)
            _restore_modules(training, saved, extra)
            _restore_random(saved, rows, world)
        return decode(saved.document["extra"], extra)


def _check_names(live: LiveModel, saved: Saved) -> None:
    """Raise CoverageError unless the checkpoint has the model's tensors, with their shapes."""
    shapes = {name: shard.layout.shape for name, shard in live.shards.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in live.buffers.items()}
    ties = saved.document["ties"]
    expected = {_stored_name(name, saved) for name in shapes}
    if saved.document["world_size"] == FOREIGN_WORLD_SIZE:  # others write tied tensors under each name
        expected |= set(live.ties) | {ties.get(name, name) for name in live.ties}
    left_out = set(saved.document["left_out"])
    # Tensors that the save left out are frozen and keep their loaded values.
    missing = sorted(n for n in shapes.keys() - left_out if _stored_name(n, saved) not in saved.model.weights)
    unexpected = sorted((saved.model.weights.keys() - expected) | (left_out - shapes.keys()))
    mismatched = {
        name: (saved.model.weights[_stored_name(name, saved)].shape, shape)
        for name, shape in shapes.items()
        if name not in missing
        and name not in left_out
        and saved.model.weights[_stored_name(name, saved)].shape != shape
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
    """Raise unless the running optimizers can continue the saved ones."""
    document = saved.document["optimizer"]
    if training.steps and not document:
        raise ConfigError(f"{saved.path} was saved without an optimizer; leave optimizer out")
    check_saveable(training)
    for optimizer in list_optimizers(training.steps):
        check_rule(optimizer, document)
    with_gradients = bool(_names_with_gradients(saved))
    training.state.check_window(saved.document["engine"], with_gradients, str(saved.path))
    check_local(training, document, world)


def _stored_name(name: str, saved: Saved) -> str:
    """Return the checkpoint's name of a tensor, which may be tied there."""
    stored: str = name if name in saved.model.weights else saved.document["ties"].get(name, name)
    return stored


def _list_parameters(training: LiveTraining, saved: Saved, world: World) -> list[_Target]:
    """List parameters and buffers; read a more precise parameter from its master."""
    targets: list[_Target] = []
    for name, shard in training.shards.items():
        if name in saved.document["left_out"]:
            continue  # frozen, and already loaded
        targets.append((_choose_source(name, shard.storage.dtype, saved), shard.layout, shard.storage))
    for name, buffer in training.buffers.items():
        shard = whole_shard(name, buffer, world)
        targets.append((f"{MODEL}/{name}", shard.layout, shard.storage))
    return targets


def _list_extra_tensors(extra_tensors: Sequence[StateTensor], saved: Saved) -> list[_Target]:
    for kept in extra_tensors:
        if f"{kept.key}/{kept.name}" not in saved.state.weights:
            raise CheckpointError(
                f"{saved.path} has no {kept.key} of {kept.name}: the state was saved without it; leave "
                f"{kept.key} out, or start a new run"
            )
    return [(f"{kept.key}/{kept.name}", kept.shard.layout, kept.shard.storage) for kept in extra_tensors]


def _choose_source(name: str, dtype: torch.dtype, saved: Saved) -> str:
    # The master has the bits that the parameter lost by rounding. A target of the saved dtype takes the
    # parameter's own bits, so that they are restored exactly.
    name = _stored_name(name, saved)
    master = f"master/{name}"
    if master in saved.state.weights and dtype_of(saved.model.weights[name].dtype) != dtype:
        return master
    return f"{MODEL}/{name}"


def _select(folder: str, targets: Sequence[_Target]) -> list[_Target]:
    prefix = f"{MODEL}/"
    if not folder:
        return [item for item in targets if not item[0].startswith(prefix)]
    return [(n.removeprefix(prefix), layout, room) for n, layout, room in targets if n.startswith(prefix)]


def plan_reads(catalog: Catalog, targets: Iterable[_Target]) -> tuple[Plan, list[torch.Tensor], Tuning]:
    """Plan the reads that fill this rank's storages; return plan, storages and tuning.

    Raises CheckpointError for a tensor with another shape in the checkpoint.
    """
    parts = []
    storages: list[torch.Tensor] = []
    staged = False
    for name, layout, storage in targets:
        # A rank may hold no element of a tensor.
        if not storage.numel():
            continue
        entry, direct = catalog.weights[name], storage.device.type == "cpu"
        if entry.shape != layout.shape:
            raise CheckpointError(f"{name} has the shape {entry.shape} in the checkpoint, not {layout.shape}")
        recipe = Recipe(Target(name, layout.shape, storage.dtype), entry.pieces)
        # Engines pad shares, and some keep less padding than the layout says.
        owned = min(layout.owned, storage.numel())
        parts.append((recipe, layout, Destination(name, storage.numel(), owned, storage.dtype, direct)))
        storages.append(storage)
        staged = staged or not direct
    tuning = tune(catalog.storage, staged)
    return join(catalog, parts, tuning.options()), storages, tuning


def _list_masters(training: LiveTraining, saved: Saved) -> list[_Target]:
    return [
        (_choose_source(kept.name, kept.shard.storage.dtype, saved), kept.shard.layout, kept.shard.storage)
        for kept in training.masters()
        if kept.name not in saved.document["left_out"]
        # A master in the parameter's dtype may be the parameter itself, which is read once.
        and _memory_key(kept.shard) != _memory_key(training.shards[kept.name])
    ]


def _memory_key(shard: Shard) -> tuple[torch.dtype, int]:
    return shard.storage.dtype, shard.storage.data_ptr()


def _list_optimizer_state(training: LiveTraining, saved: Saved, world: World) -> list[_Target]:
    if not training.steps:
        return []
    document = saved.document["optimizer"]
    restore_groups(training, document)
    moments = create_moments(training, document, saved.stored)
    targets = [(f"optimizer/{k.key}/{k.name}", k.shard.layout, k.shard.storage) for k in moments]
    local = create_local_states(training, document, world)
    targets += [(shard.name, shard.layout, shard.storage) for shard in local]
    gradients = _list_gradients(training, saved)
    return targets + [(f"gradient/{k.name}", k.shard.layout, k.shard.storage) for k in gradients]


def _list_gradients(training: LiveTraining, saved: Saved) -> Iterator[StateTensor]:
    """Create the saved gradients, to be filled, and clear all others.

    Raises ConfigError if this engine cannot complete the accumulation window.
    """
    names = _names_with_gradients(saved)
    parameters = {id(parameter) for name, parameter in training.parameters.items() if name in names}
    gradients = training.state.make_gradients(parameters, saved.document["engine"])
    if gradients is None:
        raise ConfigError(
            f"{saved.path} was saved in the middle of gradient accumulation, which this engine "
            "cannot complete: resume with the engine that saved it, or save after "
            "optimizer.step() and zero_grad()"
        )
    return training.shard_gradients(gradients)


def _names_with_gradients(saved: Saved) -> set[str]:
    """Return the names of the parameters whose gradients were saved."""
    return {name.partition("/")[2] for name in saved.state.weights if name.startswith("gradient/")}


def _allocate_extra(saved: Saved) -> dict[str, torch.Tensor]:
    excluded = _OF_PARAMETERS | set(saved.document.get("beside", ()))
    return {
        name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="cpu")
        for name, entry in saved.state.weights.items()
        if name.partition("/")[0] not in excluded
    }


def _restore_engine(
    training: LiveTraining, saved: Saved, tensors: Mapping[str, torch.Tensor], gradients: bool
) -> None:
    engine = saved.document["engine"]
    if not gradients:  # an accumulation window needs its gradients
        engine = {key: value for key, value in engine.items() if key != "window"}
    training.state.restore_counters(engine)
    for key, component in training.state.components().items():
        if engine.get(key):
            component.load_state_dict(decode(engine[key], tensors))


def _restore_around(training: LiveTraining, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
    values = decode(saved.document.get("around", {}), tensors)
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
        modules[name].set_extra_state(decode(state, tensors))


def _allocate_random_rows(saved: Saved) -> dict[str, torch.Tensor]:
    current = {f"random/{name}": row for name, row in get_random_rows().items()}
    stored = {name: saved.state.weights[name].shape[1] for name in current if name in saved.state.weights}
    return {name: torch.empty_like(row) for name, row in current.items() if stored.get(name) == row.numel()}


def _row_layout(saved: Saved, name: str, world: World) -> Layout:
    shape = saved.state.weights[name].shape
    same = saved.document["world_size"] == world.size
    return dimension_shard(shape, 0, world.rank if same else 0, shape[0])


def _restore_random(saved: Saved, rows: Mapping[str, torch.Tensor], world: World) -> None:
    if "random/torch" not in rows:
        return
    if saved.document["world_size"] == world.size:
        set_random_rows({name.removeprefix("random/"): row for name, row in rows.items()})
        return
    # The first saved row makes resumptions of one state draw alike; the rank makes ranks draw differently.
    seed = zlib.crc32(rows["random/torch"].numpy().tobytes()) + world.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
