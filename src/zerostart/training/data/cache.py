"""The cache of a run: items that are encoded once, each in a file of its own, and an index of them.

The name of an item's file is a digest of its row, its files' names, sizes and times, and how it is decoded.
So what has changed has another name and is encoded, and what has not is found. Files get their names when
they are whole, and the index lists them in the end. A run that is killed goes on with the files it has left.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from safetensors.torch import load, save
from torch.utils.data import DataLoader, Dataset

from zerostart.checkpoint.manifest import FORMAT, MARKER
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.write.folders import sync_directory, write_whole
from zerostart.checkpoint.write.staging import write_errors
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.cached import FOLDER, VERSION, CachedItems, read_index, text_file
from zerostart.training.data.encoders import describe_encoders, encoders
from zerostart.training.data.items import FRAME_RATE, MediaItems, read_media
from zerostart.training.data.media import PicturedText, sample_texts
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.loop.locks import hold
from zerostart.training.loop.terminal import say

if TYPE_CHECKING:
    from zerostart.training.config.configuration import TrainConfig

logger = logging.getLogger("zerostart")
#: Settings on which the numbers in a cache depend.
_SETTINGS = ("dtype", "vae_dtype", "max_sequence_length", "posterior", "seed", "last_frame")
#: Libraries whose versions have to be the same for a run to use what a killed one has left.
_LIBRARIES = ("diffusers", "torch", "transformers")
#: Seconds between two lines that tell the progress.
_PROGRESS_S = 10.0
#: Bad rows, or differences, that one message names.
_SHOWN = 20
_LOCK = ".lock"


@dataclass(frozen=True)
class _Wanted:
    """What a run asks of a cache: ``names`` of the files of all items, and what is missing of them."""

    names: Sequence[str]
    rows: Sequence[int]
    texts: Sequence[str]
    facts: Mapping[str, Any]


@dataclass
class _Made:
    """What one rank has encoded: entries of the index by file, failures by row, and texts that were cut."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    shapes: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    def add(self, name: str, tensors: Mapping[str, torch.Tensor], data: bytes) -> None:
        """Add an item or a text with its bytes as a file."""
        self.files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        self.shapes[name] = {key: list(tensors[key].shape) for key in sorted(tensors)}


def ensure_cache(config: TrainConfig, world: World) -> CachedItems:
    """Return the items that ``config`` asks for, encoded; collective, and the same on every rank.

    Encoders are loaded only for rows and texts that the cache lacks, and released before this returns. Raises
    ConfigError, on every rank, for a cache that was made with other encoders or settings, naming them, for
    rows that cannot be encoded, and what the reading of media and encoders raises.
    """
    settings = config.cache or CacheConfig()
    with world.phase("opening the cache"):
        directory = expanded(settings.directory or Path(config.output.directory) / FOLDER).absolute()
        source = settings.source or config.model.source
        if config.media is None:
            raise ConfigError("a cache is made and read for the rows of media: add the section media")
        texts = _texts(config, settings)
        _check_alike(config, settings, texts, world)
        media = read_media(config.media, world)

        def compare() -> _Wanted:
            return _compare(directory, media, texts, _facts(source, settings))

        wanted = world.broadcast_object(compare, "looking for a cache")
        if wanted.rows or wanted.texts:
            if 0 < len(wanted.rows) < len(media):
                there = len(media) - len(wanted.rows)
                _say(f"the cache {directory} has {there} of {len(media)} items: encoding the others", world)
            with encoders(source, settings, world) as encoder:
                _fill(directory, wanted, media, encoder, world)
        shares = [(len(one), one.config.repeats) for one in media.sets]
        names = iter(wanted.names)
        epoch = [list(itertools.islice(names, rows)) * repeats for rows, repeats in shares]
        return CachedItems(directory, list(itertools.chain(*epoch)), shares)


def _texts(config: TrainConfig, settings: CacheConfig) -> list[str]:
    prompts, negatives = ([], []) if config.samples is None else sample_texts(config.samples)
    # In one order on every rank: encoding a text may be collective.
    return list(dict.fromkeys([*settings.prompts, *prompts, *negatives]))


