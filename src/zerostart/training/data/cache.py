"""Encode the items of a run once, into one file for each item and an index.

The name of an item's file is a digest of its row, of the names, sizes and times of its media, and of how they
are decoded. A changed item gets another name and is encoded; the others are reused. Files get their names
when they are complete, and the index lists them at the end, so a killed run continues with its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch.utils.data import DataLoader, Dataset

from zerostart.checkpoint.manifest import FORMAT, MARKER
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.write.folders import sync_directory, write_whole
from zerostart.checkpoint.write.staging import write_errors
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, printable
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.cached import FOLDER, VERSION, CachedItems, hold_lock, read_index, text_file
from zerostart.training.data.encoders import describe_encoders, encoders
from zerostart.training.data.items import MediaItems, read_media
from zerostart.training.data.media import PicturedText, sample_texts
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.loop.course import agree, changes, comparable

if TYPE_CHECKING:
    from zerostart.training.config.configuration import TrainConfig

logger = logging.getLogger("zerostart")
#: Settings that change the numbers in a cache.
_SETTINGS = {"dtype", "vae_dtype", "max_sequence_length", "posterior", "seed", "last_frame"}
#: Seconds between two lines of progress.
_PROGRESS_S = 10.0
#: Bad rows or differences that one message names.
_SHOWN = 20
_LOCK = ".lock"


@dataclass(frozen=True)
class _Request:
    """File ``names`` of all items, and the ``rows`` and ``texts`` that the cache lacks."""

    names: Sequence[str]
    rows: Sequence[int]
    texts: Sequence[str]
    facts: Mapping[str, Any]


@dataclass
class _Encodings:
    """The work of one rank."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # index entries by file
    shapes: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # errors by row
    long_texts: list[str] = field(default_factory=list)  # warnings

    def add(self, name: str, tensors: Mapping[str, torch.Tensor], data: bytes) -> None:
        """Add an item or a text, with its bytes as a file."""
        self.files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        self.shapes[name] = {key: list(tensors[key].shape) for key in sorted(tensors)}


def ensure_cache(config: TrainConfig, world: World) -> CachedItems:
    """Return the encoded items of ``config``, encoding those that the cache lacks; collective.

    Encoders are loaded only if something is missing, and released before this returns. Raises ConfigError on
    every rank for a cache of other encoders or settings, naming them, and for rows that cannot be encoded.
    """
    settings = config.cache or CacheConfig()
    with world.phase("opening the cache"):
        directory = expanded(settings.directory or Path(config.output.directory) / FOLDER).absolute()
        source = settings.source or config.model.source
        if config.media is None:
            raise ConfigError("the cache holds the encoded rows of media: add the section media")
        prompts, negatives = ([], []) if config.samples is None else sample_texts(config.samples)
        # In the same order on every rank: encoding a text may be collective.
        texts = list(dict.fromkeys([*settings.prompts, *prompts, *negatives]))
    agree({**comparable({"media": config.media, "cache": settings}), "the texts": texts}, world)
    with world.phase("opening the cache"):
        media = read_media(config.media, world)

        def compare() -> _Request:
            chosen = settings.model_dump(mode="json", include=_SETTINGS)
            if settings.posterior == "mode":
                chosen["seed"] = None  # nothing is drawn
            facts = {f"cache.{key}": value for key, value in sorted(chosen.items())}
            return _inspect(directory, media, texts, facts | describe_encoders(source))

        request = world.broadcast_object(compare, "looking for a cache")
        if request.rows or request.texts:
            if 0 < len(request.rows) < len(media):
                cached = len(media) - len(request.rows)
                _announce(
                    f"the cache {directory} has {cached} of {len(media)} items: encoding the others", world
                )
            with encoders(source, settings, world) as encoder:
                _fill(directory, request, media, encoder, world)
        shares = [(len(one), one.config.repeats) for one in media.sets]
        names = iter(request.names)
        epoch = [list(itertools.islice(names, rows)) * repeats for rows, repeats in shares]
        return CachedItems(directory, list(itertools.chain(*epoch)), shares)


