"""The cache of a run: opened where it fits what is asked for, else made first."""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from zerostart.checkpoint.manifest import HIDDEN
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.write.folders import write_whole
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.cache_facts import Facts, Growth, differences, facts_of_media
from zerostart.training.data.cached import FOLDER, CachedItems, read_manifest
from zerostart.training.data.encoders import KNOWN_FILES, encoder_files
from zerostart.training.loop.terminal import say

if TYPE_CHECKING:
    from zerostart.training.config.configuration import TrainConfig
    from zerostart.training.data.items import MediaItems

logger = logging.getLogger("zerostart")
#: In a cache: what is known of the rows of its media as they were found. No part of what it is.
_KNOWN = ".media.known"
#: What the names begin with of what lies where a cache was to be, and its making was killed or failed.
_LEFT = (_KNOWN, KNOWN_FILES, HIDDEN)


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
        place = _place(config, settings)
        source = settings.source or config.model.source
        document = world.broadcast_object(lambda: read_manifest(place), "looking for a cache")
        media = _media(config, place, document is not None, world)
        texts = _texts(config, settings)
        _check_alike(config, settings, texts, world)
        repeats = 1 if config.media is None else config.media.repeats
        if document is None:
            _check_place(place, media)
        files = encoder_files(source, place, world)
        described = None if media is None else facts_of_media(media)
        facts = Facts(described, None if files is None else files.facts(), settings)
        chosen = growth = None
        if document is not None:
            growth = None if media is None else _growth(place, media, config)
            _check_fits(place, document["cache"], facts, growth)
        try:
            if document is None:
                assert media is not None, "it was checked"
                _make(place, Growth.of(media.keys, None), media, facts, source, texts, world)
            else:
                if growth is not None and media is not None and not growth.is_none:
                    chosen = _grow(place, growth, media, facts, source, texts, config, world)
                there = world.broadcast_object(lambda: CachedItems(place).texts, "looking at the cache")
                if missing := [text for text in texts if text not in there]:
                    _add_texts(place, missing, settings, source, world)
        finally:  # also where some rows were bad: the next start is to read those alone
            if world.rank == 0 and files is not None:
                files.remember(place)
            if world.rank == 0 and media is not None:
                _remember(place, media)
        return CachedItems(place, repeats, chosen)


def _place(config: TrainConfig, settings: CacheConfig) -> Path:
    given = settings.directory
    path = Path(config.output.directory) / FOLDER if given is None else Path(given)
    return expanded(path).absolute()


def _media(config: TrainConfig, place: Path, cached: bool, world: World) -> MediaItems | None:
    """The media; None where there are none any more, and a cache that was made of them."""
    from zerostart.training.data.items import KnownRows, read_media
    from zerostart.training.data.table import is_gone

    if config.media is None:
        return None
    given = config.media.source

    if cached and world.broadcast_object(lambda: is_gone(given), "looking for the media"):
        if world.rank == 0:
            logger.warning(
                "media.source %s is not there any more: its items are those of the cache %s", given, place
            )
        return None
    known = KnownRows()
    with contextlib.suppress(OSError):  # none yet
        known = KnownRows.unpacked((place / _KNOWN).read_bytes())
    return read_media(config.media, world, known)


def _remember(place: Path, media: MediaItems) -> None:
    """Note in the cache what is known of the rows of ``media``; not where that cannot be."""
    data = media.known_rows.packed()
    with contextlib.suppress(OSError):
        if not (place / _KNOWN).is_file() or (place / _KNOWN).read_bytes() != data:
            write_whole(place / _KNOWN, data, place / f"{_KNOWN}.{os.getpid()}.part", durable=False)


def _texts(config: TrainConfig, settings: CacheConfig) -> list[str]:
    """The texts alone that are asked for, each once."""
    samples = config.samples
    drawn = () if samples is None else (*samples.prompts, samples.negative_prompt)
    return list(dict.fromkeys([*settings.prompts, *drawn]))


