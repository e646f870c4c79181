"""The cache of a run: opened where it fits what is asked for, else made first."""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from zerostart.checkpoint.manifest import HIDDEN
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.write.folders import write_whole
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.cache_facts import CacheUpdate, Facts, differences, facts_of_media
from zerostart.training.data.cache_files import publish, publish_prompts
from zerostart.training.data.cached import FOLDER, CachedItems, Share, read_manifest
from zerostart.training.data.encoders import KNOWN_FILES, encoder_files, encoders
from zerostart.training.data.filling import embedded, fill
from zerostart.training.data.items import MediaItems, RowDigests, read_media
from zerostart.training.data.pictured import sample_texts
from zerostart.training.data.table import is_gone
from zerostart.training.loop.terminal import say

if TYPE_CHECKING:
    from zerostart.training.config.configuration import TrainConfig

logger = logging.getLogger("zerostart")
#: In a cache: digests of the rows of its media as they were found. No part of what it is.
_ROWS = ".media.known"
#: What the names begin with of what lies where a cache was to be, and its making was killed or failed.
_LEFT = (_ROWS, KNOWN_FILES, HIDDEN)


@dataclass(frozen=True)
class _Wanted:
    """What a run asks of the cache in ``directory``: ``media`` and ``texts`` by the encoders at ``source``.

    ``media`` are None where there are none any more; ``part``: they are the first rows of a table alone.
    """

    directory: Path
    source: str
    media: MediaItems | None
    part: bool
    texts: Sequence[str]
    facts: Facts


def ensure_cache(config: TrainConfig, world: World) -> CachedItems:
    """The items that ``config`` asks for, encoded; collective, and the same on every rank.

    A cache that is there and fits is opened, and no file of media or of an encoder is that has not changed
    since it was compared; with the media gone, too. Where there is none the encoders are loaded, what
    ``media`` names goes through them, and they are let go before this returns; where the media have rows
    that the cache has not, these alone do, and items go whose rows have gone. Raises ConfigError, on every
    rank, for a cache that was made with other encoders or by other settings, saying which, for rows that
    cannot be encoded, and what the reading of media and encoders raises.
    """
    settings = config.cache or CacheConfig()
    with world.phase("opening the cache"):
        directory = _directory(config, settings)
        source = settings.source or config.model.source
        # Rank 0 looks for all: on a network file system the others may see another state, and take another
        # branch.
        document = world.broadcast_object(lambda: read_manifest(directory), "looking for a cache")
        media = _media(config, directory, document is not None, world)
        texts = _texts(config, settings)
        # Before anything is read or encoded: a difference in settings is cheap to find here, and expensive
        # later.
        _check_alike(config, settings, texts, world)
        if document is None:
            _check_directory(directory, media)
        # None: the encoders are not here, and a cache that fits is used without comparing them.
        files = encoder_files(source, directory, world)
        described = None if media is None else facts_of_media(media)
        facts = Facts(described, None if files is None else files.facts(), settings)
        # `items` limits a table: what the cache has beyond these rows may be in the rest of it, and is not
        # dropped.
        part = config.media is not None and any(one.items for one in config.media.sets)
        wanted = _Wanted(directory, source, media, part, texts, facts)
        if document is None:
            assert media is not None, "it was checked"
            update: CacheUpdate | None = CacheUpdate.of(media.keys, None)
        else:
            update = _update(wanted)
            _check_fits(wanted, document["cache"], update)
        told = {} if document is None else document["cache"]["facts"]
        try:
            chosen = _bring_up_to_date(wanted, update, told, world)
        finally:  # also where some rows were bad: the next start is to read those alone
            if world.rank == 0 and files is not None:
                files.remember(directory)
            if world.rank == 0 and media is not None:
                _remember(directory, media)
        return CachedItems(directory, chosen=chosen, shares=_shares(config, media, told))


