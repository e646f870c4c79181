"""``zerostart.load_state``: a load of a training checkpoint into the layouts that the engine has now."""

from __future__ import annotations

import logging
import os
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.publishing import recover
from zerostart.checkpoint.strict_json import read_json
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard, plain_name, whole_shard
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CoverageError, ReadError
from zerostart.layout import Layout, dimension_shard, replicated
from zerostart.loading.source import open_source
from zerostart.planning import Destination, Plan, PlanOptions, join
from zerostart.recipe import Recipe, Target
from zerostart.state.background import settle_last
from zerostart.state.finding import state_in
from zerostart.state.foreign import OTHERS, foreign_state
from zerostart.state.linking import check_unchanged
from zerostart.state.optimizing import Kept, gradient_of, masters_of, restore_groups, restored_moments
from zerostart.state.publishing import agreed_place
from zerostart.state.random_states import random_rows, set_random_rows
from zerostart.state.rules import check_rule
from zerostart.state.training_state import (
    FORMAT,
    MARKER,
    MODEL,
    SAVED_AT,
    STATE,
    Training,
    check_restorable,
    placed_gradients,
    training_of,
)
from zerostart.state.values import decoded, dtype_of
from zerostart.transfer import Progress, Tuning
from zerostart.transfer.strategy import execute_together
from zerostart.transfer.tuning import tune
from zerostart.upstream import deepspeed_state as deepspeed
from zerostart.upstream import deepspeed_steps

__all__ = ["load_state", "planned_reads"]

logger = logging.getLogger("zerostart")

#: A tensor of the checkpoint, and where this rank's share of it goes: the name, the layout, 1-D storage.
_Wanted = tuple[str, Layout, torch.Tensor]
#: What tensors of the state are kept for, in the first part of their names; other ones are whole.
_OF_PARAMETERS = frozenset({"master", "optimizer", "gradient", "random"})

#: accelerate's and the Trainer's files of an optimizer that one rank has gathered.
_WHOLE_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")


@dataclass(frozen=True)
class _Saved:
    """A checkpoint: its document, and the catalogs of its two folders."""

    path: Path
    document: dict[str, Any]
    model: Catalog
    state: Catalog

    @property
    def stored(self) -> dict[str, str]:
        """The dtype of each tensor, those of the model as ``model/NAME``."""
        found = {name: entry.dtype for name, entry in self.state.weights.items()}
        return found | {f"{MODEL}/{name}": entry.dtype for name, entry in self.model.weights.items()}


def load_state(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Any, beside: Sequence[Kept] = ()
) -> Any:
    """See ``zerostart.load_state``, which raises what this raises.

    ``beside`` are tensors that were kept for parameters, to be filled; raises CheckpointError where one was
    not saved.
    """
    settle_last()
    world = current_world()
    with world.phase("restoring the training state"):
        saved = _opened(agreed_place(path, world, "restoring from"), world)
        with world.phase("looking at what is restored"):
            training = training_of(model, optimizer, world)
            check_restorable(training.places)
            _check_names(training, saved)
            _check_optimizers(training, saved)
            wanted = [*_parameters(training, saved, world), *_beside(beside, saved)]
        with torch.no_grad():
            _read(saved, wanted, world)
            if training.steps:
                _restore_optimizer(training, saved, world)
            deepspeed.drop_gathered(training.places.parameters.values())
        extra = _extra(saved, world)
        with world.phase("restoring counters and random states"):
            _restore_engine(training, saved, extra)
            _restore_modules(training, saved, extra)
            _restore_random(saved, world)
        return decoded(saved.document["extra"], extra)


def _opened(path: Path, world: World) -> _Saved:
    foreign = foreign_state(path, world)
    if foreign is not None:
        return _Saved(path, *foreign)
    path, document = world.broadcast_object(lambda: _document(path), "reading the checkpoint's document")
    return _Saved(path, document, open_source(path / MODEL, world), open_source(path / STATE, world))


def _document(path: Path) -> tuple[Path, dict[str, Any]]:
    """The training state at ``path``, or in what accelerate or the Trainer has made there."""
    try:
        recover(path)
    except OSError as error:
        raise ReadError(f"{path}: a save was killed, and cannot be put right: {error.strerror}") from error
    if not (path / MARKER).is_file():
        path = state_in(path) or path
    if not (path / MARKER).is_file():
        for name in _WHOLE_OPTIMIZERS:
            if (path / name).is_file():
                raise CheckpointNotFoundError(
                    f"{path / name} has the optimizer of all ranks in one pickle, which is not read in "
                    "parts: resume once by what has saved it, and save by zerostart.save_state, or by "
                    "accelerate with fsdp_state_dict_type: SHARDED_STATE_DICT; the weights alone can be "
                    "loaded (zerostart.load)"
                )
        raise CheckpointNotFoundError(
            f"{path} is no complete training checkpoint: {MARKER} is not there, which zerostart.save_state "
            "writes last"
        )
    document = read_json(path / MARKER, "training state")
    version = document.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise CheckpointError(
            f"{path / MARKER} has the format {version!r}, and this zerostart knows formats up to {FORMAT}; "
            "update zerostart"
        )
    check_unchanged(path, MODEL, document.get(SAVED_AT))
    return path, document


