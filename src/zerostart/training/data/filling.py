"""Every item of the media through the encoders, on all ranks, into the files of a cache."""

from __future__ import annotations

import hashlib
import logging
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
from zerostart.training.data.cache_facts import CacheUpdate, Facts, facts_of_rows
from zerostart.training.data.cache_files import Draft, drafted, items_of_a_file, publish
from zerostart.training.data.cached import VERSION
from zerostart.training.data.items import FRAME_RATE
from zerostart.training.data.pictured import PicturedText
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.loop.terminal import say

if TYPE_CHECKING:
    from zerostart.training.data.items import MediaItems

logger = logging.getLogger("zerostart")
#: By whose versions, too, a killed run is one to go on with.
_LIBRARIES = ("diffusers", "torch", "transformers")
#: Seconds between two lines that tell how far it is.
_EVERY = 10.0
#: Rows that are tried for one to begin with, and bad ones that are named in one error.
_TRIED, _SHOWN = 64, 20


def fill(
    place: Path,
    update: CacheUpdate,
    media: MediaItems,
    encoder: Encoder,
    facts: Facts,
    texts: Sequence[str],
    world: World,
) -> None:
    """Make what is new of ``media`` for the cache at ``place``, or go on where a killed run was; collective.

    Ranks take files of items in turn. Encoders may be sharded: all ranks encode an item at the same time,
    and who has none left repeats the first. An item that the pipeline cannot take does not keep the others
    from being encoded, and put into the cache: afterwards ConfigError is raised, which names all such rows.
    """
    with world.collectives("encoding the first item", lambda: _first(media, encoder, update)) as first:
        # All ranks take part in this one, whose result is thrown away but for its size: how many items go
        # into a file must be the same everywhere, and after a resume.
        size = sum(t.nbytes for t in _encoded(encoder, first, 0).values())
    # Embeddings of texts that the cache has are not computed again, which with a sharded encoder all ranks
    # would have to.
    there = {} if update.cached is None else {t: update.cached.prompt(t) for t in update.cached.texts}
    # The empty text stands for a dropped prompt, whether somebody asks for that now or later.
    asked = ["", *texts] if encoder.texts_alone else texts
    prompts = {**there, **embedded(encoder, [text for text in asked if text not in there], world)}
    per_file = items_of_a_file(len(update.new_rows), size, encoder.settings.bytes_of_a_file)
    # All that the bytes of a draft follow from. Not the number of ranks, which a run that goes on may change.
    plan = {
        "version": VERSION,
        "items": len(update.new_rows),
        "per_file": per_file,
        "facts": facts.document(),
        "computed": {"device": encoder.device.type, **{name: version(name) for name in _LIBRARIES}},
        "first": 0 if update.cached is None else update.cached.next_file,
    }
    with drafted(place, plan, update, world) as (draft, goes_on):
        _fill_draft(draft, goes_on, update, media, encoder, first, world)
        # Read from the files, not from memory: failures of the killed run that this one went on with count,
        # too.
        failed = world.broadcast_object(draft.failures, "looking for what could not be encoded")
        # With rows that failed, or others that stay, the cache is not that of the media: of these rows alone.
        document, count = facts.document(), len(update.items) - len(failed)
        if count and (failed or update.requested < len(update.keys)):
            bad = {update.new_rows[at] for at in failed}
            keys = [key for row, key in enumerate(update.keys) if row not in bad]
            document["data"] = facts_of_rows(keys)
        if count:
            publish(place, update, draft, document, prompts, world)
        elif world.rank == 0:
            draft.drop()
    if failed:
        others = f"The other {count} are in {place}, and stay" if count else "Nothing was encoded"
        raise ConfigError(
            f"{len(failed)} row{'s' * (len(failed) > 1)} cannot be encoded: "
            f"{_listed(list(failed.values()))}. {others}: correct these rows or remove them, and start again"
        )
    if world.rank == 0:
        say(Console(), f"the cache is complete: {place}")


def _first(media: MediaItems, encoder: Encoder, update: CacheUpdate) -> Example:
    failures = []
    for row in update.new_rows[:_TRIED]:
        try:
            return _checked(media, encoder, row)
        except ConfigError as error:
            failures.append(str(error))
    raise ConfigError(_listed(failures))


