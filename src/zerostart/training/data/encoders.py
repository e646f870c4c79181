"""The encoders of a pipeline: loaded as they are placed, and let go; and their files by their contents.

Each file is read once for as long as it is not changed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.formats.pipeline import NAME, components
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.checkpoint.write.folders import write_whole
from zerostart.distributed.world import World, default_device
from zerostart.errors import CheckpointNotFoundError, ConfigError, ZerostartError
from zerostart.integrations.diffusers import PipelineRequest, drop_components, load_pipeline
from zerostart.loading.placement import Placement
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.diffusion.encoder import Encoder
from zerostart.training.diffusion.families import encoder_class
from zerostart.transfer.meter import release_cached

_VAE = "vae"


@contextmanager
def encoders(source: str, settings: CacheConfig, world: World) -> Iterator[Encoder]:
    """The encoders of the pipeline at ``source``, of which none is left afterwards; collective.

    Inside nothing needs a gradient. Raises ConfigError for what is no pipeline or one that is not known,
    and what loading raises, on every rank.
    """
    # Bits of a product on a CPU may depend on the number of threads, and a cache must not: ranks do the work.
    threads = torch.get_num_threads()
    kind, names = world.broadcast_object(lambda: _looked_at(source), "looking at the encoders")
    # Collective. Outside of the `try`, for without a pipeline there is nothing to drop.
    pipe = load_pipeline(_request(source, settings, names, world))
    try:
        if default_device().type == "cpu":
            torch.set_num_threads(1)
        with torch.no_grad():
            yield encoder_class(kind)(pipe, settings)
    finally:
        torch.set_num_threads(threads)
        # The order matters: modules are let go of by the pipeline, then collected (they may lie in cycles),
        # and only then can the allocator give their memory back.
        drop_components(pipe, *(n for n, part in pipe.components.items() if isinstance(part, nn.Module)))
        del pipe
        gc.collect()
        release_cached()


def _looked_at(source: str) -> tuple[object, list[str]]:
    """The class of the pipeline, and the names of its models."""
    root = resolve_source(source)
    found = components(root) if root.is_dir() else None
    if found is None:
        raise ConfigError(
            f"{root} is not a diffusers pipeline (it has no {PIPELINE_INDEX}), so it has no encoders: "
            "name one in cache.source"
        )
    kind = read_json(Path(root) / PIPELINE_INDEX, "pipeline index").get("_class_name")
    encoder_class(kind)  # refused before anything is loaded
    return kind, [component.name for component in found]


def _request(source: str, settings: CacheConfig, names: list[str], world: World) -> PipelineRequest:
    without = tuple(name for name in names if name.startswith(TRAINED))
    given, usual = settings.placement, "shard" if world.size > 1 else "replicate"
    placement: dict[str, Any] = {}
    for name in names:
        if name not in without:
            kind = given.get(name) if isinstance(given, dict) else given
            if name == _VAE:
                # Never in shards: ranks call the autoencoder a different number of times for items of other
                # lengths.
                kind = "offload" if kind == "offload" else "replicate"
                placement[name] = Placement(kind, compute_dtype=_dtype(settings.vae_dtype))
            else:
                placement[name] = kind or usual
    if isinstance(given, dict):
        placement = {**given, **placement}  # what names no model is refused by the load
    return PipelineRequest(
        source=source,
        placement=placement,
        engine=settings.engine,
        device_memory_limit=settings.limit,
        dtype=_dtype(settings.dtype),
        progress=False,
        without=without,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


#: What the names of models begin with that are trained and not asked for what is cached; schedulers neither.
TRAINED = "transformer"
_NOT_ENCODERS = (TRAINED, "scheduler")
#: Of a pipeline's own settings, what is said of the transformers.
_NOT_OF_ENCODERS = "boundary_ratio"
#: In a cache: the digests of the encoders' files as they were found on this machine. No part of what it is.
KNOWN_FILES = ".encoders.json"


@dataclass(frozen=True)
class EncoderFiles:
    """Where a pipeline is, its class and settings, and of each file of its encoders the state and the digest.

    A state is the length, the times of modification and of change in nanoseconds, and the inode.
    """

    root: str
    kind: Any
    settings: dict[str, object]
    states: dict[str, list[int]]
    digests: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, object]:
        """What a cache depends on, wherever the files are."""
        files = {name: [state[0], self.digests[name]] for name, state in self.states.items()}
        return {"class": self.kind, "settings": self.settings, "files": files}

    def remember(self, cache: Path) -> None:
        """Note in ``cache`` what is known, for ``encoder_files``; on one rank. Not where that cannot be."""
        if _known(cache, self.root, self.states) == self.digests:
            return
        known = {name: [state, self.digests[name]] for name, state in self.states.items()}
        data = json.dumps({self.root: known}).encode()
        with contextlib.suppress(OSError):
            write_whole(cache / KNOWN_FILES, data, cache / f"{KNOWN_FILES}.{os.getpid()}.part", durable=False)


def encoder_files(source: str, cache: Path, world: World) -> EncoderFiles | None:
    """What the encoders of the pipeline at ``source`` are; collective. None where there is no pipeline.

    Files that are in the state that ``cache`` knows them in are not opened. Of the others each rank reads a
    part. Raises ReadError and CheckpointError.
    """
    found: EncoderFiles | None = world.broadcast_object(
        lambda: _found(source, cache), "looking for the encoders' files"
    )
    if found is None:
        return None
    unknown = [name for name in found.states if name not in found.digests]
    if unknown:
        with world.phase("reading the encoders' files"):
            # Every rank takes each `size`-th file: encoders are gigabytes, and machines share the reading.
            own = {name: _digest(Path(found.root) / name) for name in unknown[world.rank :: world.size]}
        for others in world.all_gather_object(own, "comparing the encoders' files"):
            found.digests.update(others)
    return found


def _found(source: str, cache: Path) -> EncoderFiles | None:
    try:
        root = resolve_source(source)
    except CheckpointNotFoundError:
        return None
    if not (root / PIPELINE_INDEX).is_file():
        return None
    index = read_json(root / PIPELINE_INDEX, "pipeline index")
    settings, states = {}, {}
    for name, value in index.items():
        # Lists of an index are models, [library, class]; the rest are settings of the pipeline.
        if not isinstance(value, list):
            if not name.startswith("_") and name != _NOT_OF_ENCODERS:
                settings[name] = value
        elif NAME.fullmatch(name) and not name.startswith(_NOT_ENCODERS):
            for file in _files_below(root / name):
                status = file.stat()
                # The time of change and the inode as well, which a copy over the file with its old times does
                # not keep.
                state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
                states[file.relative_to(root).as_posix()] = state
    # The real place: a link that has been moved to another snapshot must not find the old digests.
    place = os.path.realpath(root)
    return EncoderFiles(place, index.get("_class_name"), settings, states, _known(cache, place, states))


def _known(cache: Path, place: str, states: Mapping[str, list[int]]) -> dict[str, str]:
    """The digests of files that are in the states in which ``cache`` knows them."""
    found: object = None
    with contextlib.suppress(ZerostartError):  # none, or damaged: what is not known is read
        found = read_json(cache / KNOWN_FILES, "digests of encoders").get(place)
    entries = found if isinstance(found, dict) else {}
    return {
        name: entry[1]
        for name, state in states.items()
        # The whole state has to be equal; an entry of any other form is like none.
        if isinstance(entry := entries.get(name), list) and entry[:1] == [state] and len(entry) == 2
    }


def _files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        # Cut to 16 bytes, which is plenty to tell files apart, and keeps the marker short.
        return hashlib.file_digest(handle, "blake2b").hexdigest()[:32]