def _check_names(training: Training, saved: _Saved) -> None:
    """Raise CoverageError unless the checkpoint has the model's tensors, with their shapes."""
    places = training.places
    shapes = {name: shard.layout.shape for name, shard in places.shards.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in places.buffers.items()}
    ties = saved.document["ties"]
    known = {_name(name, saved) for name in shapes}
    if saved.document["world_size"] == OTHERS:  # who write a tied tensor under each of its names
        known |= set(places.ties) | {ties.get(name, name) for name in places.ties}
    left_out = set(saved.document["left_out"])
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
            f"{saved.path} is of another model: {len(missing)} tensors are missing, {len(unexpected)} "
            f"unexpected, {len(mismatched)} of another shape, among them {first}; build the model as it was "
            "when the state was saved, with the same adapters",
            missing,
            unexpected,
            mismatched,
        )


def _check_optimizers(training: Training, saved: _Saved) -> None:
    """Raise unless what steps now can go on with what was saved, before anything is changed."""
    document = saved.document["optimizer"]
    if training.steps and not document:
        raise ConfigError(f"{saved.path} was saved without an optimizer; leave optimizer out")
    for optimizer in {id(step.optimizer): step.optimizer for step in training.steps}.values():
        check_rule(optimizer, document)


def _name(name: str, saved: _Saved) -> str:
    """The name under which the checkpoint has a tensor, which may be tied there."""
    found: str = name if name in saved.model.weights else saved.document["ties"].get(name, name)
    return found


def _parameters(training: Training, saved: _Saved, world: World) -> list[_Wanted]:
    """Parameters, those of more bits than were saved from their masters, and buffers."""
    wanted: list[_Wanted] = []
    for name, shard in training.places.shards.items():
        if name in saved.document["left_out"]:
            continue  # frozen, and as the model was loaded
        wanted.append((_source(name, shard.storage.dtype, saved), shard.layout, shard.storage))
    for name, buffer in training.places.buffers.items():
        shard = whole_shard(name, buffer, world)
        wanted.append((f"{MODEL}/{name}", shard.layout, shard.storage))
    return wanted


def _beside(beside: Sequence[Kept], saved: _Saved) -> list[_Wanted]:
    for kept in beside:
        if f"{kept.key}/{kept.name}" not in saved.state.weights:
            raise CheckpointError(
                f"{saved.path} has no {kept.key} of {kept.name}: it was saved without; leave {kept.key} out, "
                "or start anew"
            )
    return [(f"{kept.key}/{kept.name}", kept.shard.layout, kept.shard.storage) for kept in beside]


def _source(name: str, dtype: torch.dtype, saved: _Saved) -> str:
    """What a parameter or a master is restored from: what was saved in its dtype, else the master."""
    name = _name(name, saved)
    master = f"master/{name}"
    if master in saved.state.weights and dtype_of(saved.model.weights[name].dtype) != dtype:
        return master
    return f"{MODEL}/{name}"


def _read(saved: _Saved, wanted: Sequence[_Wanted], world: World) -> None:
    """Fill storages; collective. Raises what reading raises."""
    prefix = f"{MODEL}/"
    model = [(n.removeprefix(prefix), *rest) for n, *rest in wanted if n.startswith(prefix)]
    state = [(n, *rest) for n, *rest in wanted if not n.startswith(prefix)]
    for catalog, part in ((saved.model, model), (saved.state, state)):
        _fill(catalog, part, world)  # type: ignore[arg-type]  # a name and the rest of it


def _fill(catalog: Catalog, wanted: Iterable[_Wanted], world: World) -> None:
    with world.phase("planning what is restored"):
        plan, storages, tuning = planned_reads(catalog, wanted)
    execute_together(plan, storages, Progress(plan.read_bytes, False), tuning, world)


def planned_reads(catalog: Catalog, wanted: Iterable[_Wanted]) -> tuple[Plan, list[torch.Tensor], Tuning]:
    """What this rank reads to fill storages, those that have elements, and how.

    Raises CheckpointError for a tensor that has another shape in the checkpoint.
    """
    parts = []
    storages: list[torch.Tensor] = []
    staged = False
    for name, layout, storage in wanted:
        if not storage.numel():
            continue
        entry, direct = catalog.weights[name], storage.device.type == "cpu"
        if entry.shape != layout.shape:
            raise CheckpointError(f"{name} has the shape {entry.shape} in the checkpoint, not {layout.shape}")
        recipe = Recipe(Target(name, layout.shape, storage.dtype), entry.pieces)
        owned = min(layout.owned, storage.numel())
        parts.append((recipe, layout, Destination(name, storage.numel(), owned, storage.dtype, direct)))
        storages.append(storage)
        staged = staged or not direct
    tuning = tune(catalog.storage, staged)
    return join(catalog, parts, PlanOptions(tuning.chunk_size)), storages, tuning


