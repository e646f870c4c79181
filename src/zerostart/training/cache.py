"""The cache of a run: opened where it fits what is asked for, else made first."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerostart.checkpoint.paths import expanded
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.cache_config import CacheConfig
from zerostart.training.cache_facts import Facts, differences, facts_of_media
from zerostart.training.cached import FOLDER, CachedItems, read_manifest
from zerostart.training.encoder_files import encoder_files

if TYPE_CHECKING:
    from zerostart.training.config import TrainConfig
    from zerostart.training.media.items import MediaItems

__all__ = ["ensure_cache"]


def ensure_cache(config: TrainConfig, world: World) -> CachedItems:
    """The items that ``config`` asks for, encoded; collective, and the same on every rank.

    A cache that is there and fits is opened, and no file of an encoder is that has not changed since it was
    compared. Where there is none the encoders are loaded, what ``media`` names goes through them, and they
    are let go before this returns. Raises ConfigError, on every rank, for a
    cache that was made of other data, with other encoders or by other settings, saying which, and what the
    reading of media and encoders raises.
    """
    settings = config.cache or CacheConfig()
    with world.phase("opening the cache"):
        place = _place(config, settings)
        source = settings.source or config.model.source
        document = world.broadcast_object(lambda: read_manifest(place), "looking for a cache")
        media = _media(config, world)
        texts = _texts(config, settings)
        _check_alike(config, settings, texts, world)
        repeats = 1 if config.media is None else config.media.repeats
        if document is None:
            _check_place(place, media)
        files = encoder_files(source, place, world)
        described = None if media is None else facts_of_media(media)
        facts = Facts(described, None if files is None else files.facts(), settings)
        if document is None:
            assert media is not None, "it was checked"
            _make(place, media, facts, source, texts, world)
        if files is not None and world.rank == 0:
            files.remember(place)
        if document is not None:
            _check_fits(place, document["cache"], facts)
            if missing := [text for text in texts if text not in document["cache"]["prompts"]]:
                _add_texts(place, missing, settings, source, world)
        return CachedItems(place, repeats)


def _place(config: TrainConfig, settings: CacheConfig) -> Path:
    given = settings.directory
    path = Path(config.output.directory) / FOLDER if given is None else Path(given)
    return expanded(path).absolute()


def _media(config: TrainConfig, world: World) -> MediaItems | None:
    from zerostart.training.media.items import read_media

    return None if config.media is None else read_media(config.media, world)


def _texts(config: TrainConfig, settings: CacheConfig) -> list[str]:
    """The texts alone that are asked for, each once."""
    samples = config.samples
    drawn = () if samples is None else (*samples.prompts, samples.negative_prompt)
    return list(dict.fromkeys([*settings.prompts, *drawn]))


def _check_alike(config: TrainConfig, settings: CacheConfig, texts: list[str], world: World) -> None:
    """Raise ConfigError where ranks would encode otherwise, and what they make be mixed up in one cache."""
    media = None if config.media is None else config.media.model_dump(exclude=set(config.media.places))
    told = repr((media, settings.model_dump(exclude=set(settings.places)), texts))
    checksum = f"{zlib.crc32(told.encode('utf-8', 'surrogatepass')):08x}"
    world.raise_together(None, f"opening the cache (media, cache and texts have the checksum {checksum})")


def _check_place(place: Path, media: MediaItems | None) -> None:
    if media is None:
        raise ConfigError(
            f"there is no cache at {place}, and no section media that says of what to make one: name the "
            "cache in cache.directory, or the data in media"
        )
    if place.is_dir() and any(place.iterdir()):
        raise ConfigError(
            f"{place} has files in it and is no complete cache: remove it, or name another cache.directory"
        )


def _check_fits(place: Path, made: dict[str, Any], now: Facts) -> None:
    """Raise ConfigError for a cache that is not what is asked for now."""
    if found := differences(made["facts"], now.document()):
        raise ConfigError(
            f"the cache {place} is not of what is asked for now: {'; '.join(found)}. Remove it to have "
            "it made anew, name another cache.directory, or put back what it was made of"
        )


def _make(place: Path, media: MediaItems, facts: Facts, source: str, texts: list[str], world: World) -> None:
    from zerostart.training.encoding.filling import fill
    from zerostart.training.encoding.loading import encoders

    with encoders(source, facts.settings, world) as encoder:
        fill(place, media, encoder, facts, texts, world)


def _add_texts(place: Path, missing: list[str], settings: CacheConfig, source: str, world: World) -> None:
    """Give a cache that fits the embeddings of further texts; its items stay."""
    from zerostart.training.cache_files import publish_prompts
    from zerostart.training.encoding.filling import embedded
    from zerostart.training.encoding.loading import encoders

    with encoders(source, settings, world) as encoder:
        added = embedded(encoder, missing, world)
    publish_prompts(place, added, world)
