"""What a training checkpoint holds, out of a live model, its optimizer and its engine, as logical tensors.

``model/`` has parameters and persistent buffers under their state-dict names. ``state/`` has everything else:
``master/NAME``, ``optimizer/KEY/NAME``, ``gradient/NAME``, ``random/GENERATOR`` (a row for each rank) and
``extra...``, and what a run keeps for parameters beside, as ``KEY/NAME``. Numbers, settings and counters are
in ``state.json``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.checkpoint.manifest import STATE_MARKER
from zerostart.distributed.world import World
from zerostart.engines import Shard, check_own_memory, first_rank_shard, plain_name, whole_shard
from zerostart.errors import ConfigError
from zerostart.geometry.layout import dimension_shard
from zerostart.live.places import Places, places_of
from zerostart.live.record import record_of
from zerostart.recipe import spelling
from zerostart.state.resuming.local_states import LOCAL, local_states
from zerostart.state.resuming.optimizer import Kept, gradient_of, masters_of, moments_of, share_of, taken
from zerostart.state.resuming.optimizer_own import own_of
from zerostart.state.resuming.random_states import random_rows
from zerostart.state.resuming.values import encoded_whole
from zerostart.state.saving.writing import Entry, Outgoing, plain
from zerostart.upstream.deepspeed.state import engine as deepspeed
from zerostart.upstream.deepspeed.state import steps as deepspeed_steps
from zerostart.upstream.torch.fsdp2 import has_unreduced
from zerostart.upstream.torch.stepped import Stepped, has_taken, plain_steps, watch_steps

logger = logging.getLogger("zerostart")

#: The version of what is written here; a reader knows this one and those before.
FORMAT = 1
MARKER = STATE_MARKER
MODEL, STATE = "model", "state"


@dataclass(frozen=True)
class Training:
    """A model in training: its places, its engine (None where torch alone steps it), and what is stepped."""

    places: Places
    engine: Any
    steps: list[Stepped]
    scaler: Any = None
    #: Batches whose gradients accelerate adds up for one step; None where it does not say.
    accumulation: int | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are stepped themselves, by name."""
        return {
            name: parameter
            for step in self.steps
            if step.is_parameter
            for name in [self.places.name_of(step.tensor)]
            for parameter in [self.places.parameters[name]]
        }

    def watch(self) -> bool:
        """Have the gradients know which of torch's steps has taken them; whether they did before."""
        return self.engine is not None or watch_steps({step.optimizer for step in self.steps})

    @property
    def scheduler(self) -> Any:
        """The engine's schedule, if it has one that can be saved."""
        found = getattr(self.engine, "lr_scheduler", None)
        return found if hasattr(found, "state_dict") else None


def training_of(model: nn.Module, optimizer: Any, world: World) -> Training:
    """What ``save_state`` and ``load_state`` were given, found out. Raises ConfigError and EngineError."""
    engine = deepspeed.engine_of(model)
    if engine is not None:
        deepspeed_steps.check_movable(engine)
        return Training(places_of(model, world), engine, deepspeed_steps.steps_of(engine))
    deepspeed.check_engine_given(model.parameters())
    places = places_of(model, world)
    scaler = accumulation = None
    while type(optimizer).__module__.partition(".")[0] == "accelerate":  # its wrapper
        scaler = getattr(optimizer, "scaler", None)
        accumulation = getattr(getattr(optimizer, "gradient_state", None), "num_steps", None)
        optimizer = optimizer.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}, and not a torch optimizer")
    steps = plain_steps(optimizer) if optimizer is not None else []
    return Training(places, None, steps, scaler, accumulation)


