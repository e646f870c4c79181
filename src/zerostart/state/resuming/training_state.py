"""Collect the content of a training checkpoint from a live model and its optimizer.

``model/`` has parameters and persistent buffers under their state-dict names. ``state/`` has everything else:
``master/NAME``, ``optimizer/KEY/NAME``, ``gradient/NAME``, ``random/GENERATOR`` (a row for each rank),
``extra...``, and further tensors of parameters as ``KEY/NAME``. Numbers, settings and counters are in
``state.json``.
"""

from __future__ import annotations

import functools
import logging
import random
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
from zerostart.state.resuming.optimizer import LOCAL, collect_local_states, describe_optimizer
from zerostart.state.resuming.values import encode_checked
from zerostart.state.saving.writing import Entry, Outgoing, describe_share

logger = logging.getLogger("zerostart")

#: Version of the format; readers know it and all earlier ones.
FORMAT = 1
MARKER = STATE_MARKER
MODEL, STATE = "model", "state"


@dataclass(frozen=True)
class Content:
    """A checkpoint to write: this rank's shares of both folders, and the document."""

    model: tuple[list[Entry], list[Outgoing]]
    state: tuple[list[Entry], list[Outgoing]]
    document: JsonObject
    #: Tensors of ``extra`` and of schedules, whole on every rank.
    whole: dict[str, torch.Tensor]
    module: nn.Module
    #: Source directory of the model; empty for one that zerostart has not loaded.
    root: str


def collect_content(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: object,
    world: World,
    frozen: bool = True,
    extra_tensors: Sequence[StateTensor] = (),
) -> Content:
    """Collect everything to save, without copies; ``frozen`` includes frozen parameters.

    ``extra_tensors`` are further tensors of parameters. Raises ConfigError for unsupported values.
    """
    training = LiveTraining(model, optimizer, world)
    # Watch steps from now on, so that the next save knows whether gradients were used.
    watched = training.state.watch()
    check_restorable(training)
    _warn_of_gradients(training, watched, world)
    left_out = [] if frozen else [n for n, p in training.parameters.items() if not p.requires_grad]
    shards = [replace(shard, name=name) for name, shard in training.shards.items() if name not in left_out]
    # Buffers may differ between ranks (batch statistics): save the first rank's, as ``save`` does.
    shards += [first_rank_shard(name, buffer, world) for name, buffer in training.buffers.items()]
    shares = [
        replace(k.shard, name=f"master/{k.name}")
        for k in training.masters()
        if k.shard.storage.dtype != training.shards[k.name].storage.dtype
    ]
    shares += [replace(k.shard, name=f"optimizer/{k.key}/{k.name}") for k in training.moments()]
    shares += [replace(k.shard, name=f"gradient/{k.name}") for k in training.gradients()]
    local, of_ranks = collect_local_states(training, world)
    shares += [*local, *(replace(k.shard, name=f"{k.key}/{k.name}") for k in extra_tensors)]
    shares += _random_shards(world)
    tensors: dict[str, torch.Tensor] = {}
    document: JsonObject = {
        "format": FORMAT,
        "world_size": world.size,
        "torch": torch.__version__,
        "model": type(training.module).__name__,
        "ties": training.ties,
        "beside": sorted({tensor.key for tensor in extra_tensors}),
        "left_out": left_out,
        "optimizer": describe_optimizer(training),
        "engine": _encode_engine(training.state, tensors),
        "extra": encode_checked(extra, "extra", tensors),
    }
    if of_ranks:
        document["optimizer"][LOCAL] = of_ranks
    document["around"] = encode_checked(training.wrapper_buffers, "around", tensors)
    of_modules: dict[str, torch.Tensor] = {}
    document["modules"] = encode_module_states(training.module, of_modules)
    shares += [first_rank_shard(name, tensor, world) for name, tensor in of_modules.items()]
    shares += [whole_shard(name, tensor, world) for name, tensor in tensors.items()]
    root = training.record.catalog.root if training.record is not None else ""
    return Content(
        _describe_shards(shards), _describe_shards(shares), document, tensors, training.module, root
    )


def _warn_of_gradients(training: LiveTraining, watched: bool, world: World) -> None:
    if watched or world.rank:
        return
    if any(parameter.grad is not None for parameter in training.state.parameters):
        logger.warning(
            "gradients are saved with the state, and a resumed run adds to them. If an optimizer "
            "step has already used them, call zero_grad() before saving: zerostart did not see "
            "the steps before this optimizer's first save"
        )


def check_restorable(live: LiveModel) -> None:
    """Raise ConfigError for a tensor that could be saved but not restored."""
    for name, tensor in [*live.parameters.items(), *live.buffers.items()]:
        if not isinstance(tensor, DTensor):
            check_own_memory(name, tensor)


def encode_module_states(module: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """Return the encoded extra state (``get_extra_state``) of modules by name."""
    return {
        plain_name(name): encode_checked(inner.get_extra_state(), f"modules.{plain_name(name)}", tensors)
        for name, inner in module.named_modules()
        if type(inner).get_extra_state is not nn.Module.get_extra_state
    }


def _describe_shards(shards: Sequence[Shard]) -> tuple[list[Entry], list[Outgoing]]:
    entries: list[Entry] = [(s.name, spelling(s.storage.dtype, s.name), s.layout.shape) for s in shards]
    return entries, [describe_share(s.name, s) for s in shards]


def _random_shards(world: World) -> Iterator[Shard]:
    for name, row in get_random_rows().items():
        shape = (world.size, row.numel())
        at = functools.partial(dimension_shard, shape, 0, world_size=world.size)
        yield Shard(f"random/{name}", at(world.rank), row, at)


def _encode_engine(state: TrainingState, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    engine = state.counters()
    for key, component in state.components().items():
        engine[key] = encode_checked(component.state_dict(), key, tensors)
    return engine


# Random states of Python, NumPy, torch and torch's device as rows of integers.


def get_random_rows() -> dict[str, torch.Tensor]:
    """Return the state of each generator as a 1-D CPU tensor of fixed length."""
    version, words, gauss = random.getstate()
    # Integers, so that the states of all ranks are rows of one tensor: the cached normal number is written as
    # its bits, after a 1 if there is one.
    states = {"python": [version, *words, int(gauss is not None), _float_to_bits(gauss or 0.0)]}
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states["numpy"] = [*map(int, keys), int(position), int(has_gauss), _float_to_bits(float(cached))]
    rows = {name: torch.tensor(row, dtype=torch.int64, device="cpu") for name, row in states.items()}
    rows["torch"] = torch.get_rng_state()
    device = default_device()
    if device.type != "cpu":
        rows["device"] = torch.get_device_module(device).get_rng_state(device)
    return rows


def set_random_rows(rows: dict[str, torch.Tensor]) -> None:
    """Restore the generators from ``get_random_rows``; skip the device's without such a device."""
    version, *words, has_gauss, bits = rows["python"].tolist()
    random.setstate((version, tuple(words), _bits_to_float(bits) if has_gauss else None))
    *keys, position, has_gauss, bits = rows["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _bits_to_float(bits))
    )
    torch.set_rng_state(rows["torch"])
    device = default_device()
    if "device" in rows and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(rows["device"], device)


def _float_to_bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _bits_to_float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
