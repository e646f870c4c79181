"""What a cache is made of, and in what that differs from what is asked for now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerostart.checkpoint.formats.pipeline import NAME, PIPELINE_INDEX
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.distributed.world import World
from zerostart.errors import CheckpointNotFoundError
from zerostart.training.cache_config import CacheConfig

if TYPE_CHECKING:
    from zerostart.training.media.items import MediaItems

__all__ = ["TRAINED", "Facts", "differences", "facts_of_encoders", "facts_of_media"]

#: What the names of models begin with that are trained and not asked for what is cached; schedulers neither.
TRAINED = "transformer"
_NOT_ENCODERS = (TRAINED, "scheduler")
#: The settings on which the numbers in a cache depend.
_SETTINGS = ("dtype", "vae_dtype", "max_sequence_length", "posterior", "seed", "last_frame")
_SHOWN = 3


@dataclass(frozen=True)
class Facts:
    """What a cache is made of: data, files of the encoders by name, and settings. None: not known here."""

    data: Mapping[str, Any] | None
    encoders: Mapping[str, Any] | None
    settings: CacheConfig

    def document(self) -> dict[str, Any]:
        """As JSON."""
        chosen = self.settings.model_dump(mode="json", include=set(_SETTINGS))
        if self.settings.posterior == "mode":
            chosen["seed"] = None  # nothing is drawn
        return {"data": self.data, "encoders": self.encoders, "settings": chosen}


def facts_of_media(media: MediaItems) -> dict[str, Any]:
    """How many items there are, and a digest of them and of how they are decoded."""
    return {"items": len(media), "digest": media.digest()}


def facts_of_encoders(source: str, world: World, thorough: bool) -> dict[str, Any] | None:
    """The class of the pipeline at ``source``, and its encoders' files: lengths, digests if ``thorough``.

    Collective. None where there is no pipeline. Only ``model_index.json`` is read unless ``thorough``, in
    which case each rank reads a part of the files. Raises ReadError and CheckpointError.
    """
    found: tuple[str, Any, dict[str, int]] | None = world.broadcast_object(
        lambda: _files(source), "looking for the encoders' files"
    )
    if found is None:
        return None
    root, kind, sizes = found
    digests: dict[str, str] = {}
    if thorough:
        with world.phase("reading the encoders' files"):
            own = {name: _digest(Path(root) / name) for name in list(sizes)[world.rank :: world.size]}
        for others in world.all_gather_object(own, "comparing the encoders' files"):
            digests |= others
    return {"class": kind, "files": {name: [size, digests.get(name)] for name, size in sizes.items()}}


def _files(source: str) -> tuple[str, Any, dict[str, int]] | None:
    try:
        root = resolve_source(source)
    except CheckpointNotFoundError:
        return None
    if not (root / PIPELINE_INDEX).is_file():
        return None
    index = read_json(root / PIPELINE_INDEX, "pipeline index")
    sizes = {}
    for name, value in index.items():
        if isinstance(value, list) and NAME.fullmatch(name) and not name.startswith(_NOT_ENCODERS):
            for file in _files_below(root / name):
                sizes[file.relative_to(root).as_posix()] = file.stat().st_size
    return str(root), index.get("_class_name"), sizes


def _files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "blake2b").hexdigest()[:32]


def differences(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, in what ``now`` is not what a cache was made of; what is not known now is not compared."""
    found = []
    if now["data"] is not None and now["data"] != made["data"]:
        before, after = made["data"]["items"], now["data"]["items"]
        counts = (
            f"{before} items then, {after} now"
            if before != after
            else f"{after} items, of other contents or sizes"
        )
        found.append(f"it was made of other data than media gives ({counts})")
    if now["encoders"] is not None:
        found += _of_encoders(made["encoders"], now["encoders"])
    for key, value in now["settings"].items():
        before = made["settings"].get(key)
        if before != value:
            found.append(f"cache.{key} was {before} and is {value}")
    return found


def _of_encoders(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if made["class"] != now["class"]:
        return [f"it was made by a {made['class']}, and the pipeline is a {now['class']}"]
    found = []
    folders = {name.partition("/")[0] for name in now["files"]}
    for name, (size, digest) in made["files"].items():
        if name not in now["files"]:
            if name.partition("/")[0] in folders:  # a cache does without encoders that are not there
                found.append(f"{name} is not there any more")
            continue
        size_now, digest_now = now["files"][name]
        if size != size_now:
            found.append(f"{name} had {size} bytes and has {size_now}")
        elif digest_now is not None and digest != digest_now:
            found.append(f"{name} has other contents")
    found += [f"{name} is new" for name in now["files"] if name not in made["files"]]
    more = f", and {len(found) - _SHOWN} files more" if len(found) > _SHOWN else ""
    return [f"it was made with other encoders ({', '.join(found[:_SHOWN])}{more})"] if found else []
