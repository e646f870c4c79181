"""The values that decide the course of a run: alike on all ranks, and in the run that saved a checkpoint.

Every rank reads for itself. Ranks with other data, or another configuration, would train in another number of
rounds, and wait for each other in a collective. Paths may differ from machine to machine; what lies there may
not.

A checkpoint keeps the values that decide the course of its run. Not among them is what only changes how the
same is computed (ranks, engine, stage, precision, how a step is divided), what is written where, and what is
only displayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import World
from zerostart.engines import plain_name
from zerostart.errors import ConfigError
from zerostart.live.model import get_record
from zerostart.training.config.sections import Section

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
#: Bytes that are looked at of each tensor.
_LOOKED_AT = 4 << 10


def agree(own: Mapping[str, object], world: World) -> None:
    """Raise ConfigError, the same on every rank, for a value that differs between ranks; collective."""
    ranks = world.all_gather_object({key: repr(value) for key, value in own.items()}, "comparing the ranks")
    for key in dict.fromkeys(key for facts in ranks for key in facts):
        values = [facts.get(key, "absent") for facts in ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"the ranks differ in {key} (rank 0: {values[0]}; rank {other}: {values[other]}): start all "
                "of them with the same configuration and the same data"
            )


def comparable(sections: Mapping[str, object]) -> dict[str, object]:
    """Values of sections by dotted keys, paths aside."""
    found: dict[str, object] = {}
    for name, section in sections.items():
        values = section.comparable() if isinstance(section, Section) else {"": section}
        found |= {f"{name}.{key}".rstrip("."): value for key, value in values.items()}
    return found


def course_of(
    sections: Mapping[str, Section | None], model: nn.Module, data: str, world: World
) -> dict[str, object]:
    """The values that decide the course of a run, by readable names; collective.

    ``model`` is as it is trained, ``data`` the digest of what it is trained on. Of a LoRA the weights that it
    is for, which no checkpoint has, are among them. Raises ReadError.
    """
    course: dict[str, object] = {"data": data}
    for name, free in _FREE.items():
        section = sections[name]
        if section is not None:
            course |= {f"{name}.{key}": value for key, value in section.comparable(free).items()}
    # More steps then continue the same run; with the others they change the rate of every step.
    if course["train.schedule"] in _ENDLESS:
        del course["train.steps"]
    if "lora.rank" in course:
        # As it takes effect: the key itself may be None, for the rank of the LoRA.
        course["lora.alpha"] = course["lora.alpha"] or course["lora.rank"]
        names = sorted(plain_name(name) for name, held in model.named_parameters() if held.requires_grad)
        digest = hashlib.blake2b(repr(names).encode(), digest_size=4).hexdigest()
        course["lora.targets"] = f"{len(names)} tensors ({digest})"
        course["a digest of the weights of model.source"] = _weights(get_record(model).catalog, world)
    return course


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """In words, what has changed from ``before`` to ``now``; keys that one of them lacks aside."""
    return [
        f"{key} was {before[key]} and is {value}"
        for key, value in now.items()
        if key in before and before[key] != value
    ]


def _weights(catalog: Catalog, world: World) -> str:
    storage = catalog.storage.recalled("so that the model of the LoRA cannot be compared; start a new run")

    # By the first rank that can read them, for all: of a mapping not every rank holds the tensors.
    def look() -> str:
        hashed = hashlib.blake2b(digest_size=8)
        with storage.reader() as reader:
            for name, entry in sorted(catalog.tensors.items()):
                hashed.update(f"{name} {entry.dtype} {entry.shape}".encode())
                # A tensor that is a strided view ends sooner than ``nbytes`` says.
                span = min(entry.nbytes, storage.sizes[entry.file] - entry.offset)
                some = bytearray(min(span, _LOOKED_AT))
                if some:  # out of the middle: what is padded or masked is at an end
                    reader.read(entry.file, entry.offset + (span - len(some)) // 2, [memoryview(some)])
                hashed.update(some)
        return hashed.hexdigest()

    return world.broadcast_object(look, "looking at the weights")
