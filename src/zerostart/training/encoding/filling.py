"""Every item of the media through the encoders, on all ranks, into the files of a cache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from zerostart.distributed.world import World
from zerostart.errors import ConfigError, ZerostartError
from zerostart.training.cache_facts import Facts
from zerostart.training.cache_files import Draft, drafted, items_of_a_file, publish
from zerostart.training.cached import VERSION
from zerostart.training.encoding.base import Encoded, Encoder, Example
from zerostart.training.terminal import say

if TYPE_CHECKING:
    from zerostart.training.media.items import MediaItems

__all__ = ["embedded", "fill"]

#: By whose versions, too, a killed run is one to go on with.
_LIBRARIES = ("diffusers", "torch", "transformers")
#: Seconds between two lines that tell how far it is.
_TELL = 10.0


def fill(
    place: Path, media: MediaItems, encoder: Encoder, facts: Facts, texts: Sequence[str], world: World
) -> None:
    """Make the cache of ``media`` at ``place``, or go on with one that a killed run has left; collective.

    Ranks take files of items in turn. Encoders may be sharded: all ranks encode an item at the same time,
    and who has none left repeats the first. Raises ConfigError, naming the row, for an item that the
    pipeline cannot take.
    """
    with world.collectives("encoding the first item", lambda: _checked(media, encoder, 0)) as first:
        size = sum(t.nbytes for t in _encoded(encoder, first, 0).values())
    prompts = embedded(encoder, ["", *texts] if encoder.texts_alone else texts, world)
    per_file = items_of_a_file(len(media), size, encoder.settings.bytes_of_a_file)
    plan = {"version": VERSION, "items": len(media), "per_file": per_file, "facts": facts.document()}
    plan["computed"] = {"device": encoder.device.type, **{name: version(name) for name in _LIBRARIES}}
    with drafted(place, plan, world) as (draft, goes_on):
        _fill_draft(draft, goes_on, media, encoder, first, world)
        publish(place, draft, facts.document(), prompts, world)
    if world.rank == 0:
        say(Console(), f"the cache is complete: {place}")


def _fill_draft(
    draft: Draft, goes_on: bool, media: MediaItems, encoder: Encoder, first: Example, world: World
) -> None:
    """Make the files of items that are missing; collective."""
    missing = world.broadcast_object(draft.missing, "looking for what is encoded")
    progress = _Progress(draft, len(missing), world)
    if goes_on:
        progress.say(
            f"going on with {draft.files - len(missing)} of {draft.files} files of a run that ended early"
        )
    turns = [missing[at : at + world.size] for at in range(0, len(missing), world.size)]
    own = [turn[world.rank] if world.rank < len(turn) else None for turn in turns]
    examples = _Ahead(media, [number for file in own if file is not None for number in draft.items(file)])
    for file in own:
        numbers = [] if file is None else list(draft.items(file))
        items: list[Encoded] = []
        for step in range(draft.per_file):
            given = step < len(numbers)
            prepare = partial(examples.next, encoder) if given else (lambda: first)
            with world.collectives("encoding an item", prepare) as example:
                made = _encoded(encoder, example, numbers[step] if given else 0)
            if given:
                _check_finite(made, media.where(numbers[step]))
                items.append(made)
                progress.step()
        if file is not None:
            draft.write(file, items)
    world.raise_together(None, "all items are encoded")


def embedded(encoder: Encoder, texts: Sequence[str], world: World) -> dict[str, Encoded]:
    """What the encoder makes of each of ``texts`` alone; collective. Raises ConfigError where it cannot."""
    if texts and not encoder.texts_alone:
        raise ConfigError(
            f"{encoder.kind} encodes texts with the pictures of their items, and none alone: leave "
            "cache.prompts (and samples.prompts) out"
        )
    found = {}
    for text in dict.fromkeys(texts):
        with world.collectives("encoding a text"):
            found[text] = _kept(encoder.prompt(text))
        _check_finite(found[text], f"the text {text!r}")
    return found


def _check_finite(made: Encoded, what: str) -> None:
    """Raise ConfigError for numbers that a training would make nothing of but more of their kind."""
    for name, tensor in made.items():
        if not bool(torch.isfinite(tensor).all()):
            settings = "vae_dtype" if "latents" in name or name == "condition" else "dtype"
            raise ConfigError(
                f"{what}: its {name} is not made of finite numbers: the encoder overflows in its dtype, or "
                f"its files are damaged; set cache.{settings} to bfloat16 or float32, or replace them"
            )


def _checked(media: MediaItems, encoder: Encoder, number: int, example: Any = None) -> Example:
    """Item ``number``, which the encoder can take. Raises ConfigError that names its row."""
    found: Example = media[number] if example is None else example
    try:
        encoder.check(found)
    except ConfigError as error:
        raise ConfigError(f"{media.where(number)}: {error}") from error
    return found


def _encoded(encoder: Encoder, example: Example, number: int) -> Encoded:
    """The tensors of an item; what is drawn for it follows from its number and the seed alone."""
    text = f"{encoder.settings.seed} {number}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    return _kept(encoder.encode(example, torch.Generator(device="cpu").manual_seed(seed)))


def _kept(tensors: Mapping[str, torch.Tensor]) -> Encoded:
    """The tensors by themselves, without the batch that they are out of."""
    return {name: torch.empty_like(t, device="cpu").copy_(t).contiguous() for name, t in tensors.items()}


class _Guarded(Dataset[Any]):
    """Items of the media by their numbers; what one fails with comes in its place, for the rank to raise."""

    def __init__(self, media: MediaItems, numbers: Sequence[int]) -> None:
        self.media = media
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Any:
        try:
            return self.media[self.numbers[place]]
        except ZerostartError as error:
            return error


class _Ahead:
    """This rank's items one after the other, decoded by as many processes as ``media.workers`` says."""

    def __init__(self, media: MediaItems, numbers: Sequence[int]) -> None:
        self._media = media
        self._numbers = iter(numbers)
        loader: DataLoader[Any] = DataLoader(
            _Guarded(media, numbers),
            batch_size=None,
            num_workers=media.config.workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(device="cpu"),  # of the seeds that workers get, which need none
        )
        self._found: Iterator[Any] = iter(loader)

    def next(self, encoder: Encoder) -> Example:
        """The next item. Raises what decoding it, or checking it, fails with."""
        number, example = next(self._numbers), next(self._found)
        if isinstance(example, ZerostartError):
            raise example
        return _checked(self._media, encoder, number, example)


def _as_it_is(value: Any) -> Any:
    return value


class _Progress:
    """Tells on rank 0 how far all ranks together are, about."""

    def __init__(self, draft: Draft, files: int, world: World) -> None:
        self._console = Console() if world.rank == 0 else None
        self._count = min(files * draft.per_file, draft.count)
        self._ranks = world.size
        self._done = 0
        self._begun = self._told = time.monotonic()
        self.say(f"encoding {self._count} of {draft.count} items into {draft.files} files")

    def say(self, text: str) -> None:
        """Print a line."""
        if self._console is not None:
            say(self._console, text)

    def step(self) -> None:
        """One more item on this rank."""
        self._done += 1
        now = time.monotonic()
        if now - self._told > _TELL:
            self._told, done = now, min(self._done * self._ranks, self._count)
            self.say(f"{done} of {self._count} items, {done / (now - self._begun):.1f} a second")
