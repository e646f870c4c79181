"""The encoders of a pipeline, loaded as they are placed, and let go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.formats.pipeline import PIPELINE_INDEX, components
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.distributed.world import World, default_device
from zerostart.errors import ConfigError
from zerostart.integrations.diffusers.pipelines import PipelineRequest, drop_components, load_pipeline
from zerostart.loading.placement import Placement
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.encoder_files import TRAINED
from zerostart.training.diffusion.encoder import Encoder
from zerostart.training.diffusion.families import encoder_class
from zerostart.transfer.memory import release_cached

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
    pipe = load_pipeline(_request(source, settings, names, world))
    try:
        if default_device().type == "cpu":
            torch.set_num_threads(1)
        with torch.no_grad():
            yield encoder_class(kind)(pipe, settings)
    finally:
        torch.set_num_threads(threads)
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