def _listed(failures: Sequence[str]) -> str:
    more = f"; and {len(failures) - _SHOWN} more rows" if len(failures) > _SHOWN else ""
    return "; ".join(failures[:_SHOWN]) + more


def _fill_draft(
    draft: Draft,
    goes_on: bool,
    update: CacheUpdate,
    media: MediaItems,
    encoder: Encoder,
    first: Example,
    world: World,
) -> None:
    missing = world.broadcast_object(draft.missing, "looking for what is encoded")
    progress = _Progress(draft, len(missing), world)
    if goes_on:
        progress.say(
            f"going on with {draft.files - len(missing)} of {draft.files} files of a run that ended early"
        )
    # In each turn every rank makes one file. Sharded encoders are collective: a rank whose file is shorter,
    # or that has none, encodes the first example along with the others, and throws it away.
    turns = [missing[at : at + world.size] for at in range(0, len(missing), world.size)]
    own = [turn[world.rank] if world.rank < len(turn) else None for turn in turns]
    rows = [update.new_rows[place] for file in own if file is not None for place in draft.items(file)]
    # Made once for all turns: workers decode the next file's items while encoders are busy with this one's.
    examples = _Ahead(media, rows)
    too_long: list[str] = []
    for file, turn in zip(own, turns, strict=True):
        places = [] if file is None else list(draft.items(file))
        items: list[Encoded | str] = []
        # As many steps on every rank as the longest file of this turn has items.
        for step in range(max(len(draft.items(one)) for one in turn)):
            given = step < len(places)
            prepare = partial(examples.next, encoder) if given else (lambda: first)
            # ``prepare`` runs on each rank before any of them enters the encoder: what it raises on one is
            # raised on all.
            with world.collectives("encoding an item", prepare) as prepared:
                failed = isinstance(prepared, str)
                example = first if isinstance(prepared, str) else prepared
                encoder.lengths.begin()
                # Number 0 where nothing is kept: each item has a generator of its own, so that nobody's draws
                # are shifted.
                made = _encoded(encoder, example, draft.numbers[places[step]] if given and not failed else 0)
            if given:
                where = media.where(update.new_rows[places[step]])
                # What was cut is known after the encoding only: tokenizers count while the pipeline calls
                # them.
                long = encoder.cut()
                if long is not None and not isinstance(prepared, str):
                    too_long.append(f"{where}: {long}")
                refused = too_long[-1] if long and encoder.settings.long_prompts == "refuse" else None
                problem = prepared if isinstance(prepared, str) else _not_finite(made, where) or refused
                items.append(made if problem is None else problem)
                progress.step()
        if file is not None:
            # Outside the collectives: what fails here is told to the others at the next meeting.
            draft.write(file, items)
    world.raise_together(None, "all items are encoded")
    if too_long and encoder.settings.long_prompts == "cut":
        logger.warning("%d texts were cut off: %s", len(too_long), _listed(too_long))


def embedded(encoder: Encoder, texts: Sequence[str], world: World) -> dict[str, Encoded]:
    """What the encoder makes of each of ``texts`` alone; collective. Raises ConfigError where it cannot."""
    if not encoder.texts_alone and not all(isinstance(text, PicturedText) for text in texts):
        raise ConfigError(
            f"{encoder.kind} encodes texts with the pictures of their items, and none alone: leave "
            "cache.prompts out, and name the pictures of samples.prompts in samples.images"
        )
    found = {}
    # Every rank encodes every text: an encoder in shards needs all of them, and there are few.
    for text in dict.fromkeys(texts):
        with world.collectives("encoding a text"):
            encoder.lengths.begin()
            if isinstance(text, PicturedText):
                made = encoder.sample(text.text, text.pictures)
            else:
                made = encoder.prompt(text)
            found[text] = _copied(made)
        # Raised on all ranks alike, for all have the same numbers.
        if problem := _not_finite(found[text], f"the text {text!r}"):
            raise ConfigError(problem)
        if long := encoder.cut():
            if encoder.settings.long_prompts == "refuse":
                raise ConfigError(f"the text {text!r}: {long}")
            if world.rank == 0:
                logger.warning("the text %r was cut off: %s", text, long)
    return found


