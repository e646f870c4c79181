"""The keys of a DeepSpeed configuration, and what a load refuses of them.

Every key of it has a row in ``docs/deepspeed-config.md``: obeyed, without effect on a load, or refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from zerostart.engines.deepspeed.reading import number, section_of
from zerostart.errors import ConfigError, EngineError

#: What DeepSpeed 0.19.8 reads at the top, and ``ep_plan`` and ``tp_plan``, which are zerostart's.
TOP_LEVEL = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "ep_plan",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "tp_plan",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)

#: What DeepSpeed has removed, and refuses when the engine starts.
REMOVED = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    }
)

#: What of ``expert_parallel`` says how tokens are routed, or experts cut further, and its defaults.
ROUTING: Mapping[str, Any] = {
    "expert_activation": None,
    "expert_tensor_parallel_size": 1,
    "load_balance_coeff": None,
    "num_expert_groups": None,
    "num_limited_groups": None,
    "route_norm": None,
    "route_scale": 1.0,
    "routed_scaling_factor": "auto",
    "score_apply": "auto",
    "score_func": "auto",
    "top_k": "auto",
}

#: How alike an unknown key and a known one are, at least, where one is a slip of the other.
_ALIKE = 0.85


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for what ``deepspeed.initialize`` would obey and a load cannot, or would refuse.

    Raises EngineError for what DeepSpeed has given up.
    """
    for key in config:
        if key in REMOVED:
            raise ConfigError(f"engine_config has {key!r}, which DeepSpeed has removed; leave it out")
        if key not in TOP_LEVEL:
            near = difflib.get_close_matches(str(key), TOP_LEVEL, 1, _ALIKE)
            if near:
                raise ConfigError(
                    f"engine_config has {key!r}, which DeepSpeed does not know and would pass over in "
                    f"silence; did you mean {near[0]!r}?"
                )
    if section_of(config, "weight_quantization").get("quantized_initialization"):
        raise ConfigError(
            "engine_config['weight_quantization'] has quantized_initialization, which would keep weights in "
            "other bits than the checkpoint holds; leave it out"
        )
    _refuse_removed(section_of(config, "zero_optimization"))


def autoep_size(config: Mapping[str, Any]) -> int:
    """The ranks that share experts by the section ``expert_parallel``; 0 where it is not enabled.

    Raises ConfigError for what would have experts run otherwise than the model itself does.
    """
    section = section_of(config, "expert_parallel")
    if section.get("enabled") is not True:
        return 0
    where = "engine_config['expert_parallel']"
    for key, default in ROUTING.items():
        if section.get(key, default) != default:
            raise ConfigError(
                f"{where} has {key}={section[key]!r}: experts run as the model itself has it; leave it out"
            )
    size = number(section, "autoep_size", 1)
    if size < 2:
        raise ConfigError(
            f"{where} is enabled with autoep_size={size}, with which no ranks share experts; leave the "
            "section out, or give it a number of ranks"
        )
    return size


def _refuse_removed(zero: Mapping[str, Any]) -> None:
    named = [key for key in ("mics_shard_size", "mics_hierarchical_params_gather") if key in zero]
    if "zeropp_loco_param" in zero:
        raise EngineError(
            "zeropp_loco_param asks for LoCo, which DeepSpeed removed in 0.19; leave it out of "
            "engine_config['zero_optimization']"
        )
    if named:
        raise EngineError(
            f"{named[0]} asks for MiCS, which DeepSpeed removed in 0.19; use zero_hpz_partition_size for "
            "hierarchical partitions, or engine='fsdp2' with replicate= for shard groups with replicas"
        )
