"""Compare the values that determine the course of a run, between ranks and with a checkpoint.

Every rank reads configuration and data itself. Ranks with different ones would wait for each other in a
collective. Paths may differ between machines, their contents may not.

A checkpoint stores the values that determine the course of its run. Left out are values that only change how
it is computed (ranks, engine, stage, precision, the division of a step), written or displayed.
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
from zerostart.training.config.sections import ConfigSection

#: Sections that are compared, and their keys that are not (or whose effect is compared instead).
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
            "epochs",  # counted as steps
        }
    ),
    "lora": frozenset({"targets", "exclude", "init", "start_from"}),
    "ema": frozenset({"place", "evaluate"}),
}
#: Schedules whose rates do not depend on the number of steps.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt"})
#: Bytes of each tensor in the digest of weights.
_SAMPLED_BYTES = 4 << 10


def agree(own: Mapping[str, object], world: World) -> None:
    """Raise ConfigError on every rank for a value that differs between ranks; collective."""
    ranks = world.all_gather_object({key: repr(value) for key, value in own.items()}, "comparing the ranks")
    for key in dict.fromkeys(key for facts in ranks for key in facts):
        values = [facts.get(key, "absent") for facts in ranks]
        deviant = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if deviant is not None:
            raise ConfigError(
                f"the ranks differ in {key} (rank 0: {values[0]}; rank {deviant}: {values[deviant]}): start "
                "all of them with the same configuration and the same data"
            )


def comparable(sections: Mapping[str, object]) -> dict[str, object]:
    """Return the values of sections by dotted keys, without paths."""
    values: dict[str, object] = {}
    for name, section in sections.items():
        own = section.comparable() if isinstance(section, ConfigSection) else {"": section}
        values |= {f"{name}.{key}".rstrip("."): value for key, value in own.items()}
    return values


def describe_course(
    sections: Mapping[str, ConfigSection | None], model: nn.Module, data: str, world: World
) -> dict[str, object]:
    """Return the values that determine the course of a run, by readable names; collective.

    ``model`` is the trained model, ``data`` the digest of its data. A LoRA adds a digest of the weights under
    it, which its checkpoints lack. Raises ReadError.
    """
    course: dict[str, object] = {"data": data}
    for name, free in _FREE.items():
        section = sections[name]
        if section is not None:
            course |= {f"{name}.{key}": value for key, value in section.comparable(free).items()}
    # The number of steps changes the rates of all other schedules.
    if course["train.schedule"] in _ENDLESS:
        del course["train.steps"]
    if "lora.rank" in course:
        # None means the rank.
        course["lora.alpha"] = course["lora.alpha"] or course["lora.rank"]
        names = sorted(plain_name(name) for name, held in model.named_parameters() if held.requires_grad)
        digest = hashlib.blake2b(repr(names).encode(), digest_size=4).hexdigest()
        course["lora.targets"] = f"{len(names)} tensors ({digest})"
        course["a digest of the weights of model.source"] = _digest_weights(get_record(model).catalog, world)
    return course


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Describe the changes from ``before`` to ``now``, except keys that one of them lacks."""
    return [
        f"{key} was {before[key]} and is {value}"
        for key, value in now.items()
        if key in before and before[key] != value
    ]


def _digest_weights(catalog: Catalog, world: World) -> str:
    storage = catalog.storage.reattach("so that the model of the LoRA cannot be compared; start a new run")

    def look() -> str:
        hashed = hashlib.blake2b(digest_size=8)
        with storage.reader() as reader:
            for name, entry in sorted(catalog.tensors.items()):
                hashed.update(f"{name} {entry.dtype} {entry.shape}".encode())
                # A strided view may end sooner than ``nbytes`` says.
                span = min(entry.nbytes, storage.sizes[entry.file] - entry.offset)
                some = bytearray(min(span, _SAMPLED_BYTES))
                if some:  # of the middle: padding is at an end
                    reader.read(entry.file, entry.offset + (span - len(some)) // 2, [memoryview(some)])
                hashed.update(some)
        return hashed.hexdigest()

    return world.broadcast_object(look, "looking at the weights")
