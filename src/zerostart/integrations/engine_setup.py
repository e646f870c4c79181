"""The engine that a script is set up for, and the ranks that share its sequences.

Both are read where transformers, accelerate and DeepSpeed keep them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zerostart.engines import Engine, Mesh, check_choice, family_of, titled
from zerostart.engines.training import EngineConfig
from zerostart.errors import ConfigError
from zerostart.live.model import get_record
from zerostart.models import library_of
from zerostart.upstream.accelerate.plugins import FSDP2Plugin, fsdp2_plugin, parallelism
from zerostart.upstream.deepspeed.active import active_config, config_stage, open_init_dtype


@dataclass(frozen=True)
class SharedSequences:
    """How many ranks share each sequence, and the attention implementation that accelerate is told of.

    ``asked``: of this very model, and not by what is set up for the script.
    """

    size: int = 1
    attention: str | None = None
    asked: bool = False

    @classmethod
    def of(cls, engine: str) -> SharedSequences:
        """What is active for ``engine``. Raises ConfigError for what Ulysses would refuse, or do wrong."""
        found = parallelism()
        if found is None:
            return cls()
        if not family_of(engine).owns_optimizer:
            return cls(found.cp_size, "sdpa" if found.cp_size > 1 else None)
        size, handler = found.sp_size, found.sp_handler
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

    def merged(self, asked: int) -> SharedSequences:
        """With what ``enabled`` asks for. Raises ConfigError where both do, and differ."""
        if self.size > 1 and asked not in (1, self.size):
            raise ConfigError(
                f"sequence_parallel={asked} was passed, but accelerate's ParallelismConfig has "
                f"{self.size} ranks share sequences; leave sequence_parallel out"
            )
        return self if asked == 1 else replace(self, size=asked, asked=True)

    def unless(self, obstacle: str) -> SharedSequences:
        """What holds for a model with that ``obstacle``, in words, to sharing sequences; "" for none.

        A script whose ranks share sequences may load other models, such as an encoder, which each rank calls
        with sequences of its own. It is refused when it is prepared for training.
        """
        return ALONE if obstacle and not self.asked else self

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError for a model whose attention Ulysses is told otherwise of."""
        known = library_of(model).attention(model)
        if self.attention not in (None, known.implementation) and not known.obstacle:
            raise ConfigError(
                f"ParallelismConfig has sp_attn_implementation={self.attention!r}, but "
                f"{type(model).__name__} has attn_implementation={known.implementation!r}; use the "
                "same in both"
            )


#: Every rank has sequences of its own.
ALONE = SharedSequences()


@dataclass(frozen=True)
class EngineSetup:
    """What models of a script are loaded for: an engine at a stage, its configuration, shared sequences."""

    engine: str
    zero_stage: int = 3
    config: EngineConfig = field(default_factory=dict)
    #: The one that the engine wants parameters in; None for the call's own.
    dtype: torch.dtype | None = None
    #: The one in which models compute their buffers; None for the call's own.
    building_dtype: torch.dtype | None = None
    sequences: SharedSequences = ALONE
    #: Why it is this engine, in a few words.
    reason: str = "set up by the script or its launcher"

    @classmethod
    def of(
        cls, engine: str, stage: int, config: EngineConfig, dtype: torch.dtype | None = None
    ) -> EngineSetup:
        """With the dtypes that the engine's configuration asks for, or ``dtype`` in their place."""
        kind = check_choice(engine, stage).for_stage(stage, config, Mesh(1), None)
        building = kind.building_dtype
        return cls(engine, stage, config, dtype or kind.adopted_dtype, building and (dtype or building))

    @classmethod
    def asked(cls, engine: str, stage: int, config: EngineConfig) -> EngineSetup:
        """An engine that the script itself is not set up for: with a dtype where ``config`` names one."""
        kind = check_choice(engine, stage).for_stage(stage, config, Mesh(1), None)
        return cls(engine, stage, config, kind.parameter_dtype, reason="as asked for").at(stage)

    def at(self, stage: int) -> EngineSetup:
        """The same at another stage."""
        # Whether models are built in another dtype depends on the stage, which dtype it is does not.
        builds = check_choice(self.engine, stage).for_stage(stage, self.config, Mesh(1), None).building_dtype
        return replace(self, zero_stage=stage, building_dtype=self.dtype if builds is not None else None)

    @property
    def family(self) -> type[Engine]:
        """The engine's class, at any stage."""
        return check_choice(self.engine, self.zero_stage)

    @property
    def whole(self) -> bool:
        """Whether every rank holds all parameters."""
        return self.family.for_stage(self.zero_stage, self.config, Mesh(1), None).replicates_parameters

    @property
    def title(self) -> str:
        """What is active, in words."""
        return titled(self.engine, self.zero_stage)


