"""Which engine a script is set up for, found where transformers, accelerate and DeepSpeed keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from zerostart.engines.deepspeed.settings import configured_dtype
from zerostart.errors import ConfigError
from zerostart.upstream.accelerate import FSDP2Plugin, fsdp2_plugin
from zerostart.upstream.deepspeed_active import active_config, config_stage, open_init_dtype

__all__ = ["STAGES", "Active", "deepspeed_dtype", "find_active", "fsdp2_config"]

#: ZeRO stages whose configuration makes ``from_pretrained`` a sharded load.
STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Active:
    """An engine, its configuration, and the dtype that it wants parameters in (None: the call's own)."""

    engine: str
    zero_stage: int = 3
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None


def find_active(model: type) -> Active | None:
    """What a model of the class ``model`` is to be loaded for, None where no sharding is set up.

    Raises ConfigError for settings that a load cannot honour.
    """
    opened = open_init_dtype()
    config = active_config()
    stage = config_stage(config)
    if config is not None and stage in STAGES:
        return Active("deepspeed", stage, config, opened or deepspeed_dtype(config, stage))
    if opened is not None:
        return Active("deepspeed", 3, {}, opened)
    plugin = None if config is not None else fsdp2_plugin()
    if plugin is None:
        return None
    # accelerate trains fp32 copies wherever the precision is mixed.
    dtype = None if plugin.mixed_precision == "no" else torch.float32
    return Active("fsdp2", 3, fsdp2_config(plugin, model), dtype)


def deepspeed_dtype(config: Mapping[str, Any] | None, stage: int) -> torch.dtype | None:
    """The dtype of parameters for a DeepSpeed configuration.

    At stage 3 that is fp32 where none is enabled; at stages 1 and 2 the engine then takes them as they are.
    """
    return configured_dtype(config) or (torch.float32 if stage == 3 else None)


def fsdp2_config(found: FSDP2Plugin, model: type) -> dict[str, Any]:
    """accelerate's FSDP2 settings as ``engine_config``. Raises ConfigError, by the setting."""
    plugin = found.plugin
    if plugin.ignored_modules is not None:
        raise ConfigError(
            "fsdp_ignored_modules is not available under zerostart.enabled(); remove it, or load without "
            "zerostart"
        )
    if plugin.activation_checkpointing:
        raise ConfigError(
            "fsdp_activation_checkpointing is not available under zerostart.enabled(), since accelerate "
            "wraps layers before they are sharded; use gradient_checkpointing=True of TrainingArguments, or "
            "model.gradient_checkpointing_enable()"
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