def _restore_optimizer(training: Training, saved: _Saved, world: World) -> None:
    places, steps = training.places, training.steps
    document = saved.document["optimizer"]
    stored = saved.stored
    with world.phase("making the optimizer's state"):
        restore_groups(steps, places, document)
        wanted = [
            (_source(kept.name, kept.shard.storage.dtype, saved), kept.shard.layout, kept.shard.storage)
            for kept in masters_of(steps, places)
            if not _same_memory(kept.shard, places.shards[kept.name])
        ]
        moments = list(restored_moments(steps, places, document, stored))
        wanted += [(f"optimizer/{k.key}/{k.name}", k.shard.layout, k.shard.storage) for k in moments]
        wanted += [
            (f"gradient/{k.name}", k.shard.layout, k.shard.storage) for k in _gradients(training, saved)
        ]
    _read(saved, wanted, world)


def _same_memory(a: Shard, b: Shard) -> bool:
    return a.storage.dtype == b.storage.dtype and a.storage.data_ptr() == b.storage.data_ptr()


def _gradients(training: Training, saved: _Saved) -> list[Kept]:
    """Room for the gradients that were saved; those that were not are none.

    Raises ConfigError for a window that another kind of engine has to end.
    """
    having = {name.partition("/")[2] for name in saved.state.weights if name.startswith("gradient/")}
    shards = training.places.shards
    engine, found = training.engine, saved.document["engine"]
    if engine is not None or "window" in found:
        if not having:
            return []
        room = (
            deepspeed_steps.gradients(engine, training.steps, make=True)
            if engine is not None and "window" in found
            else None
        )
        if room is None:
            raise ConfigError(
                f"{saved.path} was saved in the middle of a window of gradient accumulation, which this "
                "engine cannot end: resume with the same one, or save after optimizer.step() and zero_grad()"
            )
        return list(placed_gradients(training, room))
    kept = []
    for name, parameter in training.parameters.items():
        parameter.grad = None
        if name in having:
            parameter.grad = torch.zeros_like(parameter.detach())
            kept.append(gradient_of(name, parameter, shards[name]))
    return kept


def _extra(saved: _Saved, world: World) -> dict[str, torch.Tensor]:
    """The tensors of ``extra`` and of what the engine keeps, whole on every rank."""
    found: dict[str, torch.Tensor] = {}
    wanted: list[_Wanted] = []
    for name, entry in saved.state.weights.items():
        if name.partition("/")[0] in _OF_PARAMETERS | set(saved.document.get("beside", ())):
            continue
        found[name] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="cpu")
        wanted.append((name, replicated(entry.shape), found[name].view(-1)))
    _fill(saved.state, wanted, world)
    return found


def _restore_engine(training: Training, saved: _Saved, tensors: Mapping[str, torch.Tensor]) -> None:
    found = saved.document["engine"]
    if training.engine is None:
        if training.scaler is not None and found.get("scaler"):
            training.scaler.load_state_dict(decoded(found["scaler"], tensors))
        return
    deepspeed.set_counters(training.engine, found)
    if "window" in found:
        deepspeed.set_window(training.engine, found["window"])
    if training.scheduler is not None and "schedule" in found:
        training.scheduler.load_state_dict(decoded(found["schedule"], tensors))


def _restore_modules(training: Training, saved: _Saved, tensors: Mapping[str, torch.Tensor]) -> None:
    """Hand modules what they kept beside tensors."""
    modules = {plain_name(name): module for name, module in training.places.module.named_modules()}
    for name, state in saved.document.get("modules", {}).items():
        if name not in modules:
            raise CoverageError(
                f"{saved.path} has a state of the module {name}, and the model no such module"
            )
        modules[name].set_extra_state(decoded(state, tensors))


def _restore_random(saved: _Saved, world: World) -> None:
    """This rank's random states; with another number of ranks, new ones out of the saved and the rank."""
    rows: dict[str, torch.Tensor] = {}
    wanted: list[_Wanted] = []
    same = saved.document["world_size"] == world.size
    for name, now in random_rows().items():
        entry = saved.state.weights.get(f"random/{name}")
        if entry is None or entry.shape[1] != now.numel():
            continue
        rows[name] = torch.empty(entry.shape[1], dtype=now.dtype, device="cpu")
        layout = dimension_shard(entry.shape, 0, world.rank if same else 0, entry.shape[0])
        wanted.append((f"random/{name}", layout, rows[name]))
    _fill(saved.state, wanted, world)
    if "torch" not in rows:
        return
    if same:
        set_random_rows(rows)
        return
    seed = zlib.crc32(rows["torch"].numpy().tobytes()) + world.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