def find_active(model: type) -> EngineSetup | None:
    """What a model of the class ``model`` is to be loaded for, None where no sharding is set up.

    Raises ConfigError for settings that a load cannot honour.
    """
    # In this order: DeepSpeed's configuration, an open zero.Init without one, FSDP2. A script that has set up
    # DeepSpeed at stage 0 is not asked for FSDP2 as well.
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
    # accelerate trains fp32 copies wherever the precision is mixed.
    dtype = None if plugin.mixed_precision == "no" else torch.float32
    return EngineSetup.of("fsdp2", 3, _with_tensors(_with_replicas(fsdp2_config(plugin, model))), dtype)


def _with_tensors(config: EngineConfig) -> EngineConfig:
    """An engine's configuration, with the ranks that accelerate has share tensors."""
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
    """FSDP2's configuration, with as many copies of the model as accelerate has."""
    shared = parallelism()
    replicas = 1 if shared is None else shared.dp_replicate_size
    return config if replicas == 1 else {**config, "replicate": replicas}


def fsdp2_config(found: FSDP2Plugin, model: type) -> dict[str, object]:
    """accelerate's FSDP2 settings as ``engine_config``. Raises ConfigError, by the setting."""
    plugin = found.plugin
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
    if found.units == "size":
        raise ConfigError(
            "fsdp_auto_wrap_policy SIZE_BASED_WRAP is not available under zerostart.enabled(); use "
            "TRANSFORMER_BASED_WRAP, with fsdp_transformer_layer_cls_to_wrap where the model needs it"
        )
    config: dict[str, Any] = {"reshard_after_forward": plugin.reshard_after_forward}
    if found.policy is not None:
        config["mp_policy"] = found.policy
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        # Without an accelerator there is nothing to pin memory for.
        pinned = plugin.cpu_offload.pin_memory and torch.accelerator.is_available()
        config["offload_policy"] = replace(plugin.cpu_offload, pin_memory=pinned)
    if found.units == "none":
        config["wrap"] = [model.__name__]  # The root alone.
    elif found.wrapped:
        config["wrap"] = found.wrapped
    return config


def check_sharing(model: nn.Module) -> None:
    """Raise ConfigError where other ranks share sequences now than the loaded ``model`` was loaded for."""
    engine = get_record(model).engine
    loaded, now = engine.mesh.sequence_parallel, SharedSequences.of(engine.name).size
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
    """Raise ConfigError where ranks that share tensors of the loaded ``model`` would see different batches.

    ``config`` is accelerate's of DeepSpeed. DeepSpeed itself compares the first forward's inputs alone.
    """
    loaded, shared = get_record(model).engine.mesh.tensor_parallel, parallelism()
    now = 1 if shared is None else shared.tp_size
    configured = ((config or {}).get("tensor_parallel") or {}).get("autotp_size", 0)
    # DeepSpeed itself may have other ranks share tensors of a model that was loaded whole.
    if loaded == now or (config is not None and loaded in (1, configured)):
        return
    there = f', or DeepSpeed\'s configuration "tensor_parallel": {{"autotp_size": {loaded}}}'
    raise ConfigError(
        f"{type(model).__name__} was loaded with tensor_parallel={loaded}, whose ranks must get the same "
        f"batch, but accelerate has {now} ranks share tensors; make the Accelerator or TrainingArguments "
        f"before the model, with ParallelismConfig(tp_size={loaded}){'' if config is None else there}"
    )
