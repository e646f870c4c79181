"""What a load needs to know of a DeepSpeed configuration, checked before anything is built or read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerostart.engines.deepspeed.config_keys import check_keys
from zerostart.errors import ConfigError, EngineError
from zerostart.layout import Mesh
from zerostart.layout.flat import FlatRules

__all__ = ["ZeroSettings", "check_stage", "configured_dtype", "flat_rules"]

#: Smallest partition, in bytes, that DeepSpeed swaps (MIN_AIO_BYTES).
MIN_SWAP = 1 << 20
#: Where ``offload_param`` puts partitions.
DEVICES = ("none", "cpu", "nvme")


def configured_dtype(config: Mapping[str, Any] | None) -> torch.dtype | None:
    """The parameter dtype that a DeepSpeed configuration asks for, None if it does not say."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = (config or {}).get(key)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return None


def check_stage(zero_stage: int, config: Mapping[str, Any] | None, parallel: bool) -> None:
    """Raise for a configuration of another stage, and for what stages 1 and 2 do not serve."""
    if parallel and zero_stage < 2:
        raise ConfigError(
            f"expert_parallel with zero_stage={zero_stage} is not available: DeepSpeed reduces gradients of "
            "experts at stages 2 and 3; use one of these, or engine='fsdp2'"
        )
    zero = (config or {}).get("zero_optimization") or {}
    for key in ("contiguous_gradients", "reduce_scatter"):
        if parallel and zero_stage < 3 and zero.get(key, True) is False:
            raise ConfigError(
                f"DeepSpeed reduces gradients of experts at stage 2 with {key} alone; leave it out of "
                "engine_config['zero_optimization'], or use zero_stage=3"
            )
    stage = zero.get("stage", zero_stage)
    if stage != zero_stage:
        raise EngineError(f"engine_config asks for ZeRO stage {stage}, and the load for stage {zero_stage}")


def flat_rules(config: Mapping[str, Any] | None, zero_stage: int, partitions: int) -> FlatRules:
    """How the optimizer that the configuration asks for flattens; a guess where it says too little."""
    zero = (config or {}).get("zero_optimization") or {}
    accumulated = ((config or {}).get("data_types") or {}).get("grad_accum_dtype")
    offloaded = ((zero.get("offload_optimizer") or {}).get("device") or "none") != "none"
    # BF16_Optimizer knows neither option.
    plain = zero_stage == 1 and accumulated in ("fp32", "float32") and not offloaded
    return FlatRules(
        partitions,
        round_robin=zero.get("round_robin_gradients") is True and not plain,
        aligned=zero.get("parameter_alignment") is True and not plain,
    )


