"""What a run starts from, compared between its ranks and with the run that saved a checkpoint.

Every rank reads for itself. Ranks with other data, or another configuration, would train in another number of
rounds, and wait for each other in a collective. Paths may differ from machine to machine; what lies there may
not.

A checkpoint keeps the values that decide the course of its run. Not among them is what only changes how the
same is computed (ranks, engine, stage, precision, how a step is divided), what is written where, and what is
only displayed. Values that a checkpoint restores (the rate of the schedule, the optimizer's settings, the
place in the data) would silently not be those of the file: so they are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import World
from zerostart.engines import plain_name
from zerostart.errors import ConfigError
from zerostart.live.model import record_of
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.engine_config import engine_config, user_config
from zerostart.training.config.sections import Section
from zerostart.training.loop.evaluate import HeldOut, held_out_batches
from zerostart.training.loop.task import Items, Task, TaskData, task_class
from zerostart.training.samples.pipeline import Drawing
from zerostart.training.samples.sampler import open_drawing

#: The keys of what no key of the configuration says; the second stands in messages as it is.
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
            "epochs",  # which steps have become
        }
    ),
    "lora": frozenset({"targets", "exclude", "init", "start_from"}),
    "ema": frozenset({"place", "evaluate"}),
}
#: Schedules whose rates do not depend on how many steps there will be.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt"})
#: Bytes that are looked at of all weights together, and of one tensor at least and at most.
_LOOKED_AT, _LEAST, _MOST = 64 << 20, 4 << 10, 64 << 10


@dataclass(frozen=True)
class Inputs:
    """The task, its data, what the engine is configured with, and how samples are drawn, if any are."""

    task: Task
    items: Items
    held_out: HeldOut | None
    engine_config: dict[str, Any]
    drawing: Drawing | None


def read_inputs(config: TrainConfig, world: World) -> Inputs:
    """Read what ``config`` names, and make sure that all ranks of ``world`` have read the same; collective.

    Raises :class:`ConfigError` on every rank, with the same text, which names the ranks that differ and in
    what; or whatever one of them fails with.
    """
    with world.phase("reading the configuration and what the task starts from"):
        # From what every rank reads by itself to what it takes collectives to prepare, comparing after each.
        task = task_class(config.task.name)(config)
        task.open()
        drawing = open_drawing(config)  # before anything is encoded that could not be drawn with
        given = engine_config(config, world.size, task.hidden_size)
        facts = _facts(config, task)
    # Before the data: ranks with other settings would enter other collectives while data are prepared.
    _agree_on_facts(facts, world)
    with world.phase("preparing the data"):
        every = task.items(world)
    _agree_on_data(task, every, world)
    with world.phase("holding examples out"):
        items, rest = task.split(every)
        held_out = None
        if rest is not None:
            batches = held_out_batches(task, rest, config.train.batch_size, config.train.seed)
            held_out = HeldOut(batches, world.rank, world.size)
    return Inputs(task, items, held_out, given, drawing)


def _facts(config: TrainConfig, task: Task) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name, section in config:
        if name == "logging":  # of which rank 0's alone is looked at
            continue
        values = section.comparable() if isinstance(section, Section) else section
        facts |= _flat({name: values})
    return facts | _flat({"engine": {"config": user_config(config.engine)}}) | task.facts()


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Values of nested sections in words, by dotted keys."""
    words: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        words |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: repr(value)}
    return words


def _agree_on_facts(own: Mapping[str, str], world: World) -> None:
    ranks = world.all_gather_object(dict(own), "comparing the configurations")
    for key in dict.fromkeys(key for facts in ranks for key in facts):
        values = [facts.get(key, "absent") for facts in ranks]
        if len(set(values)) > 1:
            told = "; ".join(f"{_named(alike)}: {values[alike[0]]}" for alike in _groups(values))
            raise ConfigError(
                f"the ranks are configured differently: {key} ({told}). Start all of them with the "
                "same configuration, checkpoint and tokenizer"
            )


def _agree_on_data(task: TaskData, own: Items, world: World) -> None:
    with world.phase("describing the data"):
        mine = (own.digest(), task.described(own))
    ranks = world.all_gather_object(mine, "comparing the data")
    if len({digest for digest, _ in ranks}) > 1:
        groups = _groups(ranks)
        found = "; ".join(f"{_named(group)}: {ranks[group[0]][1]}" for group in groups)
        raise ConfigError(
            f"the data differ between the ranks ({found}). Every rank reads {task.data_key} itself: copy the "
            "same files to every machine, or name a directory that they share"
        )


def _groups(values: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _named(ranks: Sequence[int], shown: int = 8) -> str:
    numbers = ", ".join(map(str, ranks[:shown])) + (", ..." if len(ranks) > shown else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def fingerprint_of(config: TrainConfig, model: nn.Module, data: str, world: World) -> dict[str, object]:
    """The values that decide the course of a run, by readable names; collective.

    ``model`` is as it is trained, ``data`` the digest of what it is trained on. Of a LoRA the weights that it
    is for, which no checkpoint has, are among them. Raises ReadError.
    """
    course: dict[str, object] = {DATA: data}
    for name, free in _FREE.items():
        section = getattr(config, name)
        if section is not None:
            course |= {f"{name}.{key}": value for key, value in section.comparable(free).items()}
    # More steps then continue the same run; with the others they change the rate of every step.
    if config.train.schedule in _ENDLESS:
        del course["train.steps"]
    if config.lora is not None:
        # As it takes effect: the key itself may be None, for the rank of the LoRA.
        course["lora.alpha"] = config.lora.scaling * config.lora.rank
        course["lora.targets"] = _adapted(model)
        course[_BASE] = _weights(record_of(model).catalog, world)
    return course


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, str]:
    """By key, in words, what has changed from ``before`` to ``now``; keys that one of them lacks aside."""
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
    storage = catalog.storage.recalled("so that the model of the LoRA cannot be compared; start a new run")

    # By the first rank that can read them, for all: of a mapping not every rank holds the tensors.
    def look() -> str:
        hashed = hashlib.blake2b(digest_size=8)
        most = max(_LEAST, min(_MOST, _LOOKED_AT // max(1, len(catalog.tensors))))
        with storage.reader() as reader:
            for name, entry in sorted(catalog.tensors.items()):
                hashed.update(f"{name} {entry.dtype} {entry.shape}".encode())
                # Not beyond the end of the file, which for a tensor that is a strided view is sooner than
                # ``nbytes``.
                span = min(entry.nbytes, storage.sizes[entry.file] - entry.offset)
                some = bytearray(min(span, most))
                if some:  # out of the middle: what is padded or masked is at an end
                    reader.read(entry.file, entry.offset + (span - len(some)) // 2, [memoryview(some)])
                hashed.update(some)
        return hashed.hexdigest()

    return world.broadcast_object(look, "looking at the weights", storage.readers(world.size)[0])