def _shares(config: TrainConfig, media: MediaItems | None, made: Mapping[str, Any]) -> list[Share]:
    """What an epoch has of each data set; ``made`` says how many items each has whose media are gone.

    None of a cache alone. Raises ConfigError where that does not say.
    """
    if config.media is None:
        return []
    sets = config.media.sets
    if media is not None:
        known = [[len(one), one.config.orders] for one in media.sets]
    else:
        # A cache of one data set without orders says only how many items it has.
        known = made["data"].get("sets", [[made["data"]["items"], 1]])
    if [orders for _, orders in known] != [one.orders for one in sets]:
        raise ConfigError(
            "media: the data are not there any more, and the cache was made of other data sets, or with "
            "another caption_shuffles: put back what they were, or the data"
        )
    return [
        Share(count // one.orders, one.repeats, one.orders)
        for (count, _), one in zip(known, sets, strict=True)
    ]


def _bring_up_to_date(
    wanted: _Wanted, update: CacheUpdate | None, made: Mapping[str, Any], world: World
) -> list[int] | None:
    """Have the cache, ``made`` of these facts, hold the rows and texts that are wanted; collective.

    Gives the numbers of the items that are wanted; None: all.
    """
    # There is no cache yet: everything is new.
    if update is not None and update.cached is None:
        _encode(wanted, update, world)
        return None
    chosen = None
    # The same items may have come into other data sets, which is noted for when the media are gone.
    moved = update is not None and not wanted.part and made["data"] != wanted.facts.data
    if update is not None and (moved or not update.is_empty):
        chosen = _change_items(wanted, update, world)
    # Read by rank 0 after the items: encoding them has brought the texts along.
    there = world.broadcast_object(lambda: CachedItems(wanted.directory).texts, "looking at the cache")
    # Only texts are new: encoders are loaded for these, and files of items are not touched.
    if missing := [text for text in wanted.texts if text not in there]:
        with encoders(wanted.source, wanted.facts.settings, world) as encoder:
            added = embedded(encoder, missing, world)
        publish_prompts(wanted.directory, added, world)
    return chosen


def _update(wanted: _Wanted) -> CacheUpdate | None:
    """What the cache has of the media; None where it does not say, or has nothing: it is another's."""
    if wanted.media is None:
        return None
    cached = CachedItems(wanted.directory)
    if cached.rows is None:
        return None
    update = CacheUpdate.of(wanted.media.keys, cached, wanted.part)
    # Not one row in common: rather the wrong directory than data that have all changed. It is refused later.
    return update if any(item is not None for item in update.items[: update.requested]) else None


def _change_items(wanted: _Wanted, update: CacheUpdate, world: World) -> list[int] | None:
    """Have a cache hold the rows of the media, and no others; collective.

    Where these are a part alone, nothing is dropped: their numbers in the cache are what is given.
    """
    assert update.cached is not None, "there is a cache"
    there = [item for item in update.items[: update.requested] if item is not None]
    cache = f"the cache {wanted.directory} has"
    if update.new_rows:
        _say(f"{cache} {len(there)} of {update.requested} rows: encoding the others", world)
        _encode(wanted, update, world)
        # Published in the order of the update: rows that are asked for come first, what else the cache has
        # behind.
        return list(range(update.requested)) if wanted.part else None
    if wanted.part:
        return there
    _say(f"{cache} {len(update.cached)} items, of which {len(there)} have a row still", world)
    document = {**update.cached.facts, "data": wanted.facts.data}
    # No encoder is needed to drop items: the index is written anew, and texts are copied.
    prompts = {text: update.cached.prompt(text) for text in update.cached.texts}
    publish(wanted.directory, update, None, document, prompts, world)
    return None


def _encode(wanted: _Wanted, update: CacheUpdate, world: World) -> None:
    """Encode the rows that are new; collective."""
    assert wanted.media is not None, "its rows are new"
    with encoders(wanted.source, wanted.facts.settings, world) as encoder:
        fill(wanted.directory, update, wanted.media, encoder, wanted.facts, wanted.texts, world)


def _say(text: str, world: World) -> None:
    if world.rank == 0:
        say(Console(), text)


def _directory(config: TrainConfig, settings: CacheConfig) -> Path:
    given = settings.directory
    path = Path(config.output.directory) / FOLDER if given is None else Path(given)
    return expanded(path).absolute()


def _media(config: TrainConfig, directory: Path, cached: bool, world: World) -> MediaItems | None:
    """The media; None where there are none any more, and a cache that was made of them."""
    if config.media is None:
        return None
    sources = [one.source for one in config.media.sets]
    # All of several data sets have to be gone: if one is left, absent files of the others are an error.
    if cached and world.broadcast_object(lambda: all(map(is_gone, sources)), "looking for the media"):
        if world.rank == 0:
            logger.warning(
                "media.source %s does not exist any more: the items of the cache %s are used",
                " and ".join(sources),
                directory,
            )
        return None
    earlier = RowDigests()
    with contextlib.suppress(OSError):  # none yet
        earlier = RowDigests.unpacked((directory / _ROWS).read_bytes())
    return read_media(config.media, world, earlier)


def _remember(directory: Path, media: MediaItems) -> None:
    path, data = directory / _ROWS, media.digests_to_remember.packed()
    with contextlib.suppress(OSError):
        if not path.is_file() or path.read_bytes() != data:
            write_whole(path, data, directory / f"{_ROWS}.{os.getpid()}.part", durable=False)


def _texts(config: TrainConfig, settings: CacheConfig) -> list[str]:
    prompts, negatives = ([], []) if config.samples is None else sample_texts(config.samples)
    # In one order on every rank: encoding a text may be collective.
    return list(dict.fromkeys([*settings.prompts, *prompts, *negatives]))


def _check_alike(config: TrainConfig, settings: CacheConfig, texts: list[str], world: World) -> None:
    """Raise ConfigError where ranks would encode otherwise, and what they make be mixed up in one cache."""
    media = None if config.media is None else config.media.comparable()
    # Without paths, which may differ between machines. The checksum is in the name of the place at which
    # ranks meet: a rank with another one counts as being elsewhere, and all raise.
    settled = repr((media, settings.model_dump(exclude=set(settings.path_keys)), texts))
    checksum = f"{zlib.crc32(settled.encode('utf-8', 'surrogatepass')):08x}"
    world.raise_together(None, f"opening the cache (media, cache and texts have the checksum {checksum})")


def _check_directory(directory: Path, media: MediaItems | None) -> None:
    if media is None:
        raise ConfigError(
            f"there is no cache in {directory}, and no section media to make one from: name the "
            "cache in cache.directory, or the data in media"
        )
    # Hidden leftovers of a killed run are no obstacle; a user's own files are, for they would be mixed in.
    if directory.is_dir() and not all(entry.name.startswith(_LEFT) for entry in directory.iterdir()):
        raise ConfigError(
            f"{directory} is not empty and is not a complete cache: remove it, or name another "
            "cache.directory"
        )


def _check_fits(wanted: _Wanted, made: Mapping[str, Any], update: CacheUpdate | None) -> None:
    """Raise ConfigError for a cache that is not what is asked for now, nor can be by an ``update``."""
    document = wanted.facts.document()
    # The rows have been compared one by one already: where some differ the cache is changed, not refused.
    if update is not None:
        document["data"] = None
    if found := differences(made["facts"], document):
        raise ConfigError(
            f"the cache {wanted.directory} does not match the configuration: {'; '.join(found)}. "
            "Remove it to have it made again, name another cache.directory, or restore what it "
            "was made from"
        )