def _check_alike(config: TrainConfig, settings: CacheConfig, texts: list[str], world: World) -> None:
    """Raise ConfigError where ranks would encode otherwise, and what they make be mixed up in one cache."""
    media = None if config.media is None else config.media.model_dump(exclude=set(config.media.path_keys))
    told = repr((media, settings.model_dump(exclude=set(settings.path_keys)), texts))
    checksum = f"{zlib.crc32(told.encode('utf-8', 'surrogatepass')):08x}"
    world.raise_together(None, f"opening the cache (media, cache and texts have the checksum {checksum})")


def _check_place(place: Path, media: MediaItems | None) -> None:
    if media is None:
        raise ConfigError(
            f"there is no cache at {place}, and no section media to make one from: name the cache in "
            "cache.directory, or the data in media"
        )
    if place.is_dir() and not all(entry.name.startswith(_LEFT) for entry in place.iterdir()):
        raise ConfigError(
            f"{place} has files in it and is not a complete cache: remove it, or name another cache.directory"
        )


def _check_fits(place: Path, made: dict[str, Any], now: Facts, growth: Growth | None) -> None:
    """Raise ConfigError for a cache that is not what is asked for now, nor can be by its ``growth``."""
    document = now.document()
    if growth is not None:
        document["data"] = None
    if found := differences(made["facts"], document):
        raise ConfigError(
            f"the cache {place} does not match what is asked for now: {'; '.join(found)}. Remove it to have "
            "it made anew, name another cache.directory, or put back what it was made of"
        )


def _growth(place: Path, media: MediaItems, config: TrainConfig) -> Growth | None:
    """What the cache has of the media; None where it does not say, or has nothing: it is another's."""
    assert config.media is not None, "it was read"
    cached = CachedItems(place)
    growth = None if cached.rows is None else Growth.of(media.keys, cached, bool(config.media.items))
    known = () if growth is None else growth.kept[: growth.asked]
    return growth if any(item is not None for item in known) else None


def _make(
    place: Path, growth: Growth, media: MediaItems, facts: Facts, source: str, texts: list[str], world: World
) -> None:
    from zerostart.training.data.encoders import encoders
    from zerostart.training.data.filling import fill

    with encoders(source, facts.settings, world) as encoder:
        fill(place, growth, media, encoder, facts, texts, world)


def _grow(
    place: Path,
    growth: Growth,
    media: MediaItems,
    facts: Facts,
    source: str,
    texts: list[str],
    config: TrainConfig,
    world: World,
) -> list[int] | None:
    """Have the cache hold the rows of ``media``, and no others; collective.

    Where these are the first rows of a table alone (``media.items``), nothing is dropped: their numbers in
    the cache are what is given.
    """
    from zerostart.training.data.cache_files import publish

    assert growth.cached is not None, "there is a cache"
    assert config.media is not None, "it was read"
    kept = [item for item in growth.kept[: growth.asked] if item is not None]
    if growth.new:
        if world.rank == 0:
            say(
                Console(),
                f"the cache {place} has {len(kept)} of {growth.asked} rows: encoding the others",
            )
        _make(place, growth, media, facts, source, texts, world)
        return list(range(growth.asked)) if config.media.items else None
    if config.media.items:
        return kept
    if world.rank == 0:
        say(
            Console(),
            f"the cache {place} has {len(growth.cached)} items, of which {len(kept)} have a row still",
        )
    document = {**growth.cached.facts, "data": facts.data}
    prompts = {text: growth.cached.prompt(text) for text in growth.cached.texts}
    publish(place, growth, None, document, prompts, world)
    return None


def _add_texts(place: Path, missing: list[str], settings: CacheConfig, source: str, world: World) -> None:
    """Give a cache that fits the embeddings of further texts; its items stay."""
    from zerostart.training.data.cache_files import publish_prompts
    from zerostart.training.data.encoders import encoders
    from zerostart.training.data.filling import embedded

    with encoders(source, settings, world) as encoder:
        added = embedded(encoder, missing, world)
    publish_prompts(place, added, world)
