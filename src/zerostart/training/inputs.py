"""What a run starts from, read by every rank for itself, and found out to be the same on all of them.

Ranks with other data, or another configuration, would train in another number of rounds, and wait for each
other in a collective. Paths may differ from machine to machine; what lies there may not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.layout import Mesh
from zerostart.training.config import TrainConfig
from zerostart.training.data import Sequences, file_digests, iter_documents, split_held_out, tokenize
from zerostart.training.engine_config import engine_config, own_config
from zerostart.training.evaluate import HeldOut, held_out_batches
from zerostart.training.tasks import load_tokenizer, make_collator, read_settings

__all__ = ["Inputs", "read_inputs"]


@dataclass(frozen=True)
class Inputs:
    """The model's ``settings``, the tokenizer, the data, and what the engine is configured with."""

    settings: Any  # a transformers PretrainedConfig
    tokenizer: Any
    sequences: Sequences
    held_out: HeldOut | None
    engine_config: dict[str, Any]


def read_inputs(config: TrainConfig, world: World) -> Inputs:
    """Read what ``config`` names, and make sure that all ranks of ``world`` have read the same; collective.

    Raises :class:`ConfigError` on every rank, with the same text, which names the ranks that differ and in
    what; or whatever one of them fails with.
    """
    with world.phase("reading the configuration and the tokenizer"):
        settings = read_settings(config)
        tokenizer = load_tokenizer(config)
        _check_vocabulary(tokenizer, settings)
        given = engine_config(config, world.size, getattr(settings, "hidden_size", None))
        facts = _facts(config, settings, tokenizer)
    _agree_on_facts(facts, world)
    with world.phase("preparing the data"):
        every = tokenize(iter_documents(config.data), tokenizer, config.data)
    _agree_on_data(config, every, world)
    with world.phase("holding sequences out"):
        sequences, rest = split_held_out(every, config.data.held_out)
        held_out = None if rest is None else _held_out(config, tokenizer, rest, world)
    return Inputs(settings, tokenizer, sequences, held_out, given)


def _check_vocabulary(tokenizer: Any, settings: Any) -> None:
    size = settings.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, but the model knows only {size}")


def _held_out(config: TrainConfig, tokenizer: Any, sequences: Sequences, world: World) -> HeldOut:
    # The same seed on every rank and in every run, so that the same tokens are hidden.
    collator = make_collator(config.task, tokenizer, seed=config.train.seed)
    batches = held_out_batches(sequences, collator, config.task, config.train.batch_size)
    mesh = Mesh(world.size, sequence_parallel=config.engine.sequence_parallel)
    return HeldOut(batches, *mesh.batch(world.rank))


def _facts(config: TrainConfig, settings: Any, tokenizer: Any) -> dict[str, str]:
    """By key what has to be alike: the configuration but for paths and display, and what is at the paths."""
    values = config.model_dump(
        exclude={
            "model": {"source"},
            "data": {"source", "tokenizer"},
            "engine": {"config"},
            "output": True,
            "logging": True,
            "tracking": {"project"},
        }
    )
    values["engine"]["config"] = own_config(config)
    facts = {key: repr(value) for key, value in _flat(values)}
    described = {**settings.to_dict(), "_name_or_path": None}
    facts["the model's config.json"] = _short(repr(sorted(described.items())))
    special = (tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.all_special_ids)
    facts["the tokenizer"] = _short(repr((sorted(tokenizer.get_vocab().items()), special)))
    return facts


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Values of nested sections, by dotted keys."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _agree_on_facts(own: Mapping[str, str], world: World) -> None:
    ranks = world.all_gather_object(dict(own), "comparing the configurations")
    for key in dict.fromkeys(key for facts in ranks for key in facts):
        values = [facts.get(key, "absent") for facts in ranks]
        if len(set(values)) > 1:
            told = "; ".join(f"{_named(alike)}: {values[alike[0]]}" for alike in _groups(values))
            raise ConfigError(
                f"the ranks are configured differently: {key} ({told}). Start all of them with the same "
                "configuration, checkpoint and tokenizer"
            )


def _agree_on_data(config: TrainConfig, own: Sequences, world: World) -> None:
    mine = (own.digest(), f"{len(own):,} sequences of {own.tokens.numel():,} tokens")
    ranks = world.all_gather_object(mine, "comparing the data")
    groups = _groups([digest for digest, _ in ranks])
    if len(groups) == 1:
        return
    with world.phase("looking for the files that differ"):
        digests = file_digests(config.data)
    files = world.all_gather_object(digests, "comparing the files of the data")
    most, *others = groups
    told = "; ".join(
        f"{_named(other)} ({ranks[other[0]][1]}; {_first_difference(files[most[0]], files[other[0]])})"
        for other in others
    )
    raise ConfigError(
        f"the data differ between the ranks: {told} from {_named(most)} ({ranks[most[0]][1]}). Every rank "
        "reads data.source for itself: copy the same files to every machine, or name a directory they share"
    )


def _groups(values: Sequence[Hashable]) -> list[list[int]]:
    """Ranks with equal values; the largest group first, of equals that with the lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _named(ranks: Sequence[int], shown: int = 8) -> str:
    numbers = ", ".join(map(str, ranks[:shown])) + (", ..." if len(ranks) > shown else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def _first_difference(usual: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Which file of ``other`` is not as it is elsewhere, in words."""
    for name in usual:
        if name not in other:
            return f"without {name}"
    for name, digest in other.items():
        if name not in usual:
            return f"with {name} besides"
        if digest != usual[name]:
            return f"with another {name}"
    return "from the same files"