@dataclass(frozen=True)
class Content:
    """A checkpoint to be written: the tensors of both folders with this rank's shares, and the document."""

    model: tuple[list[Entry], list[Outgoing]]
    state: tuple[list[Entry], list[Outgoing]]
    document: dict[str, Any]
    #: Tensors of ``extra`` and of schedules, whole on every rank.
    whole: dict[str, torch.Tensor]
    module: nn.Module
    #: Where the model was loaded from, empty for one that zerostart has not loaded.
    root: str
    #: Names of what a training loop changes by a step alone: parameters, masters, states of the optimizer.
    stepped: frozenset[str]

    @property
    def outgoing(self) -> Iterator[Outgoing]:
        """All shares of this rank."""
        yield from self.model[1]
        yield from self.state[1]


def collected(
    model: nn.Module,
    optimizer: Any,
    extra: Any,
    world: World,
    frozen: bool = True,
    beside: Sequence[Kept] = (),
) -> Content:
    """Everything that is saved, where it lies; ``frozen``: with parameters that are not trained.

    ``beside`` are further tensors that are kept for parameters. Raises ConfigError for what has no place in a
    checkpoint.
    """
    training = training_of(model, optimizer, world)
    known = training.watch()
    places = training.places
    check_restorable(places)
    _tell_of_gradients(training, known, world)
    left_out = [] if frozen else [n for n, p in places.parameters.items() if not p.requires_grad]
    kept = places.shards.keys() - left_out
    shards = [replace(shard, name=name) for name, shard in places.shards.items() if name in kept]
    shards += [first_rank_shard(name, buffer, world) for name, buffer in places.buffers.items()]
    masters = [k for k in masters_of(training.steps, places) if _is_copy(k, places)]
    shares = [replace(k.shard, name=f"master/{k.name}") for k in masters]
    shares += [
        replace(k.shard, name=f"optimizer/{k.key}/{k.name}") for k in moments_of(training.steps, places)
    ]
    stepped = frozenset([*kept, *(share.name for share in shares)])
    shares += [replace(k.shard, name=f"gradient/{k.name}") for k in gradients_of(training)]
    local, of_ranks = local_states(training.steps, places, training.engine is None, world)
    shares += [*local, *(replace(k.shard, name=f"{k.key}/{k.name}") for k in beside)]
    shares += _random(world)
    tensors: dict[str, torch.Tensor] = {}
    document: dict[str, Any] = {
        "format": FORMAT,
        "world_size": world.size,
        "torch": torch.__version__,
        "model": type(places.module).__name__,
        "ties": places.ties,
        "beside": sorted({kept.key for kept in beside}),
        "left_out": left_out,
        "optimizer": taken(training.steps, places),
        "engine": _engine(training, tensors),
        "extra": encoded_whole(extra, "extra", tensors),
    }
    if own := own_of(training.steps, training.engine is None, tensors):
        document["optimizer"]["own"] = own
    if of_ranks:
        document["optimizer"][LOCAL] = of_ranks
    document["around"] = encoded_whole(places.around, "around", tensors)
    of_modules: dict[str, torch.Tensor] = {}
    document["modules"] = module_states(places.module, of_modules)
    shares += [first_rank_shard(name, tensor, world) for name, tensor in of_modules.items()]
    shares += [whole_shard(name, tensor, world) for name, tensor in tensors.items()]
    return Content(
        _entries(shards), _entries(shares), document, tensors, places.module, _root(model), stepped
    )


def _tell_of_gradients(training: Training, known: bool, world: World) -> None:
    """Say so where nobody can tell whether a step has taken the gradients that are there."""
    if not known and world.rank == 0 and training.engine is None and _has_gradients(training):
        logger.warning(
            "gradients are saved with the state, and a resumed run adds to them. If an optimizer step has "
            "already used them, call zero_grad() before saving: steps before this optimizer's first save "
            "are not seen"
        )


def _has_gradients(training: Training) -> bool:
    return any(parameter.grad is not None for parameter in training.parameters.values())


def check_restorable(places: Places) -> None:
    """Raise ConfigError for a tensor of the model that could be saved, and not be written to again."""
    for name, tensor in [*places.parameters.items(), *places.buffers.items()]:
        if not isinstance(tensor, DTensor):
            check_own_memory(name, tensor)


