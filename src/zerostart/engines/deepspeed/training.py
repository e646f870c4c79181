"""DeepSpeed in a training run: its complete configuration, and how accelerate starts it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from zerostart.engines.training import AccelerateSetup, TrainingJob
from zerostart.errors import ConfigError

#: The dtype in which DeepSpeed keeps the model, by the precision that is mixed with fp32 masters.
KEPT = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Hosts without an accelerator: told ``cpu=True``, accelerate forgets DeepSpeed; told a backend it does not.
HOST_BACKEND = "gloo"


def training_config(stage: int, job: TrainingJob, given: Mapping[str, Any]) -> dict[str, Any]:
    """A complete ``ds_config`` of ``job``, and the user's ``given`` over it.

    ``auto`` is replaced by our value. A value that contradicts the job raises ConfigError: DeepSpeed would
    train with one, and the schedule and the logs follow the other.
    """
    filled: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "gradient_accumulation_steps": job.accumulation,
        "train_batch_size": job.train_batch_size,
        # Always stated: DeepSpeed clips at 1.0 when the key is absent, and 0.0 means no clipping.
        "gradient_clipping": job.max_grad_norm,
        "bf16": {"enabled": job.mixed_precision == "bf16"},
        "fp16": {"enabled": job.mixed_precision == "fp16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,  # the live display is ours
    }
    for key in ("optimizer", "scheduler"):
        if key in given:
            raise ConfigError(f"engine.config.{key}: the optimizer and schedule are set in the train section")
    _merge(filled, given, "engine.config")
    _fill_hidden_size_values(filled["zero_optimization"], job.hidden_size)
    return filled


def accelerate_setup(
    mixed_precision: str, config: Mapping[str, Any], sequence_parallel: int, world_size: int
) -> AccelerateSetup:
    """accelerate's plugin with the configuration ``config``, and Ulysses, which accelerate starts.

    ``world_size`` ranks in groups of ``sequence_parallel``, each of which sees one batch.
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, InitProcessGroupKwargs

    on_cpu = not torch.accelerator.is_available()
    return AccelerateSetup(
        {
            "mixed_precision": mixed_precision,
            # zero3_init_flag would make transformers partition models that are loaded later in this process.
            "deepspeed_plugins": DeepSpeedPlugin(
                hf_ds_config=copy.deepcopy(dict(config)), zero3_init_flag=False
            ),
            "parallelism_config": ParallelismConfig(
                sp_size=sequence_parallel,
                # Of this accelerate makes the size of a step that DeepSpeed then holds against its own.
                dp_shard_size=world_size // sequence_parallel,
                sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
            )
            if sequence_parallel > 1
            else None,
            "kwargs_handlers": [InitProcessGroupKwargs(backend=HOST_BACKEND)] if on_cpu else None,
        },
        {"ACCELERATE_USE_CPU": "false"},
        # DeepSpeed calls collectives by names that torch is about to rename; nobody here can change that.
        ((r"`torch\.distributed\.\w+` is deprecated", FutureWarning),),
    )


def _merge(base: dict[str, Any], given: Mapping[str, Any], where: str) -> None:
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