def _inspect(directory: Path, media: MediaItems, texts: Sequence[str], facts: Mapping[str, Any]) -> _Request:
    """Find the items and texts that the cache in ``directory`` lacks.

    Raises ConfigError if it was made with other settings or encoders.
    """
    index = read_index(directory)
    if index is None and directory.is_dir() and {entry.name for entry in directory.iterdir()} - {_LOCK}:
        raise ConfigError(
            f"{directory} is not empty and is not a complete cache: remove it, or name another "
            "cache.directory"
        )
    index = index or _new_index(facts)
    _check_facts(directory, index, facts)
    counts: Counter[bytes] = Counter()
    names = []
    for _, key in media.digests:
        # Equal rows are separate items with different draws.
        suffix, counts[key] = f"-{counts[key]}" if counts[key] else "", counts[key] + 1
        names.append(f"item-{key.hex()}{suffix}.safetensors")
    whole = {name for name, entry in index["files"].items() if _size(directory / name) == entry["bytes"]}
    rows = [row for row, name in enumerate(names) if name not in whole]
    all_texts = [*texts, *(text for text in index["cache"]["texts"] if not text)]
    return _Request(names, rows, [text for text in all_texts if text_file(text) not in whole], facts)


def _new_index(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"files": {}, "cache": {"version": VERSION, "items": {}, "texts": [], "facts": facts}}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _check_facts(directory: Path, index: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise ConfigError for a cache of other settings or encoders (if they are there)."""
    before = {**dict.fromkeys(facts), **index["cache"]["facts"]}
    if differences := changes(before, facts):
        raise ConfigError(
            f"the cache {directory} does not match the configuration: {_join(differences)}. Remove it to "
            "have it encoded again, name another cache.directory, or restore its sources"
        )


def _join(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _fill(directory: Path, request: _Request, media: MediaItems, encoder: Encoder, world: World) -> None:
    """Encode the missing items and texts, and list them in the index; collective.

    Raises ConfigError that names bad rows.
    """
    # Encoders may be sharded: all ranks encode an item at the same time, and a rank without one repeats the
    # first.
    with world.phase("decoding the first item"):
        first = _first(media, encoder, request.rows) if request.rows else {}
    own = _Encodings()
    with contextlib.ExitStack() as stack:
        left, known = world.broadcast_object(
            lambda: _begin(stack, directory, request.facts), "making a directory for the cache"
        )
        # The empty text stands for a dropped prompt, whether a run asks for that now or later.
        new_texts = [*([""] if encoder.encodes_texts and "" not in known else []), *request.texts]
        embeddings = _encode_texts(encoder, new_texts, world)
        if world.rank == 0:
            for text, tensors in embeddings.items():
                _write(directory, text_file(text), tensors, own)
        # Files of a killed run are read once for their digests.
        for row in [row for row in request.rows if request.names[row] in left][world.rank :: world.size]:
            data = (directory / request.names[row]).read_bytes()
            own.add(request.names[row], load(data), data)
        rows = [row for row in request.rows if request.names[row] not in left]
        for row, tensors in _encode(rows, media, encoder, first, own, world):
            _write(directory, request.names[row], tensors, own)
        every = world.all_gather_object(own, "collecting what was encoded")
        texts = [*known, *(text for text in new_texts if text not in known)]
        world.broadcast_object(
            lambda: _list_files(directory, request.names, texts, every), "ending the cache"
        )
    failed = dict(sorted(item for one in every for item in one.failed.items()))
    cut_texts = [text for one in every for text in one.long_texts]
    if cut_texts and world.rank == 0:
        logger.warning("%d texts were cut off: %s", len(cut_texts), _join(cut_texts))
    if failed:
        count = len(media) - len(failed)
        remaining = f"The other {count} are kept in {directory}" if count else "Nothing was encoded"
        raise ConfigError(
            f"{len(failed)} row{'s' * (len(failed) > 1)} cannot be encoded: "
            f"{_join(list(failed.values()))}. {remaining}: correct these rows or remove them, and start again"
        )
    _announce(f"the cache is complete: {directory}", world)


def _begin(
    stack: contextlib.ExitStack, directory: Path, facts: Mapping[str, Any]
) -> tuple[set[str], list[str]]:
    """Lock the cache until ``stack`` ends; return item files of a killed run, and encoded texts."""
    with write_errors(directory, "nothing was encoded"):
        directory.mkdir(parents=True, exist_ok=True)
        refusal = (
            f"another process is making the cache {directory}, or adding to it: start again when it has "
            "ended, or name another cache.directory"
        )
        hold_lock(stack, directory / _LOCK, refusal)
        if (index := read_index(directory)) is None:
            index = _new_index(facts)
            _write_index(directory, index["files"], index["cache"])
        # Checked again under the lock: another process may have made the cache meanwhile.
        _check_facts(directory, index, facts)
        leftovers = {path.name for path in directory.glob("item-*.safetensors")} - index["files"].keys()
        return leftovers, index["cache"]["texts"]


def _list_files(
    directory: Path, names: Sequence[str], texts: Sequence[str], every: Sequence[_Encodings]
) -> None:
    """Publish an index with the work of all ranks, this run's items first."""
    index = read_index(directory) or {}
    files = {**index["files"], **{name: entry for one in every for name, entry in one.files.items()}}
    shapes = {**index["cache"]["items"], **{n: shape for one in every for n, shape in one.shapes.items()}}
    ordered = [*(name for name in names if name in shapes), *(name for name in shapes if name[:4] == "item")]
    with write_errors(directory, "its items are kept: start again to continue"):
        items = {name: shapes[name] for name in dict.fromkeys(ordered)}
        _write_index(directory, files, {**index["cache"], "items": items, "texts": list(texts)})


def _write_index(directory: Path, files: Mapping[str, Any], cache: Mapping[str, Any]) -> None:
    data = json.dumps({"format": FORMAT, "files": dict(sorted(files.items())), "cache": cache}).encode()
    write_whole(directory / MARKER, data, directory / f"{MARKER}.part")
    sync_directory(directory)


def _write(directory: Path, name: str, tensors: Mapping[str, torch.Tensor], own: _Encodings) -> None:
    data = save(dict(tensors))
    with write_errors(directory, "complete files are kept: start again to continue"):
        write_whole(directory / name, data, directory / f"{name}.part")
    own.add(name, tensors, data)


def _first(media: MediaItems, encoder: Encoder, rows: Sequence[int]) -> Example:
    failures = []
    for row in rows:
        example = _check(media, encoder, row, _decode(media, row))
        if not isinstance(example, str):
            return example
        failures.append(example)
    raise ConfigError(_join(failures))


def _encode(
    rows: Sequence[int], media: MediaItems, encoder: Encoder, first: Example, own: _Encodings, world: World
) -> Iterator[tuple[int, Encoded]]:
    """Encode ``rows`` on all ranks in step, and yield this rank's good ones; collective."""
    share = rows[world.rank :: world.size]
    examples = _decode_ahead(media, encoder, share)
    started = reported = time.monotonic()
    for step in range(-(-len(rows) // world.size)):
        row = share[step] if step < len(share) else None
        # ``prepare`` runs on each rank before any of them enters the encoder.
        prepare = (lambda: first) if row is None else partial(next, examples)
        with world.collectives("encoding an item", prepare) as prepared:
            bad = isinstance(prepared, str)
            tensors = _encode_one(encoder, first if bad else prepared, row or 0)
        if row is None:
            continue
        if not bad and (long := encoder.truncation_warning(prepared["prompt"])):
            own.long_texts.append(f"{media.where(row)}: {long}")
        if problem := prepared if bad else _find_infinite(tensors, media.where(row)):
            own.failed[row] = problem
        else:
            yield row, tensors
        if (now := time.monotonic()) - reported > _PROGRESS_S:
            reported, done = now, min((step + 1) * world.size, len(rows))
            _announce(f"{done} of {len(rows)} items, {done / (now - started):.1f} a second", world)


def _announce(text: str, world: World) -> None:
    if world.rank == 0:
        print(printable(text), flush=True)


def _encode_texts(encoder: Encoder, texts: Sequence[str], world: World) -> dict[str, Encoded]:
    """Encode each of ``texts`` without an item; collective. Raises ConfigError if the encoder cannot."""
    if not encoder.encodes_texts and not all(isinstance(text, PicturedText) for text in texts):
        raise ConfigError(
            f"{encoder.kind} encodes texts together with pictures: leave cache.prompts out, and name the "
            "pictures of samples.prompts in samples.images"
        )
    embeddings: dict[str, Encoded] = {}
    # Every rank encodes every text: a sharded encoder needs all ranks, and there are few texts.
    for text in dict.fromkeys(texts):
        with world.collectives("encoding a text"):
            if isinstance(text, PicturedText):
                embeddings[text] = _copy_to_host(encoder.sample(text.text, text.pictures))
            else:
                embeddings[text] = _copy_to_host(encoder.prompt(text))
        if problem := _find_infinite(embeddings[text], f"the text {text!r}"):
            raise ConfigError(problem)
        if world.rank == 0 and (long := encoder.truncation_warning(getattr(text, "text", text))):
            logger.warning("the text %r was cut off: %s", text, long)
    return embeddings


def _find_infinite(encoded: Encoded, owner: str) -> str | None:
    """Return an error message if a tensor has values that are not finite."""
    for name, tensor in encoded.items():
        if not bool(torch.isfinite(tensor).all()):
            setting = "vae_dtype" if "latents" in name or name == "condition" else "dtype"
            return (
                f"{owner}: its {name} has values that are not finite: the encoder overflows in its dtype, or "
                f"its files are damaged; set cache.{setting} to bfloat16 or float32, or replace them"
            )
    return None


def _decode(media: MediaItems, row: int) -> Example | str:
    """Return an example, or the error of its row."""
    try:
        example: Example = media[row]
        return example
    except ConfigError as error:
        return str(error)


def _check(media: MediaItems, encoder: Encoder, row: int, example: Example | str) -> Example | str:
    """Return an example that the encoder can take, or the error of its row."""
    if not isinstance(example, str):
        try:
            encoder.check(example)
        except ConfigError as error:
            return f"{media.where(row)}: {error}"
    return example


def _encode_one(encoder: Encoder, example: Example, row: int) -> Encoded:
    # A generator for each item, so that draws depend on no other item.
    text = f"{encoder.settings.seed} {row}".encode()
    # 63 bits, which every generator takes.
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    return _copy_to_host(encoder.encode(example, torch.Generator(device="cpu").manual_seed(seed)))


def _copy_to_host(tensors: Mapping[str, torch.Tensor]) -> Encoded:
    # On a CPU a tensor may be a view of its batch.
    return {name: torch.empty_like(t, device="cpu").copy_(t).contiguous() for name, t in tensors.items()}


class _Rows(Dataset[Any]):
    """Some rows of the media, decoded."""

    def __init__(self, media: MediaItems, rows: Sequence[int]) -> None:
        self.media = media
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Example | str:
        return _decode(self.media, self.rows[place])


def _decode_ahead(media: MediaItems, encoder: Encoder, rows: Sequence[int]) -> Iterator[Example | str]:
    """Yield examples or errors of ``rows``, decoded by ``media.workers`` processes."""
    loader: DataLoader[Any] = DataLoader(
        _Rows(media, rows),
        batch_size=None,
        num_workers=media.config.workers,
        generator=torch.Generator(device="cpu"),  # without it the loader would draw from the run's
    )
    for row, example in zip(rows, loader, strict=True):
        yield _check(media, encoder, row, example)
