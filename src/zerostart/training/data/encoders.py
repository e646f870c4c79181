"""Load and release the encoders of a pipeline, and describe their files."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.formats.pipeline import NAME, components
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.distributed.world import World, default_device
from zerostart.errors import CheckpointNotFoundError, ConfigError
from zerostart.integrations.diffusers import PipelineRequest, drop_components, load_pipeline
from zerostart.loading.placement import Placement
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.diffusion.encoder import Encoder
from zerostart.training.diffusion.families import encoder_class
from zerostart.transfer.meter import release_cached

_VAE = "vae"
#: Prefix of the names of trained models.
_TRAINED = "transformer"
_NOT_ENCODERS = (_TRAINED, "scheduler")
#: A setting of the pipeline that does not concern its encoders.
_BOUNDARY = "boundary_ratio"
#: A fingerprint reads this many parts of this many bytes of each file.
_PARTS, _PART_BYTES = 16, 64 * 1024


@contextmanager
def encoders(source: str, settings: CacheConfig, world: World) -> Iterator[Encoder]:
    """Load the encoders of the pipeline at ``source``, without gradients, and release them; collective.

    Raises ConfigError on every rank if there is no pipeline or its class is unknown.
    """
    # Bits of a product on a CPU may depend on the number of threads, so one thread makes the cache.
    threads = torch.get_num_threads()
    kind, names = world.broadcast_object(lambda: _find_encoders(source), "looking at the encoders")
    pipe = load_pipeline(_request(source, settings, names, world))
    try:
        if default_device().type == "cpu":
            torch.set_num_threads(1)
        with torch.no_grad():
            yield encoder_class(kind)(pipe, settings)
    finally:
        torch.set_num_threads(threads)
        # The pipeline releases its modules, cycles are collected, and the allocator frees their memory.
        drop_components(pipe, *(n for n, part in pipe.components.items() if isinstance(part, nn.Module)))
        del pipe
        gc.collect()
        release_cached()


def _find_encoders(source: str) -> tuple[object, list[str]]:
    """Return the class of the pipeline, and the names of its models."""
    root = resolve_source(source)
    models = components(root) if root.is_dir() else None
    if models is None:
        raise ConfigError(
            f"{root} is not a diffusers pipeline (it has no {PIPELINE_INDEX}), so it has no encoders: "
            "name one in cache.source"
        )
    kind = read_json(Path(root) / PIPELINE_INDEX, "pipeline index").get("_class_name")
    encoder_class(kind)  # raises before anything is loaded
    return kind, [component.name for component in models]


def _request(source: str, settings: CacheConfig, names: list[str], world: World) -> PipelineRequest:
    without = tuple(name for name in names if name.startswith(_TRAINED))
    used, given = [name for name in names if name not in without], settings.placement
    # The load refuses names of no model.
    chosen: dict[str, Any] = dict(given) if isinstance(given, dict) else dict.fromkeys(used, given)
    usual = "shard" if world.size > 1 else "replicate"
    placement = {**chosen, **{name: chosen.get(name) or usual for name in used}}
    if _VAE in used:
        # Never in shards: ranks call it a different number of times for items of different lengths.
        kind: Any = "offload" if placement[_VAE] == "offload" else "replicate"
        placement[_VAE] = Placement(kind, compute_dtype=_dtype(settings.vae_dtype))
    return PipelineRequest(
        source=source,
        placement=placement,
        engine=settings.engine,
        device_memory_limit=settings.device_memory_limit,
        dtype=_dtype(settings.dtype),
        progress=False,
        without=without,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def describe_encoders(source: str) -> dict[str, object]:
    """Return class and settings of a pipeline, and size and digest of its encoders' files.

    Empty if there is no pipeline. Raises ReadError, CheckpointError and OSError.
    """
    try:
        root = resolve_source(source)
    except CheckpointNotFoundError:
        return {}
    if not (root / PIPELINE_INDEX).is_file():
        return {}
    facts: dict[str, object] = {}
    for name, value in read_json(root / PIPELINE_INDEX, "pipeline index").items():
        # Lists of an index are models, [library, class]; the rest are settings of the pipeline.
        if not isinstance(value, list):
            if name == "_class_name" or (not name.startswith("_") and name != _BOUNDARY):
                facts[f"{name} of the pipeline"] = value
        elif NAME.fullmatch(name) and not name.startswith(_NOT_ENCODERS):
            for path in sorted((root / name).rglob("*")):
                relative = path.relative_to(root)
                if path.is_file() and not any(part.startswith(".") for part in relative.parts):
                    facts[relative.as_posix()] = f"{path.stat().st_size} bytes, {_digest(path)}"
    return facts


def _digest(path: Path) -> str:
    """Return a digest of a file, over 1 MiB only of evenly spaced parts."""
    size, hashed = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as handle:
        for start in sorted({*range(0, size, -(-size // _PARTS) or 1), max(0, size - _PART_BYTES)}):
            handle.seek(start)
            hashed.update(handle.read(_PART_BYTES))
    return hashed.hexdigest()
