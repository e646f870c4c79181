"""Engines: how each shards a parameter, and how empty shards are made that it accepts as its own."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from zerostart.distributed.world import World
from zerostart.engines.flat_buffers import FlatBufferShards
from zerostart.engines.parallelism import resolve
from zerostart.engines.placement import parallel_layout
from zerostart.engines.placements import DEVICE, Placements, planned, rules_of
from zerostart.engines.residence import Residence
from zerostart.engines.settings import settings_of
from zerostart.engines.shard import Engine, Shard
from zerostart.errors import ConfigError
from zerostart.layout import Parallelism
from zerostart.models import Alias

__all__ = [
    "DEVICE",
    "ENGINES",
    "Engine",
    "Placements",
    "Shard",
    "Residence",
    "FlatBufferShards",
    "check_choice",
    "check_settings",
    "computing_dtype",
    "contexts_aside",
    "keep_aliases",
    "keeps_whole",
    "local_shards",
    "make_engine",
    "offer_masters",
    "parallel_layout",
    "planned",
    "require",
    "resolve",
    "rules_of",
    "settings_of",
    "agree_on_residence",
]

#: Fills 1-D tensors with this rank's shares of parameters, by name; collective.
Reader = Callable[[Sequence[tuple[str, torch.Tensor]]], None]

#: Engine names and the ZeRO stages that each can be loaded for.
ENGINES: Mapping[str, tuple[int, ...]] = {"deepspeed": (0, 1, 2, 3), "fsdp2": (0, 1, 2, 3)}


def check_choice(engine: str, zero_stage: int) -> None:
    """Raise ConfigError for what this version cannot shard."""
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if zero_stage not in ENGINES[engine]:
        stages = ", ".join(map(str, ENGINES[engine]))
        raise ConfigError(
            f"zero_stage={zero_stage} is not available on {engine} in this version; use {stages}"
        )


def require(engine: str, zero_stage: int) -> None:
    """Import the engine, so that its absence or an unknown version is told before anything is built."""
    if engine == "deepspeed" and zero_stage < 3:
        from zerostart.upstream.deepspeed_stage12 import known

        known()
    elif engine == "deepspeed":
        from zerostart.upstream.deepspeed_stage3 import require_stage3

        require_stage3()
    else:
        importlib.import_module("zerostart.engines.fsdp2.engine")


def make_engine(
    engine: str,
    world: World,
    dtype: torch.dtype | None,
    engine_config: Mapping[str, Any] | None,
    parallelism: Parallelism,
    zero_stage: int = 3,
    exchange: bool | None = None,
) -> Engine:
    """The engine's shard maker for this rank; imports the engine."""
    if engine == "deepspeed" and zero_stage < 3 and parallelism.mesh.parallel:
        from zerostart.engines.deepspeed.flat_experts import FlatExpertShards

        return FlatExpertShards(world, zero_stage, engine_config, exchange, parallelism)
    if engine == "deepspeed" and zero_stage < 3:
        from zerostart.engines.deepspeed.flat import FlatShards

        return FlatShards(world, zero_stage, engine_config, exchange, parallelism)
    if zero_stage == 0:
        rules = rules_of(engine, engine_config, 0, world.size)
        return FlatBufferShards(world, 0, rules, exchange, parallelism)
    if parallelism.mesh.parallel and engine == "fsdp2":
        from zerostart.engines.fsdp2.parallel import FSDP2ParallelShards

        return FSDP2ParallelShards(world, engine_config, parallelism, zero_stage)
    if parallelism.mesh.parallel:
        from zerostart.engines.deepspeed.experts import DeepSpeedExpertShards

        return DeepSpeedExpertShards(world, dtype, engine_config, parallelism)
    if engine == "deepspeed":
        from zerostart.engines.deepspeed.engine import DeepSpeedShards

        return DeepSpeedShards(world, dtype, engine_config)
    from zerostart.engines.fsdp2.engine import FSDP2Shards

    return FSDP2Shards(world, engine_config, zero_stage)


def agree_on_residence(engine: Engine, model: torch.nn.Module, names: Sequence[str]) -> Residence | None:
    """Where the whole parameters ``names`` of every rank will lie; None where the engine shards them.

    Collective, before anything is allocated; raises InsufficientMemoryError on every rank.
    """
    return engine.agree_on_residence(model, names) if isinstance(engine, FlatBufferShards) else None


def keeps_whole(engine: str, zero_stage: int) -> bool:
    """Whether parameters are whole on every rank, in flat buffers."""
    return zero_stage < (3 if engine == "deepspeed" else 1)


def keep_aliases(engine: str, zero_stage: int, model: torch.nn.Module, aliases: Sequence[Alias]) -> None:
    """Let places that hold parameters beside their modules follow what the engine puts into these."""
    if not keeps_whole(engine, zero_stage) and engine == "fsdp2":
        from zerostart.engines.fsdp2.following import follow_swaps

        follow_swaps(model, aliases)


def check_settings(
    engine: str,
    zero_stage: int,
    engine_config: Mapping[str, Any] | None,
    experts: bool = False,
    tensors: bool = False,
) -> None:
    """Raise ConfigError or EngineError for settings that contradict the stage.

    ``experts`` and ``tensors`` say whether ranks are to share these.
    """
    if engine == "deepspeed":
        from zerostart.engines.deepspeed.flat import check_stage

        check_stage(zero_stage, engine_config, experts)
    else:
        from zerostart.engines.fsdp2.settings import FSDP2Settings

        FSDP2Settings.of(engine_config).at_stage(zero_stage, experts or tensors)


def computing_dtype(engine: str, engine_config: Mapping[str, Any] | None) -> torch.dtype | None:
    """The dtype to which the engine casts parameters when it gathers them, None if it does not cast.

    Such an engine has no masters of its own: the parameters that it is given are the masters.
    """
    policy = getattr(settings_of(engine, engine_config), "mp_policy", None)
    return None if policy is None else policy.param_dtype


def offer_masters(
    engine: str, model: torch.nn.Module, rounded: Collection[str], reader: Reader | None
) -> None:
    """Let the engine read fp32 masters of the parameters ``rounded`` with ``reader`` when it makes them.

    FSDP2 makes none: there the sharded parameters themselves are what the optimizer changes.
    """
    if engine == "deepspeed":
        from zerostart.engines.deepspeed.masters import mark_parameters

        mark_parameters(model, rounded, reader)


def contexts_aside() -> contextlib.AbstractContextManager[None]:
    """Suspend what an engine's own context does to the models that are built inside it."""
    from zerostart.upstream.deepspeed import contexts_aside as aside

    return aside()


def local_shards(
    model: torch.nn.Module, parallelism: Parallelism, engine: str, rank: int
) -> dict[str, Shard]:
    """The shards of a loaded model as they are now, by parameter name; {} for a model not sharded here."""
    if parallelism.mesh.parallel and engine == "fsdp2":
        from zerostart.engines.fsdp2.parallel import parallel_shards

        return parallel_shards(model, parallelism, rank)
    if parallelism.mesh.parallel:
        from zerostart.engines.deepspeed.experts import expert_shards
        from zerostart.engines.deepspeed.flat_experts import flat_expert_shards

        # Partitions are there at stage 3 alone.
        return expert_shards(model, parallelism, rank) or flat_expert_shards(model, parallelism, rank)
    from zerostart.engines.deepspeed.engine import current_shards as deepspeed_shards
    from zerostart.engines.fsdp2.engine import current_shards as fsdp2_shards

    return {**deepspeed_shards(model), **fsdp2_shards(model)}
