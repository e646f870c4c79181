"""What decides the course of a run: kept in its checkpoints, and compared where one goes on from them.

Not compared is what changes nothing but how the same is computed (ranks, engine, stage, precision, how a step
is divided), what is written where, and what is only looked at. Values that a checkpoint restores (the rate of
the schedule, the optimizer's settings, the place in the data) would silently not be those of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import World
from zerostart.engines import plain_name
from zerostart.live.record import record_of
from zerostart.training.config.train import TrainConfig

DATA, _BASE = "data", "a digest of the weights of model.source"
#: Of each section that counts, the keys that do not; what ``lora.targets`` and the like name is compared.
_FREE: Mapping[str, frozenset[str]] = {
    "task": frozenset(),
    "train": frozenset(
        {
            "batch_size",
            "accumulation",
            "mixed_precision",
            "evaluate_every",
            "checkpoint_blocks",
            "patience_nonfinite",
        }
    ),
    "lora": frozenset({"targets", "exclude", "init", "start_from"}),
    "ema": frozenset({"place", "evaluate"}),
}
#: What of a course may change where ``resume.accept`` has the word.
ACCEPTED: Mapping[str, frozenset[str]] = {
    "data": frozenset({DATA}),
    "lr": frozenset({"train.learning_rate", "train.schedule", "train.warmup_steps", "train.steps"}),
}
#: Schedules whose rates do not depend on how many steps there will be.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt"})
#: Bytes that are looked at of all weights together, and of one tensor at least and at most.
_LOOKED_AT, _LEAST, _MOST = 64 << 20, 4 << 10, 64 << 10


def course_of(config: TrainConfig, model: nn.Module, data: str, world: World) -> dict[str, Any]:
    """By what people call them, the values that decide the course of a run; collective.

    ``model`` is as it is trained, ``data`` the digest of what it is trained on. Of a LoRA the weights that it
    is for, which no checkpoint has, are among them. Raises ReadError.
    """
    course: dict[str, Any] = {DATA: data}
    for name, free in _FREE.items():
        section = getattr(config, name)
        if section is not None:
            values = section.model_dump(mode="json", exclude=set(free | section.places))
            course |= {f"{name}.{key}": value for key, value in values.items()}
    if config.train.schedule in _ENDLESS:
        del course["train.steps"]
    if config.lora is not None:
        course["lora.alpha"] = config.lora.scaling * config.lora.rank
        course["lora.targets"] = _adapted(model)
        course[_BASE] = _weights(record_of(model).catalog, world)
    return course


def departures(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """By key, in words, in what ``now`` is not the course ``before``; what one says nothing of aside."""
    return {
        key: f"{key} was {before[key]} and is {now[key]}"
        for key in now
        if key in before and before[key] != now[key]
    }


def _adapted(model: nn.Module) -> str:
    """How many tensors the adapters have, and a digest of their names."""
    names = sorted(plain_name(name) for name, held in model.named_parameters() if held.requires_grad)
    return f"{len(names)} tensors ({hashlib.blake2b(repr(names).encode(), digest_size=4).hexdigest()})"


def _weights(catalog: Catalog, world: World) -> str:
    """A digest of names, types, shapes and some bytes of each tensor, wherever they lie; collective."""
    storage = catalog.storage.recalled("so that it cannot be told what the LoRA is for; start anew")

    def look() -> str:
        hashed = hashlib.blake2b(digest_size=8)
        most = max(_LEAST, min(_MOST, _LOOKED_AT // max(1, len(catalog.tensors))))
        with storage.reader() as reader:
            for name, entry in sorted(catalog.tensors.items()):
                hashed.update(f"{name} {entry.dtype} {entry.shape}".encode())
                span = min(entry.nbytes, storage.sizes[entry.file] - entry.offset)
                some = bytearray(min(span, most))
                if some:  # out of the middle: what is padded or masked is at an end
                    reader.read(entry.file, entry.offset + (span - len(some)) // 2, [memoryview(some)])
                hashed.update(some)
        return hashed.hexdigest()

    return world.broadcast_object(look, "looking at the weights", storage.readers(world.size)[0])
