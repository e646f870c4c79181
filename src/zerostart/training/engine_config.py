"""The configuration that the engine gets: complete, with nothing left to its defaults that matters here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from zerostart.errors import ConfigError
from zerostart.training.config import TrainConfig

__all__ = ["deepspeed_config", "engine_config", "own_config"]


def engine_config(config: TrainConfig, world_size: int, hidden_size: int | None) -> dict[str, Any]:
    """What ``zerostart.load`` gets as ``engine_config``; raises :class:`ConfigError`."""
    if config.engine.name == "deepspeed":
        return deepspeed_config(config, world_size, hidden_size)
    return _fsdp2_config(config)


def _fsdp2_config(config: TrainConfig) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = own_config(config)
    plain = {"reshard_after_forward", "replicate", "wrap"}
    if unknown := sorted(set(given) - plain):
        known = ", ".join(sorted(plain))
        raise ConfigError(f"engine.config.{unknown[0]} is unknown for fsdp2; known are {known}")
    if config.train.mixed_precision == "bf16" and config.engine.zero_stage > 0:
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return given


def own_config(config: TrainConfig) -> dict[str, Any]:
    """The user's ``engine.config``, read from its file if it names one; raises :class:`ConfigError`."""
    given = config.engine.config
    if isinstance(given, dict):
        return copy.deepcopy(given)
    try:
        loaded = json.loads(Path(given).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.config {given} is not a readable JSON file: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"engine.config {given} holds no JSON object")
    return loaded


def deepspeed_config(config: TrainConfig, world_size: int, hidden_size: int | None) -> dict[str, Any]:
    """A complete ``ds_config`` from the typed configuration and the user's ``engine.config`` over it.

    ``auto`` is replaced by our value. A value that contradicts the typed configuration raises
    :class:`ConfigError`: DeepSpeed would train with one, and the schedule and the logs follow the other.
    """
    train = config.train
    filled: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.batch_size,
        "gradient_accumulation_steps": train.accumulation,
        "train_batch_size": train.batch_size * train.accumulation * world_size,
        # Always stated: DeepSpeed clips at 1.0 when the key is absent, and 0.0 means no clipping.
        "gradient_clipping": train.max_grad_norm,
        "bf16": {"enabled": train.mixed_precision == "bf16"},
        "fp16": {"enabled": train.mixed_precision == "fp16"},
        "zero_optimization": {"stage": config.engine.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,  # the live display is ours
    }
    given = own_config(config)
    for key in ("optimizer", "scheduler"):
        if key in given:
            raise ConfigError(f"engine.config.{key}: the optimizer and schedule are set in the train section")
    _merge(filled, given, "engine.config")
    _fill_hidden_size_values(filled["zero_optimization"], hidden_size)
    return filled


def _merge(base: dict[str, Any], given: dict[str, Any], where: str) -> None:
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value, f"{where}.{key}")
        elif key not in base:
            base[key] = value
        elif value not in ("auto", base[key]):
            raise ConfigError(
                f"{where}.{key} is {value!r}, but the other sections make it {base[key]!r}; "
                "leave it out or write auto"
            )


def _fill_hidden_size_values(zero: dict[str, Any], hidden_size: int | None) -> None:
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    for key in keys:
        if zero.get(key) == "auto":
            if hidden_size is None:
                raise ConfigError(
                    f"engine.config.zero_optimization.{key}: auto needs a hidden size; give a number"
                )
            # The formulas that transformers and accelerate use.
            area = hidden_size * hidden_size
            values = {keys[0]: area, keys[1]: int(0.9 * area), keys[2]: 10 * hidden_size}
            zero[key] = values[key]
