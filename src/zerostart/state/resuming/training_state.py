"""What a training checkpoint holds, out of a live model, its optimizer and its engine, as logical tensors.

``model/`` has parameters and persistent buffers under their state-dict names. ``state/`` has everything else:
``master/NAME``, ``optimizer/KEY/NAME``, ``gradient/NAME``, ``random/GENERATOR`` (a row for each rank) and
``extra...``, and what a run keeps for parameters beside, as ``KEY/NAME``. Numbers, settings and counters are
in ``state.json``.
"""

from __future__ import annotations

import functools
import logging
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.checkpoint.manifest import STATE_MARKER
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.distributed.world import World, default_device
from zerostart.engines import (
    Shard,
    TrainingState,
    check_own_memory,
    first_rank_shard,
    plain_name,
    whole_shard,
)
from zerostart.geometry.layout import dimension_shard
from zerostart.live.model import LiveModel
from zerostart.live.training import LiveTraining, StateTensor
from zerostart.recipe import spelling
from zerostart.state.resuming.optimizer import LOCAL, local_states, optimizer_document
from zerostart.state.resuming.values import encoded_whole
from zerostart.state.saving.writing import Entry, Outgoing, plain

logger = logging.getLogger("zerostart")

#: The version of what is written here; a reader knows this one and those before.
FORMAT = 1
MARKER = STATE_MARKER
MODEL, STATE = "model", "state"


@dataclass(frozen=True)
class Content:
    """A checkpoint to be written: the tensors of both folders with this rank's shares, and the document."""

    model: tuple[list[Entry], list[Outgoing]]
    state: tuple[list[Entry], list[Outgoing]]
    document: JsonObject
    #: Tensors of ``extra`` and of schedules, whole on every rank.
    whole: dict[str, torch.Tensor]
    module: nn.Module
    #: Where the model was loaded from, empty for one that zerostart has not loaded.
    root: str


def collected(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: object,
    world: World,
    frozen: bool = True,
    beside: Sequence[StateTensor] = (),
) -> Content:
    """Everything that is saved, where it lies; ``frozen``: with parameters that are not trained.

    ``beside`` are further tensors that are kept for parameters. Raises ConfigError for what has no place in a
    checkpoint.
    """
    training = LiveTraining(model, optimizer, world)
    # From here on steps are noticed, so that the next save knows whether gradients were used.
    watched = training.state.watch()
    check_restorable(training)
    _tell_of_gradients(training, watched, world)
    left_out = [] if frozen else [n for n, p in training.parameters.items() if not p.requires_grad]
    kept = training.shards.keys() - left_out
    shards = [replace(shard, name=name) for name, shard in training.shards.items() if name in kept]
    # Buffers may differ between ranks (statistics of their batches): the first rank's are saved, as the
    # model's own save has it.
    shards += [first_rank_shard(name, buffer, world) for name, buffer in training.buffers.items()]
    masters = [k for k in training.masters() if _is_copy(k, training)]
    shares = [replace(k.shard, name=f"master/{k.name}") for k in masters]
    shares += [replace(k.shard, name=f"optimizer/{k.key}/{k.name}") for k in training.moments()]
    shares += [replace(k.shard, name=f"gradient/{k.name}") for k in training.gradients()]
    local, of_ranks = local_states(training, world)
    shares += [*local, *(replace(k.shard, name=f"{k.key}/{k.name}") for k in beside)]
    shares += _random(world)
    tensors: dict[str, torch.Tensor] = {}
    document: JsonObject = {
        "format": FORMAT,
        "world_size": world.size,
        "torch": torch.__version__,
        "model": type(training.module).__name__,
        "ties": training.ties,
        "beside": sorted({kept.key for kept in beside}),
        "left_out": left_out,
        "optimizer": optimizer_document(training),
        "engine": _engine(training.state, tensors),
        "extra": encoded_whole(extra, "extra", tensors),
    }
    if of_ranks:
        document["optimizer"][LOCAL] = of_ranks
    document["around"] = encoded_whole(training.wrapper_buffers, "around", tensors)
    of_modules: dict[str, torch.Tensor] = {}
    document["modules"] = module_states(training.module, of_modules)
    shares += [first_rank_shard(name, tensor, world) for name, tensor in of_modules.items()]
    shares += [whole_shard(name, tensor, world) for name, tensor in tensors.items()]
    return Content(_entries(shards), _entries(shares), document, tensors, training.module, _root(training))


