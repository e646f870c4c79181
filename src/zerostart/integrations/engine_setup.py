"""Find the engine of a script, and the ranks that share sequences.

Both are read from transformers, accelerate and DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zerostart.engines import Engine, Mesh, check_choice, family_of, title_of
from zerostart.engines.training import EngineConfig
from zerostart.errors import ConfigError
from zerostart.live.model import get_record
from zerostart.models import library_of
from zerostart.upstream.accelerate.plugins import FSDP2Plugin, fsdp2_plugin, parallelism
from zerostart.upstream.deepspeed.active import active_config, config_stage, open_init_dtype


@dataclass(frozen=True)
class SequenceSharing:
    """Number of ranks that share a sequence, and accelerate's attention implementation.

    ``is_explicit`` is True if the caller requested it for this model.
    """

    size: int = 1
    attention: str | None = None
    is_explicit: bool = False

    @classmethod
    def of(cls, engine: str) -> SequenceSharing:
        """Return the active sharing for ``engine``; raise ConfigError if Ulysses cannot serve it."""
        active = parallelism()
        if active is None:
            return cls()
        if not family_of(engine).owns_optimizer:
            return cls(active.cp_size, "sdpa" if active.cp_size > 1 else None)
        size, handler = active.sp_size, active.sp_handler
        if size == 1:
            return cls()
        if handler.sp_attn_implementation is None:
            raise ConfigError(
                f"ParallelismConfig(sp_size={size}) has no attention implementation; pass "
                "sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation='sdpa')"
            )
        length = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
        if length is not None and length % size:
            raise ConfigError(
                f"ParallelismConfig(sp_size={size}) does not divide sp_seq_length={length}; pad the "
                "sequences, or use another sp_size"
            )
        return cls(size, handler.sp_attn_implementation)

    def merge(self, requested: int) -> SequenceSharing:
        """Apply the argument of ``enabled``; raise ConfigError if both are set and differ."""
        if self.size > 1 and requested not in (1, self.size):
            raise ConfigError(
                f"sequence_parallel={requested} was passed, but accelerate's ParallelismConfig has "
                f"{self.size} ranks share sequences; leave sequence_parallel out"
            )
        return self if requested == 1 else replace(self, size=requested, is_explicit=True)

    def without(self, obstacle: str) -> SequenceSharing:
        """Return the sharing for a model with an ``obstacle`` to it, if any.

        A script whose ranks share sequences may load other models, such as an encoder that each rank calls
        with other sequences. Such a model is refused when it is prepared for training.
        """
        return NO_SHARING if obstacle and not self.is_explicit else self

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if the model has another attention implementation than accelerate."""
        actual = library_of(model).attention(model)
        if self.attention not in (None, actual.implementation) and not actual.obstacle:
            raise ConfigError(
                f"ParallelismConfig has sp_attn_implementation={self.attention!r}, but "
                f"{type(model).__name__} has attn_implementation={actual.implementation!r}; use the "
                "same in both"
            )


#: No rank shares a sequence.
NO_SHARING = SequenceSharing()


@dataclass(frozen=True)
class EngineSetup:
    """Engine, stage, configuration and shared sequences for the models of a script."""

    engine: str
    zero_stage: int = 3
    config: EngineConfig = field(default_factory=dict)
    #: Dtype of the parameters; None for that of the call.
    dtype: torch.dtype | None = None
    #: Dtype in which models compute their buffers; None for that of the call.
    building_dtype: torch.dtype | None = None
    sequences: SequenceSharing = NO_SHARING
    #: Reason for the engine, in a few words.
    reason: str = "set up by the script or its launcher"

    @classmethod
    def of(
        cls, engine: str, stage: int, config: EngineConfig, dtype: torch.dtype | None = None
    ) -> EngineSetup:
        """Return a setup with the dtypes of the engine's configuration, or with ``dtype``."""
        kind = check_choice(engine, stage).for_stage(stage, config, Mesh(1), None)
        building = kind.building_dtype
        return cls(engine, stage, config, dtype or kind.adopted_dtype, building and (dtype or building))

    @classmethod
    def requested(cls, engine: str, stage: int, config: EngineConfig) -> EngineSetup:
        """Return a setup for an engine that only ``enabled`` names."""
        kind = check_choice(engine, stage).for_stage(stage, config, Mesh(1), None)
        return cls(engine, stage, config, kind.parameter_dtype, reason="as asked for").at_stage(stage)

    def at_stage(self, stage: int) -> EngineSetup:
        """Return the setup at another stage."""
        # The stage decides only if models are built in another dtype.
        builds = check_choice(self.engine, stage).for_stage(stage, self.config, Mesh(1), None).building_dtype
        return replace(self, zero_stage=stage, building_dtype=self.dtype if builds is not None else None)

    @property
    def family(self) -> type[Engine]:
        """Class of the engine, at any stage."""
        return check_choice(self.engine, self.zero_stage)

    @property
    def is_whole(self) -> bool:
        """True if every rank holds all parameters."""
        return self.family.for_stage(self.zero_stage, self.config, Mesh(1), None).replicates_parameters

    @property
    def title(self) -> str:
        """Engine and stage in words."""
        return title_of(self.engine, self.zero_stage)