def _check_alike(config: TrainConfig, settings: CacheConfig, texts: list[str], world: World) -> None:
    """Raise ConfigError where ranks would encode with other settings, and mix results in one cache."""
    media = None if config.media is None else config.media.comparable()
    # The checksum is in the name of the place at which ranks meet: a rank with another one is elsewhere.
    settled = repr((media, settings.model_dump(exclude=set(settings.path_keys)), texts))
    checksum = f"{zlib.crc32(settled.encode('utf-8', 'surrogatepass')):08x}"
    world.raise_together(None, f"opening the cache (media, cache and texts have the checksum {checksum})")


def _facts(source: str, settings: CacheConfig) -> dict[str, object]:
    """Return what the numbers in a cache depend on: settings and encoders."""
    chosen = settings.model_dump(mode="json", include=set(_SETTINGS))
    if settings.posterior == "mode":
        chosen["seed"] = None  # nothing is drawn
    return {**{f"cache.{key}": value for key, value in chosen.items()}, **describe_encoders(source)}


def _compare(directory: Path, media: MediaItems, texts: Sequence[str], facts: Mapping[str, Any]) -> _Wanted:
    """Compare the cache in ``directory`` with what is asked for. Raises ConfigError where it does not fit."""
    index = read_index(directory)
    if index is None and directory.is_dir() and {entry.name for entry in directory.iterdir()} - {_LOCK}:
        raise ConfigError(
            f"{directory} is not empty and is not a complete cache: remove it, or name another "
            "cache.directory"
        )
    index = index or _new_index(facts)
    _check_fits(directory, index, facts)
    counts: Counter[bytes] = Counter()
    names = []
    for key in media.digests(times=True):
        # Equal rows are items of their own, each with its own draw.
        suffix, counts[key] = f"-{counts[key]}" if counts[key] else "", counts[key] + 1
        names.append(f"item-{key.hex()}{suffix}.safetensors")
    whole = {name for name, entry in index["files"].items() if _size(directory / name) == entry["bytes"]}
    rows = [row for row, name in enumerate(names) if name not in whole]
    asked = [*texts, *(text for text in index["cache"]["texts"] if not text)]
    return _Wanted(names, rows, [text for text in asked if text_file(text) not in whole], facts)


