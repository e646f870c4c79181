"""Find the active ZeRO configuration of DeepSpeed, transformers and accelerate."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from zerostart.upstream.guard import Use, demand
from zerostart.upstream.types import DeepSpeedConfig

if TYPE_CHECKING:
    from types import ModuleType

    from accelerate.utils import DeepSpeedPlugin

TOUCHED = (
    Use(
        "deepspeed.runtime.zero.partition_parameters",
        "zero_init_context, top_level_context",
        "whether a zero.Init is open, and for which dtype",
    ),
    Use(
        "transformers.integrations.deepspeed",
        "deepspeed_config",
        "the DeepSpeed configuration that TrainingArguments or HfDeepSpeedConfig keep",
    ),
    Use(
        "accelerate.state:AcceleratorState",
        "_shared_state, deepspeed_plugin",
        "the DeepSpeed plugin of an Accelerator, if there is one",
    ),
    Use(
        "accelerate.utils:DeepSpeedPlugin",
        "set_mixed_precision, zero3_init_flag, .deepspeed_config",
        "the plugin that an Accelerator will make of the launcher's environment",
    ),
)
_MODULE = "deepspeed.runtime.zero.partition_parameters"


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless DeepSpeed is as expected; imports it."""
    demand(TOUCHED)


def open_init_dtype() -> torch.dtype | None:
    """Return the dtype of the open ``zero.Init`` context, or None."""
    module: ModuleType | None = sys.modules.get(_MODULE)
    if module is None or not module.zero_init_context or module.top_level_context is None:
        return None
    dtype: torch.dtype = module.top_level_context.dtype
    return dtype


def active_config() -> Mapping[str, object] | None:
    """Return the active configuration; None with ``zero3_init_flag=False``."""
    from transformers.integrations.deepspeed import deepspeed_config

    plugin = _plugin()
    config: DeepSpeedConfig | None = deepspeed_config()
    if config is None and plugin is not None:
        config = plugin.deepspeed_config
    return None if config_stage(config) == 3 and not _is_wanted(plugin) else config


def config_stage(config: DeepSpeedConfig | None) -> int:
    """Return the ZeRO stage of a configuration, 0 by default."""
    stage = ((config or {}).get("zero_optimization") or {}).get("stage", 0)
    return stage if isinstance(stage, int) else 0


def _is_wanted(plugin: DeepSpeedPlugin | None) -> bool:
    if plugin is not None:
        return bool(plugin.zero3_init_flag)
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return not (launched and os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "").lower() == "false")


def _plugin() -> DeepSpeedPlugin | None:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    from accelerate.state import AcceleratorState

    # A new AcceleratorState would start accelerate.
    if AcceleratorState._shared_state:
        return AcceleratorState().deepspeed_plugin
    from transformers.integrations.deepspeed import deepspeed_config

    if deepspeed_config() is not None:
        return None  # TrainingArguments or HfDeepSpeedConfig; their Accelerator is yet to come.
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    return plugin