def find_active(model: type) -> EngineSetup | None:
    """Return the active setup for models of the class ``model``; None without sharding.

    Raises ConfigError for settings that a load does not support.
    """
    # DeepSpeed's configuration comes first, then an open zero.Init without one, then FSDP2. DeepSpeed at
    # stage 0 excludes FSDP2.
    opened = open_init_dtype()
    config = active_config()
    stage = config_stage(config)
    if config is not None and family_of("deepspeed").is_sharded_at(stage):
        return EngineSetup.of("deepspeed", stage, _with_tensors(config), opened)
    if opened is not None:
        return EngineSetup.of("deepspeed", 3, {}, opened)
    plugin = None if config is not None else fsdp2_plugin()
    if plugin is None:
        return None
    # In mixed precision accelerate trains fp32 copies.
    dtype = None if plugin.mixed_precision == "no" else torch.float32
    return EngineSetup.of("fsdp2", 3, _with_tensors(_with_replicas(fsdp2_config(plugin, model))), dtype)


def _with_tensors(config: EngineConfig) -> EngineConfig:
    """Add accelerate's tensor parallelism to an engine's configuration."""
    shared = parallelism()
    size, section = 1 if shared is None else shared.tp_size, config.get("tensor_parallel") or {}
    if size == 1:
        return config
    if section.get("autotp_size", size) not in (0, size):
        raise ConfigError(
            f"accelerate's ParallelismConfig has tp_size={size}, and the engine's configuration "
            f"autotp_size={section['autotp_size']}; use one number for both, or leave one out"
        )
    return {**config, "tensor_parallel": {**section, "autotp_size": size}}


def _with_replicas(config: EngineConfig) -> EngineConfig:
    """Add accelerate's number of replicas to FSDP2's configuration."""
    shared = parallelism()
    replicas = 1 if shared is None else shared.dp_replicate_size
    return config if replicas == 1 else {**config, "replicate": replicas}


def fsdp2_config(active: FSDP2Plugin, model: type) -> dict[str, object]:
    """Convert accelerate's FSDP2 settings to ``engine_config``; raise ConfigError."""
    plugin = active.plugin
    if plugin.ignored_modules is not None:
        raise ConfigError(
            "fsdp_ignored_modules is not available under zerostart.enabled(); remove it, or load without "
            "zerostart"
        )
    if plugin.activation_checkpointing:
        raise ConfigError(
            "fsdp_activation_checkpointing is not available under zerostart.enabled(), because "
            "accelerate wraps layers before they are sharded; use gradient_checkpointing=True of "
            "TrainingArguments, or model.gradient_checkpointing_enable()"
        )
    if active.units == "size":
        raise ConfigError(
            "fsdp_auto_wrap_policy SIZE_BASED_WRAP is not available under zerostart.enabled(); use "
            "TRANSFORMER_BASED_WRAP, with fsdp_transformer_layer_cls_to_wrap where the model needs it"
        )
    config: dict[str, Any] = {"reshard_after_forward": plugin.reshard_after_forward}
    if active.policy is not None:
        config["mp_policy"] = active.policy
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        # Without an accelerator pinned memory is useless.
        pinned = plugin.cpu_offload.pin_memory and torch.accelerator.is_available()
        config["offload_policy"] = replace(plugin.cpu_offload, pin_memory=pinned)
    if active.units == "none":
        config["wrap"] = [model.__name__]  # only the root
    elif active.wrapped:
        config["wrap"] = active.wrapped
    return config


def check_sharing(model: nn.Module) -> None:
    """Raise ConfigError if ``model`` was loaded for another number of ranks per sequence."""
    engine = get_record(model).engine
    loaded, now = engine.mesh.sequence_parallel, SequenceSharing.of(engine.name).size
    if loaded == now:
        return
    key = "sp_size" if engine.owns_optimizer else "cp_size"
    if loaded == 1 and (obstacle := library_of(model).attention(model).obstacle):
        raise ConfigError(
            f"{type(model).__name__} has {obstacle}, so no ranks can share its sequences, but "
            f"accelerate has {now} of them do so; prepare it without a ParallelismConfig, or with "
            f"{key}=1"
        )
    raise ConfigError(
        f"{type(model).__name__} was loaded with sequence_parallel={loaded}, but accelerate "
        f"has {now} ranks share a sequence; make the Accelerator or TrainingArguments before "
        f"the model, with ParallelismConfig({key}={max(loaded, now)})"
    )


def check_tensors(model: nn.Module, config: EngineConfig | None = None) -> None:
    """Raise ConfigError if tensor-parallel ranks of ``model`` would get different batches.

    ``config`` is accelerate's DeepSpeed configuration. DeepSpeed itself compares only the inputs of the first
    forward.
    """
    loaded, shared = get_record(model).engine.mesh.tensor_parallel, parallelism()
    now = 1 if shared is None else shared.tp_size
    configured = ((config or {}).get("tensor_parallel") or {}).get("autotp_size", 0)
    # DeepSpeed may slice a model that was loaded without tensor parallelism.
    if loaded == now or (config is not None and loaded in (1, configured)):
        return
    alternative = f', or DeepSpeed\'s configuration "tensor_parallel": {{"autotp_size": {loaded}}}'
    raise ConfigError(
        f"{type(model).__name__} was loaded with tensor_parallel={loaded}, whose ranks must get the same "
        f"batch, but accelerate has {now} ranks share tensors; make the Accelerator or TrainingArguments "
        f"before the model, with ParallelismConfig(tp_size={loaded}){'' if config is None else alternative}"
    )