def _new_index(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"files": {}, "cache": {"version": VERSION, "items": {}, "texts": [], "facts": facts}}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _check_fits(directory: Path, index: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise ConfigError for a cache of other settings or encoders; absent ones are not compared."""
    made = index["cache"]["facts"]
    found = [f"{key} was {made.get(key)} and is {now}" for key, now in facts.items() if made.get(key) != now]
    if found:
        raise ConfigError(
            f"the cache {directory} does not match the configuration: {_listed(found)}. Remove it to have it "
            "made again, name another cache.directory, or restore what it was made from"
        )


def _fill(directory: Path, wanted: _Wanted, media: MediaItems, encoder: Encoder, world: World) -> None:
    """Encode what is missing and list it in the index; collective. Raises ConfigError that names bad rows."""
    # Encoders may be sharded: all ranks encode an item at the same time, and a rank without one repeats the
    # first.
    with world.phase("decoding the first item"):
        first = _first(media, encoder, wanted.rows) if wanted.rows else {}
    computed = {"device": encoder.device.type, **{name: version(name) for name in _LIBRARIES}}
    made = _Made()
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[set[str], list[str]]:
            return _begin(stack, directory, wanted.facts, computed)

        left, known = world.broadcast_object(begin, "making a directory for the cache")
        # The empty text stands for a dropped prompt, whether somebody asks for that now or later.
        asked = [*([""] if encoder.texts_alone and "" not in known else []), *wanted.texts]
        found = _embeddings(encoder, asked, world)
        if world.rank == 0:
            for text, tensors in found.items():
                _write(directory, text_file(text), tensors, made)
        # Files that a killed run has left are read once for their digests.
        for row in [row for row in wanted.rows if wanted.names[row] in left][world.rank :: world.size]:
            data = (directory / wanted.names[row]).read_bytes()
            made.add(wanted.names[row], load(data), data)
        rows = [row for row in wanted.rows if wanted.names[row] not in left]
        _encode(directory, wanted.names, rows, media, encoder, first, made, world)
        gathered = world.all_gather_object(made, "collecting what was encoded")
        texts = [*known, *(text for text in asked if text not in known)]
        world.broadcast_object(
            lambda: _list_files(directory, wanted.names, texts, gathered), "ending the cache"
        )
    failed = dict(sorted(item for one in gathered for item in one.failed.items()))
    cut = [text for one in gathered for text in one.cut]
    if cut and encoder.settings.long_prompts == "cut" and world.rank == 0:
        logger.warning("%d texts were cut off: %s", len(cut), _listed(cut))
    if failed:
        count = len(media) - len(failed)
        others = f"The other {count} are in {directory}, and stay" if count else "Nothing was encoded"
        raise ConfigError(
            f"{len(failed)} row{'s' * (len(failed) > 1)} cannot be encoded: "
            f"{_listed(list(failed.values()))}. {others}: correct these rows or remove them, and start again"
        )
    _say(f"the cache is complete: {directory}", world)


def _begin(
    stack: contextlib.ExitStack, directory: Path, facts: Mapping[str, Any], computed: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Lock the cache until ``stack`` ends; return files that a killed run has left, and known texts."""
    with write_errors(directory, "nothing was encoded"):
        directory.mkdir(parents=True, exist_ok=True)
        refusal = (
            f"another process is making the cache {directory}, or adding to it: start again when it has "
            "ended, or name another cache.directory"
        )
        hold(stack, directory / _LOCK, refusal)
        index = read_index(directory) or _new_index(facts)
        # Again under the lock: another process may have made it meanwhile.
        _check_fits(directory, index, facts)
        left = {path.name for path in directory.glob("item-*.safetensors")} - index["files"].keys()
        if index["cache"].get("computed") != computed:
            for name in left:
                (directory / name).unlink()
            left = set()
            _write_index(directory, index["files"], {**index["cache"], "computed": computed})
        return left, index["cache"]["texts"]


def _list_files(directory: Path, names: Sequence[str], texts: Sequence[str], made: Sequence[_Made]) -> None:
    """Publish an index with what all ranks have made; the items of this run come first."""
    index = read_index(directory) or {}
    files = {**index["files"], **{name: entry for one in made for name, entry in one.files.items()}}
    shapes = {**index["cache"]["items"], **{n: shape for one in made for n, shape in one.shapes.items()}}
    ordered = [*(name for name in names if name in shapes), *(name for name in shapes if name[:4] == "item")]
    with write_errors(directory, "its items stay: start again, and it goes on from there"):
        items = {name: shapes[name] for name in dict.fromkeys(ordered)}
        _write_index(directory, files, {**index["cache"], "items": items, "texts": list(texts)})


def _write_index(directory: Path, files: Mapping[str, Any], cache: Mapping[str, Any]) -> None:
    data = json.dumps({"format": FORMAT, "files": dict(sorted(files.items())), "cache": cache}).encode()
    write_whole(directory / MARKER, data, directory / f"{MARKER}.part")
    sync_directory(directory)


def _write(directory: Path, name: str, tensors: Mapping[str, torch.Tensor], made: _Made) -> None:
    data = save(dict(tensors))
    with write_errors(directory, "what is complete stays: start again, and it goes on from there"):
        write_whole(directory / name, data, directory / f"{name}.part")
    made.add(name, tensors, data)


def _first(media: MediaItems, encoder: Encoder, rows: Sequence[int]) -> Example:
    failures = []
    for row in rows:
        found = _check(media, encoder, row, _decode(media, row))
        if not isinstance(found, str):
            return found
        failures.append(found)
    raise ConfigError(_listed(failures))


def _listed(failures: Sequence[str]) -> str:
    more = f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
    return "; ".join(failures[:_SHOWN]) + more


def _encode(
    directory: Path,
    names: Sequence[str],
    rows: Sequence[int],
    media: MediaItems,
    encoder: Encoder,
    first: Example,
    made: _Made,
    world: World,
) -> None:
    """Encode ``rows`` on all ranks in step, each its share, into files; collective."""
    own = rows[world.rank :: world.size]
    examples = _decode_ahead(media, encoder, own)
    begun = told = time.monotonic()
    for step in range(-(-len(rows) // world.size)):
        row = own[step] if step < len(own) else None
        # ``prepare`` runs on each rank before any of them enters the encoder.
        prepare = (lambda: first) if row is None else partial(next, examples)
        with world.collectives("encoding an item", prepare) as prepared:
            bad = isinstance(prepared, str)
            encoder.lengths.begin()
            # Each item has a generator of its own, so that nobody's draws are shifted.
            tensors = _encode_one(encoder, first if bad else prepared, row or 0)
        if row is None:
            continue
        where, long, problem = media.where(row), encoder.cut(), prepared if bad else None
        if long is not None and not bad:
            made.cut.append(f"{where}: {long}")
            problem = made.cut[-1] if encoder.settings.long_prompts == "refuse" else None
        if problem := problem or _not_finite(tensors, where):
            made.failed[row] = problem
        else:
            _write(directory, names[row], tensors, made)
        if (now := time.monotonic()) - told > _PROGRESS_S:
            told, done = now, min((step + 1) * world.size, len(rows))
            _say(f"{done} of {len(rows)} items, {done / (now - begun):.1f} a second", world)


def _say(text: str, world: World) -> None:
    if world.rank == 0:
        say(Console(), text)


def _embeddings(encoder: Encoder, texts: Sequence[str], world: World) -> dict[str, Encoded]:
    """Encode each of ``texts`` alone; collective. Raises ConfigError where the encoder cannot."""
    if not encoder.texts_alone and not all(isinstance(text, PicturedText) for text in texts):
        raise ConfigError(
            f"{encoder.kind} encodes texts with the pictures of their items, and none alone: leave "
            "cache.prompts out, and name the pictures of samples.prompts in samples.images"
        )
    found: dict[str, Encoded] = {}
    # Every rank encodes every text: an encoder in shards needs all of them, and there are few.
    for text in dict.fromkeys(texts):
        with world.collectives("encoding a text"):
            encoder.lengths.begin()
            if isinstance(text, PicturedText):
                found[text] = _copied(encoder.sample(text.text, text.pictures))
            else:
                found[text] = _copied(encoder.prompt(text))
        if problem := _not_finite(found[text], f"the text {text!r}"):
            raise ConfigError(problem)
        if long := encoder.cut():
            if encoder.settings.long_prompts == "refuse":
                raise ConfigError(f"the text {text!r}: {long}")
            if world.rank == 0:
                logger.warning("the text %r was cut off: %s", text, long)
    return found


def _not_finite(made: Encoded, what: str) -> str | None:
    """Say which tensor has values that are not finite, if any."""
    for name, tensor in made.items():
        if not bool(torch.isfinite(tensor).all()):
            settings = "vae_dtype" if "latents" in name or name == "condition" else "dtype"
            return (
                f"{what}: its {name} has values that are not finite: the encoder overflows in its dtype, or "
                f"its files are damaged; set cache.{settings} to bfloat16 or float32, or replace them"
            )
    return None


def _decode(media: MediaItems, number: int) -> Example | str:
    """Return an example, or what is wrong with its row."""
    try:
        found: Example = media[number]
        return found
    except ConfigError as error:
        return str(error)


def _check(media: MediaItems, encoder: Encoder, number: int, example: Example | str) -> Example | str:
    """Return an example that the encoder can take, or what is wrong with its row."""
    if isinstance(example, str):
        return example
    if (rate := media.frame_rate(number)) is not None:
        example = {**example, FRAME_RATE: rate}
    try:
        encoder.check(example)
    except ConfigError as error:
        return f"{media.where(number)}: {error}"
    return example


def _encode_one(encoder: Encoder, example: Example, number: int) -> Encoded:
    text = f"{encoder.settings.seed} {number}".encode()
    # Of 63 bits, which every generator takes.
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    return _copied(encoder.encode(example, torch.Generator(device="cpu").manual_seed(seed)))


def _copied(tensors: Mapping[str, torch.Tensor]) -> Encoded:
    # On a CPU a tensor may be a view of its batch.
    return {name: torch.empty_like(t, device="cpu").copy_(t).contiguous() for name, t in tensors.items()}


class _Rows(Dataset[Any]):
    """Some rows of the media, decoded."""

    def __init__(self, media: MediaItems, numbers: Sequence[int]) -> None:
        self.media = media
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Example | str:
        return _decode(self.media, self.numbers[place])


def _decode_ahead(media: MediaItems, encoder: Encoder, numbers: Sequence[int]) -> Iterator[Example | str]:
    """Yield examples, decoded by as many processes as ``media.workers`` says, or what is wrong with them."""
    loader: DataLoader[Any] = DataLoader(
        _Rows(media, numbers),
        batch_size=None,
        num_workers=media.config.workers,
        collate_fn=_unchanged,
        generator=torch.Generator(device="cpu"),  # of the seeds that workers get, which need none
    )
    for number, example in zip(numbers, loader, strict=True):
        yield _check(media, encoder, number, example)


def _unchanged(value: object) -> object:
    return value