def module_states(module: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What modules keep beside tensors (``get_extra_state``), by their names, as ``encoded_whole`` has it."""
    return {
        plain_name(name): encoded_whole(inner.get_extra_state(), f"modules.{plain_name(name)}", tensors)
        for name, inner in module.named_modules()
        if type(inner).get_extra_state is not nn.Module.get_extra_state
    }


def _root(model: nn.Module) -> str:
    try:
        return record_of(model).catalog.root
    except ConfigError:
        return ""


def _is_copy(kept: Kept, places: Places) -> bool:
    """Whether a master has more bits than its parameter, and is not what the parameter holds anyway."""
    return kept.shard.storage.dtype != places.shards[kept.name].storage.dtype


def _entries(shards: Sequence[Shard]) -> tuple[list[Entry], list[Outgoing]]:
    entries: list[Entry] = [(s.name, spelling(s.storage.dtype, s.name), s.layout.shape) for s in shards]
    return entries, [plain(s.name, s) for s in shards]


def _random(world: World) -> Iterator[Shard]:
    for name, row in random_rows().items():
        shape = (world.size, row.numel())
        at = functools.partial(dimension_shard, shape, 0, world_size=world.size)
        yield Shard(f"random/{name}", at(world.rank), row, at)


def _engine(training: Training, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the engine knows beside tensors, and the schedule that it steps."""
    engine = training.engine
    if engine is None:
        scale = training.scaler.state_dict() if training.scaler is not None else None
        scale = encoded_whole(scale, "the gradient scaler", tensors)
        return {"name": "torch", "scaler": scale, "accumulation": training.accumulation}
    found = {"name": "deepspeed", "stage": deepspeed.engine_stage(engine), **deepspeed.counters(engine)}
    if deepspeed.is_window_open(engine):
        found["window"] = deepspeed.window(engine)
    if training.scheduler is not None:
        found["schedule"] = encoded_whole(training.scheduler.state_dict(), "schedule", tensors)
    return found


def gradients_of(training: Training) -> Iterator[Kept]:
    """Gradients that are there and reduced: what a step would take now, in the middle of a window or not.

    Raises ConfigError where an engine has some of which each rank has a part.
    """
    places = training.places
    if training.engine is not None:
        yield from _engine_gradients(training)
        return
    if has_unreduced(places.module):
        raise ConfigError(
            "FSDP2 holds gradients that are not yet reduced (set_requires_gradient_sync(False)): save after "
            "an optimizer step"
        )
    having = {n: p for n, p in training.parameters.items() if p.grad is not None}
    if having and all(p.grad is not None and has_taken(p.grad) for p in having.values()):
        return  # between step() and zero_grad(): nothing is to be added to them
    for name, parameter in having.items():
        if isinstance(parameter.grad, DTensor) or places.alone:
            yield gradient_of(name, parameter, places.shards[name])


def _engine_gradients(training: Training) -> Iterator[Kept]:
    if not deepspeed.is_window_open(training.engine):
        return
    found = deepspeed_steps.gradients(training.engine, training.steps)
    if found is None:
        raise ConfigError(
            "the engine is in the middle of a window of gradient accumulation, and its gradients are not yet "
            "reduced (below ZeRO stage 2, and where stage 2 offloads them): save after an optimizer step"
        )
    yield from placed_gradients(training, found)


def placed_gradients(training: Training, found: Sequence[torch.Tensor]) -> Iterator[Kept]:
    """Gradients of the members of what an engine steps, each with its share of the parameter."""
    places = training.places
    members = (member for step in training.steps for member in step.members)
    for member, gradient in zip(members, found, strict=True):
        name = places.name_of(member.parameter)
        yield Kept(name, "gradient", share_of(member, places.shards[name], gradient))