def _tell_of_gradients(training: LiveTraining, watched: bool, world: World) -> None:
    if watched or world.rank:
        return
    if any(parameter.grad is not None for parameter in training.state.parameters):
        logger.warning(
            "gradients are saved with the state, and a resumed run adds to them. If an optimizer "
            "step has already used them, call zero_grad() before saving: zerostart did not see "
            "the steps before this optimizer's first save"
        )


def check_restorable(live: LiveModel) -> None:
    """Raise ConfigError for a tensor of the model that could be saved, and not be written to again."""
    for name, tensor in [*live.parameters.items(), *live.buffers.items()]:
        if not isinstance(tensor, DTensor):
            check_own_memory(name, tensor)


def module_states(module: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """What modules keep beside tensors (``get_extra_state``), by their names, as ``encoded_whole`` has it."""
    return {
        plain_name(name): encoded_whole(inner.get_extra_state(), f"modules.{plain_name(name)}", tensors)
        for name, inner in module.named_modules()
        if type(inner).get_extra_state is not nn.Module.get_extra_state
    }


def _root(live: LiveModel) -> str:
    return live.record.catalog.root if live.record is not None else ""


def _is_copy(kept: StateTensor, training: LiveTraining) -> bool:
    return kept.shard.storage.dtype != training.shards[kept.name].storage.dtype


def _entries(shards: Sequence[Shard]) -> tuple[list[Entry], list[Outgoing]]:
    entries: list[Entry] = [(s.name, spelling(s.storage.dtype, s.name), s.layout.shape) for s in shards]
    return entries, [plain(s.name, s) for s in shards]


def _random(world: World) -> Iterator[Shard]:
    for name, row in random_rows().items():
        shape = (world.size, row.numel())
        at = functools.partial(dimension_shard, shape, 0, world_size=world.size)
        yield Shard(f"random/{name}", at(world.rank), row, at)


def _engine(state: TrainingState, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    found = state.counters()
    for key, component in state.components().items():
        found[key] = encoded_whole(component.state_dict(), key, tensors)
    return found


# The random states of a rank as rows of integers: of Python, NumPy, torch, and torch's device.


def random_rows() -> dict[str, torch.Tensor]:
    """This rank's state of each generator, as a 1-D CPU tensor whose length is the same on every rank."""
    version, words, gauss = random.getstate()
    # As integers alone, so that the states of all ranks are the rows of one tensor: the cached normal number
    # goes as its bits, with a 1 before it where there is one.
    found = {"python": [version, *words, *_optional(gauss)]}
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found["numpy"] = [*map(int, keys), int(position), int(has_gauss), _bits(float(cached))]
    rows = {name: torch.tensor(row, dtype=torch.int64, device="cpu") for name, row in found.items()}
    rows["torch"] = torch.get_rng_state()
    device = default_device()
    if device.type != "cpu":
        rows["device"] = torch.get_device_module(device).get_rng_state(device)
    return rows


def set_random_rows(rows: dict[str, torch.Tensor]) -> None:
    """Put back what ``random_rows`` gave; a device's is left out where there is none of its kind."""
    version, *words, has_gauss, bits = rows["python"].tolist()
    random.setstate((version, tuple(words), _value(bits) if has_gauss else None))
    *keys, position, has_gauss, bits = rows["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _value(bits)))
    torch.set_rng_state(rows["torch"])
    device = default_device()
    if "device" in rows and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(rows["device"], device)


def _optional(value: float | None) -> tuple[int, int]:
    return (0, 0) if value is None else (1, _bits(value))


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _value(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