def _not_finite(made: Encoded, what: str) -> str | None:
    """What is wrong with numbers that a training would make nothing of but more of their kind; else None."""
    for name, tensor in made.items():
        if not bool(torch.isfinite(tensor).all()):
            settings = "vae_dtype" if "latents" in name or name == "condition" else "dtype"
            return (
                f"{what}: its {name} has values that are not finite: the encoder overflows in its dtype, or "
                f"its files are damaged; set cache.{settings} to bfloat16 or float32, or replace them"
            )
    return None


def _checked(media: MediaItems, encoder: Encoder, number: int, example: Any = None) -> Example:
    """Item ``number``, which the encoder can take. Raises ConfigError that names its row."""
    found: Example = media[number] if example is None else example
    if (rate := media.frame_rate(number)) is not None:
        # A setting of the data set, not a cell: the table cannot contradict it.
        found = {**found, FRAME_RATE: rate}
    try:
        encoder.check(found)
    except ConfigError as error:
        raise ConfigError(f"{media.where(number)}: {error}") from error
    return found


def _encoded(encoder: Encoder, example: Example, number: int) -> Encoded:
    text = f"{encoder.settings.seed} {number}".encode()
    # Of 63 bits, which every generator takes.
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    return _copied(encoder.encode(example, torch.Generator(device="cpu").manual_seed(seed)))


def _copied(tensors: Mapping[str, torch.Tensor]) -> Encoded:
    """The tensors by themselves, without the batch that they are out of."""
    # Into memory of its own: on a CPU it may be a view, which would keep all of the batch until the file is
    # written.
    return {name: torch.empty_like(t, device="cpu").copy_(t).contiguous() for name, t in tensors.items()}


class _Guarded(Dataset[Any]):
    """Items of the media by their numbers; what one fails with comes in its place, for the rank to raise."""

    def __init__(self, media: MediaItems, numbers: Sequence[int]) -> None:
        self.media = media
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> object:
        try:
            return self.media[self.numbers[place]]
        # As a value: what is raised in a worker arrives with the traceback in its text.
        except ZerostartError as error:
            return error


class _Ahead:
    """This rank's items one after the other, decoded by as many processes as ``media.workers`` says."""

    def __init__(self, media: MediaItems, numbers: Sequence[int]) -> None:
        self._media = media
        self._numbers = iter(numbers)
        loader: DataLoader[object] = DataLoader(
            _Guarded(media, numbers),
            batch_size=None,
            num_workers=media.config.workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(device="cpu"),  # of the seeds that workers get, which need none
        )
        self._found: Iterator[object] = iter(loader)

    def next(self, encoder: Encoder) -> Example | str:
        # Both run in step: the loader gives items in the order in which it was asked for them.
        number, example = next(self._numbers), next(self._found)
        if isinstance(example, ConfigError):
            return str(example)
        # A row that is wrong is noted and passed over; files that cannot be read end the run.
        if isinstance(example, ZerostartError):
            raise example
        try:
            return _checked(self._media, encoder, number, example)
        except ConfigError as error:
            return str(error)


def _as_it_is(value: object) -> object:
    return value


class _Progress:
    """Tells on rank 0 how far all ranks together are, about."""

    def __init__(self, draft: Draft, files: int, world: World) -> None:
        self._console = Console() if world.rank == 0 else None
        # At most: the last file may be shorter. Ranks are about equally far, so that rank 0 speaks for all.
        self._count = min(files * draft.per_file, draft.count)
        self._ranks = world.size
        self._done = 0
        self._begun = self._last = time.monotonic()
        files_told = "1 file" if draft.files == 1 else f"{draft.files} files"
        self.say(f"encoding {self._count} of {draft.count} items into {files_told}")

    def say(self, text: str) -> None:
        """Print a line."""
        if self._console is not None:
            say(self._console, text)

    def step(self) -> None:
        """One more item on this rank."""
        self._done += 1
        now = time.monotonic()
        if now - self._last > _EVERY:
            self._last, done = now, min(self._done * self._ranks, self._count)
            self.say(f"{done} of {self._count} items, {done / (now - self._begun):.1f} a second")
