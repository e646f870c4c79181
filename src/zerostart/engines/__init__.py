"""Engines: how each shards a parameter, and how empty shards are made that it accepts as its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerostart.engines.parallelism import check_sizes, resolve
from zerostart.engines.placement import parallel_layout
from zerostart.engines.shard import Engine, Shard
from zerostart.errors import ConfigError
from zerostart.layout import Layout, Parallelism
from zerostart.world import World

__all__ = [
    "ENGINES",
    "Engine",
    "Shard",
    "check_choice",
    "check_sizes",
    "local_shards",
    "make_engine",
    "parallel_layout",
    "planned_layout",
    "require",
    "resolve",
]

#: Engine names and the ZeRO stages that each can be loaded for.
ENGINES: Mapping[str, tuple[int, ...]] = {"deepspeed": (3,), "fsdp2": (3,)}


def check_choice(engine: str, zero_stage: int) -> None:
    """Raise ConfigError for what this version cannot shard."""
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if zero_stage not in ENGINES[engine]:
        stages = ", ".join(map(str, ENGINES[engine]))
        raise ConfigError(
            f"zero_stage={zero_stage} is not available on {engine} in this version; use {stages}"
        )


def planned_layout(engine: str, shape: Sequence[int], rank: int, world_size: int) -> Layout:
    """What ``rank`` will hold of a parameter of ``shape``, without the engine or any process group."""
    if engine == "deepspeed":
        from zerostart.engines.deepspeed.layouts import parameter_layout
    else:
        from zerostart.engines.fsdp2.layouts import parameter_layout
    return parameter_layout(shape, rank, world_size)


def require(engine: str) -> None:
    """Import the engine, so that its absence or an unknown version is told before anything is built."""
    if engine == "deepspeed":
        from zerostart.upstream.deepspeed import require as require_deepspeed

        require_deepspeed()
    else:
        importlib.import_module("zerostart.engines.fsdp2.engine")


def make_engine(
    engine: str,
    world: World,
    dtype: torch.dtype | None,
    engine_config: Mapping[str, Any] | None,
    parallelism: Parallelism,
) -> Engine:
    """The engine's shard maker for this rank; imports the engine."""
    if parallelism.mesh.parallel and engine == "fsdp2":
        from zerostart.engines.fsdp2.parallel import FSDP2ParallelShards

        return FSDP2ParallelShards(world, engine_config, parallelism)
    if engine == "deepspeed":
        from zerostart.engines.deepspeed.engine import DeepSpeedShards

        return DeepSpeedShards(world, dtype, engine_config)
    from zerostart.engines.fsdp2.engine import FSDP2Shards

    return FSDP2Shards(world, engine_config)


def local_shards(
    model: torch.nn.Module, parallelism: Parallelism, engine: str, rank: int
) -> dict[str, Shard]:
    """The shards of a loaded model as they are now, by parameter name; {} for a model not sharded here."""
    if parallelism.mesh.parallel and engine == "fsdp2":
        from zerostart.engines.fsdp2.parallel import parallel_shards

        return parallel_shards(model, parallelism, rank)
    from zerostart.engines.deepspeed.engine import current_shards as deepspeed_shards
    from zerostart.engines.fsdp2.engine import current_shards as fsdp2_shards

    return {**deepspeed_shards(model), **fsdp2_shards(model)}