@dataclass(frozen=True)
class ZeroSettings:
    """The part of ``zero_optimization`` that decides where a partition lies and how it is loaded.

    ``offload`` is one of ``DEVICES``. ``secondary`` is the number of ranks of a hierarchical partition group
    (ZeRO++), 1 for none. ``stream_elements`` is DeepSpeed's ``stage3_partition_stream_chunk_size``, in
    elements, 0 for unset. ``one_dtype`` names the settings with which DeepSpeed handles trainable parameters
    of one dtype only. ``unshared`` names the settings at the top with which experts cannot be shared over
    ranks. ``ep_plan`` and ``tp_plan``, which are zerostart's, come before the model's own plans.
    """

    offload: str = "none"
    secondary: int = 1
    stream_elements: int = 0
    quantized_weights: bool = False
    quantized_frozen_weights: bool = False
    persistent_parameter: int = 100_000
    persistent_model: int = sys.maxsize
    aio_block_size: int = MIN_SWAP
    one_dtype: tuple[str, ...] = ()
    unshared: tuple[str, ...] = ()
    ep_plan: Mapping[str, str] | None = None
    tp_plan: Mapping[str, str] | None = None
    tensor_parallel: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> ZeroSettings:
        """Read a configuration; raises ConfigError or EngineError for what no load can serve."""
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"engine_config is a {type(config).__name__}; for DeepSpeed it is the configuration as a dict"
            )
        check_keys(config or {})
        zero = (config or {}).get("zero_optimization") or {}
        if not isinstance(zero, Mapping):
            raise ConfigError("engine_config['zero_optimization'] is not a dict")
        _refuse_removed(zero)
        secondary = _number(zero, "zero_hpz_partition_size", 1)
        offload = _offload(zero)
        if offload == "nvme" and secondary > 1:
            raise ConfigError(
                f"zero_hpz_partition_size={secondary} with offload_param to nvme: DeepSpeed keeps secondary "
                "partitions where the parameters are, and has none on nvme; offload_param to cpu, or leave "
                "zero_hpz_partition_size out"
            )
        reducing = "stage3_use_all_reduce_for_fetch_params"
        sequences = _number(config or {}, "sequence_parallel_size", 1)
        before = (config or {}).get("use_data_before_expert_parallelism") is True
        unshared = {"sequence_parallel_size": sequences > 1, "use_data_before_expert_parallelism": before}
        one_dtype = {"offload_param to nvme": offload == "nvme", reducing: zero.get(reducing) is True}
        return cls(
            offload=offload,
            secondary=max(1, secondary),
            stream_elements=_number(zero, "stage3_partition_stream_chunk_size", 0),
            quantized_weights=zero.get("zero_quantized_weights") is True,
            quantized_frozen_weights=zero.get("zero_quantized_nontrainable_weights") is True,
            persistent_parameter=_number(
                zero, "stage3_param_persistence_threshold", cls.persistent_parameter
            ),
            persistent_model=_number(zero, "stage3_model_persistence_threshold", cls.persistent_model),
            aio_block_size=_number((config or {}).get("aio") or {}, "block_size", MIN_SWAP),
            one_dtype=tuple(setting for setting, there in one_dtype.items() if there),
            unshared=tuple(setting for setting, there in unshared.items() if there),
            ep_plan=(config or {}).get("ep_plan"),
            tp_plan=(config or {}).get("tp_plan"),
        )

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ConfigError for a mesh that cannot be trained, or not with these settings."""
        world_size = mesh.world_size
        if mesh.tensor_parallel > 1:
            raise ConfigError(
                f"tensor_parallel={mesh.tensor_parallel} is not available on deepspeed in this version; "
                "use engine='fsdp2', or tensor_parallel=1"
            )
        zero = "engine_config['zero_optimization']"
        for there, setting, section in (
            (self.offload == "nvme", "offload_param to nvme", zero),
            (self.secondary > 1, f"zero_hpz_partition_size={self.secondary}", zero),
            *((True, setting, "engine_config") for setting in self.unshared),
        ):
            if there and mesh.expert_parallel > 1:
                raise ConfigError(
                    f"expert_parallel={mesh.expert_parallel} with {setting} is not available in this "
                    f"version; use expert_parallel=1, or leave {setting.split('=')[0]} out of {section}"
                )
        if world_size % min(self.secondary, world_size):
            raise ConfigError(
                f"zero_hpz_partition_size={self.secondary} does not divide the {world_size} ranks; choose a "
                "divisor"
            )

    def homes(self, sizes: Mapping[str, tuple[int, int, int]], world_size: int) -> dict[str, str]:
        """Where each parameter's partition lies, one of ``DEVICES``, by name.

        ``sizes`` has ``(elements, ranks that partition them, bytes of an element)``. Small parameters stay on
        the accelerator, in order, until they fill their budget (``Init._convert_to_deepspeed_param``); NVMe
        gets partitions of at least one block (``AsyncPartitionedParameterSwapper.swappable_tensor``).
        """
        found: dict[str, str] = {}
        kept, budget = 0, self.persistent_model // world_size
        for name, (numel, owners, itemsize) in sizes.items():
            persistent = numel <= self.persistent_parameter and kept + numel <= budget
            kept += numel if persistent else 0
            nbytes = -(-numel // owners) * itemsize
            if self.offload == "nvme" and nbytes >= max(MIN_SWAP, self.aio_block_size):
                found[name] = "nvme"
            elif persistent or self.offload == "none":
                found[name] = "none"
            else:
                found[name] = "cpu"
        return found


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


def _offload(zero: Mapping[str, Any]) -> str:
    section = zero.get("offload_param")
    if section is None:
        return "cpu" if zero.get("cpu_offload_param") is True else "none"
    if not isinstance(section, Mapping):
        raise ConfigError("engine_config['zero_optimization']['offload_param'] is not a dict")
    device = str(getattr(section.get("device"), "value", section.get("device")) or "none")
    if device not in DEVICES:
        raise ConfigError(f"offload_param to {device!r} is unknown; choose one of {', '.join(DEVICES)}")
    if device == "nvme" and not section.get("nvme_path"):
        raise ConfigError("offload_param to nvme needs nvme_path, a directory on the device")
    return device


def _number(zero: Mapping[str, Any], key: str, default: int) -> int:
    value = zero.get(key, default)
    if value in ("auto", None):
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise ConfigError(f"engine_config has {key}={value!r}, which is not a whole number")
    return int(value)
