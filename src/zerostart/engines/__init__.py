"""Engines: each shards parameters, and makes empty shards that it accepts."""

from __future__ import annotations

import contextlib

from zerostart.engines.engine import Engine, MasterReader, ShardMaker
from zerostart.engines.placements import DEVICE, HOST, RANKS_OF_A_MACHINE, STORAGE, Placements
from zerostart.engines.registry import (
    EngineChoice,
    check_choice,
    choose_engine,
    engine_families,
    engine_names,
    family_of,
    register_engine,
    resolve_engine,
    title_of,
)
from zerostart.engines.residence import Residence
from zerostart.engines.shard import (
    Shard,
    check_own_memory,
    first_rank_shard,
    full_shape,
    plain_name,
    replace_storage,
    whole_shard,
)
from zerostart.engines.state import Gradient, Master, OptimizerState, TrainingState
from zerostart.geometry.layout import Mesh
from zerostart.upstream.torch.optimizer_steps import Member, SteppedTensor

__all__ = [
    "DEVICE",
    "HOST",
    "RANKS_OF_A_MACHINE",
    "STORAGE",
    "Engine",
    "EngineChoice",
    "Gradient",
    "Master",
    "MasterReader",
    "Member",
    "Mesh",
    "OptimizerState",
    "Placements",
    "Residence",
    "Shard",
    "ShardMaker",
    "SteppedTensor",
    "TrainingState",
    "check_choice",
    "check_own_memory",
    "choose_engine",
    "suspended_contexts",
    "engine_families",
    "engine_names",
    "family_of",
    "first_rank_shard",
    "full_shape",
    "replace_storage",
    "plain_name",
    "register_engine",
    "resolve_engine",
    "title_of",
    "whole_shard",
]


def suspended_contexts() -> contextlib.AbstractContextManager[None]:
    """Context in which an open context of an engine, such as ``zero.Init``, ignores models.

    Raises UnsupportedVersionError if an open ``zero.Init`` cannot be suspended.
    """
    from zerostart.upstream.deepspeed.zero3_partitions import suspended_contexts as aside

    return aside()
