"""The settings of a DeepSpeed configuration, read and checked before anything is built."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Mesh
from zerostart.geometry.layout.layout import FlatRules
from zerostart.upstream.types import DeepSpeedConfig

#: Devices for parameters and states.
DEVICES = ("none", "cpu", "nvme")


def section_of(config: DeepSpeedConfig, key: str, where: str = "engine_config") -> DeepSpeedConfig:
    """Return a section of ``config``, {} without one. Raises ConfigError for other values."""
    section = config.get(key)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where}[{key!r}] is not a dict")
    return section


def number(section: DeepSpeedConfig, key: str, default: int) -> int:
    """Return a whole number >= 0; "auto" and None give the default. Raises ConfigError."""
    value = section.get(key, default)
    if value in ("auto", None):
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise ConfigError(f"engine_config has {key}={value!r}, which must be a whole number")
    return int(value)


def device_of(section: DeepSpeedConfig, key: str, outdated: object) -> str:
    """Return the device of an offload section, one of ``DEVICES``.

    ``outdated`` is the value of the older boolean key. Raises ConfigError for another device.
    """
    if not section:
        return "cpu" if outdated is True else "none"
    device = str(getattr(section.get("device"), "value", section.get("device")) or "none")
    if device not in DEVICES:
        raise ConfigError(f"{key} to {device!r} is unknown; choose one of {', '.join(DEVICES)}")
    return device


#: Keys of ``expert_parallel`` that route tokens or cut experts further, with their defaults.
ROUTING: Mapping[str, object] = {
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


def autoep_size(config: DeepSpeedConfig) -> int:
    """Return the number of ranks that share experts; 0 if ``expert_parallel`` is off.

    Raises ConfigError for settings that would run experts unlike the model itself.
    """
    section = section_of(config, "expert_parallel")
    if section.get("enabled") is not True:
        return 0
    where = "engine_config['expert_parallel']"
    for key, default in ROUTING.items():
        if section.get(key, default) != default:
            raise ConfigError(
                f"{where} has {key}={section[key]!r}, but the model itself decides how its experts run; "
                "leave it out"
            )
    size = number(section, "autoep_size", 1)
    if size < 2:
        raise ConfigError(
            f"{where} is enabled with autoep_size={size}, so that no ranks share experts; leave the "
            "section out, or set autoep_size to the number of ranks that share them"
        )
    return size


#: Smallest partition, in bytes, that DeepSpeed swaps (MIN_AIO_BYTES).
MIN_SWAP = 1 << 20
#: Buffers for swapped optimizer states, each of the largest sub-group (``offload_optimizer.buffer_count``).
SWAP_BUFFERS = 4
#: Sections that name the dtype of the parameters.
_PRECISIONS = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
_DTYPES = {**_PRECISIONS, "fp32": torch.float32, "float32": torch.float32, "float16": torch.float16}
#: Names of DeepSpeed's optimizers, which are fused kernels.
_OPTIMIZERS = {"adam": "fused_adamw", "adamw": "fused_adamw", "sgd": "sgd"}
#: Without one of these DeepSpeed reduces no gradients of experts at stages 1 and 2.
_REDUCING = ("contiguous_gradients", "reduce_scatter")
#: Keys of ``tensor_parallel`` that say which layers are cut.
TENSOR_RULES = ("preset_model", "partition_config")
_ZERO = "engine_config['zero_optimization']"
_ALL_REDUCE = "stage3_use_all_reduce_for_fetch_params"


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Settings for a load and a forecast; "auto" is DeepSpeed's default."""

    #: None if the configuration has no stage.
    stage: int | None = None
    #: None if the configuration has no dtype.
    dtype: torch.dtype | None = None
    #: Home of partitions: ``none``, ``cpu`` or ``nvme``.
    offload: str = "none"
    states_pinned: bool = False
    #: Ranks of a hierarchical partition group (ZeRO++); 1 for none.
    secondary: int = 1
    #: DeepSpeed's ``stage3_partition_stream_chunk_size``, in elements; 0 for unset.
    stream_elements: int = 0
    #: True if the configuration names leaf modules.
    names_leaves: bool = False
    quantized_weights: bool = False
    quantized_frozen_weights: bool = False
    persistent_parameter: int = 100_000
    persistent_model: int = sys.maxsize
    aio_block_size: int = MIN_SWAP
    #: Options of the layout of flat buffers.
    round_robin: bool = False
    aligned: bool = False
    #: Elements of the reduction bucket.
    bucket: int = 500_000_000
    #: Elements updated at a time (stage 3).
    sub_group: int = 1_000_000_000
    #: Home of the optimizer states, as in ``offload``.
    optimizer_home: str = "none"
    #: True if DeepSpeedCPUAdam updates: required for offloaded states unless ``zero_force_ds_cpu_optimizer``
    #: is false.
    fused: bool = True
    swap_buffers: int = SWAP_BUFFERS
    #: Dtype of kept gradients; None for the model's own.
    accumulates: torch.dtype | None = None
    #: Optimizer that the engine makes, as ``zerostart.plan`` names it; None without one.
    optimizer: str | None = None
    #: Ranks that share sequences.
    sequence_parallel: int = 1
    #: Divisor of gradients before their reduction.
    predivide: float = 1.0
    #: Settings that need trainable parameters of one dtype.
    one_dtype: tuple[str, ...] = ()
    #: Settings of ``zero_optimization`` with which stages 1 and 2 do not reduce the gradients of experts.
    unreduced: tuple[str, ...] = ()
    #: True if groups of ranks with the same data come before those that share experts.
    data_before_experts: bool = False
    #: zerostart's own expert plan, which precedes the model's.
    ep_plan: Mapping[str, str] | None = None
    #: zerostart's own tensor plan, which precedes the model's.
    tp_plan: Mapping[str, str] | None = None
    #: The section ``tensor_parallel``.
    tensors: DeepSpeedConfig = field(default_factory=dict)
    #: Number of ranks in the section ``tensor_parallel``; 0 without one.
    autotp_size: int = 0
    #: True if a compiler pass runs the collectives of tensors.
    compiles_tensors: bool = False
    #: Number of ranks of an enabled section ``expert_parallel``; 0 without one.
    autoep_size: int = 0

    @classmethod
    def of(cls, config: DeepSpeedConfig | None) -> DeepSpeedSettings:
        """Read a configuration. Raises ConfigError or EngineError if no load can serve it."""
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"engine_config is a {type(config).__name__}; DeepSpeed takes its configuration as a dict"
            )
        given: DeepSpeedConfig = config or {}
        if section_of(given, "weight_quantization").get("quantized_initialization"):
            raise ConfigError(
                "engine_config['weight_quantization'] has quantized_initialization, which would store "
                "weights in other bits than the checkpoint holds; leave it out"
            )
        zero = section_of(given, "zero_optimization")
        accumulated = section_of(given, "data_types").get("grad_accum_dtype")
        return cls(
            stage=number(zero, "stage", 0) if zero.get("stage") not in (None, "auto") else None,
            dtype=_dtype(given),
            quantized_weights=zero.get("zero_quantized_weights") is True,
            quantized_frozen_weights=zero.get("zero_quantized_nontrainable_weights") is True,
            aio_block_size=number(section_of(given, "aio"), "block_size", MIN_SWAP),
            round_robin=zero.get("round_robin_gradients") is True,
            aligned=zero.get("parameter_alignment") is True,
            names_leaves="leaf_module" in zero,
            fused=given.get("zero_force_ds_cpu_optimizer") is not False,
            accumulates=_DTYPES.get(str(accumulated)),
            optimizer=_optimizer(given),
            sequence_parallel=number(given, "sequence_parallel_size", 1),
            predivide=1.0 if (factor := given.get("gradient_predivide_factor", 1.0)) == "auto" else factor,
            data_before_experts=given.get("use_data_before_expert_parallelism") is True,
            unreduced=tuple(key for key in _REDUCING if zero.get(key, True) is False),
            ep_plan=given.get("ep_plan"),
            tp_plan=given.get("tp_plan"),
            tensors=(tensors := section_of(given, "tensor_parallel")),
            autotp_size=number(tensors, "autotp_size", 0),
            compiles_tensors="autotp" in (section_of(given, "compile").get("passes") or ()),
            autoep_size=autoep_size(given),
            **_sizes(zero),
            **_homes(zero),
        )

    @property
    def states_on_host(self) -> bool:
        """True if the optimizer's states are in host memory."""
        return self.optimizer_home == "cpu"

    def check(self, zero_stage: int, mesh: Mesh) -> None:
        """Raise EngineError for a configuration of another stage.

        Raises ConfigError for settings that are known to train wrongly.
        """
        if self.stage not in (None, zero_stage):
            raise EngineError(
                f"engine_config asks for ZeRO stage {self.stage}, but the load for stage {zero_stage}; use "
                "the same stage in both"
            )
        for refusal in self._refusals(zero_stage, mesh):
            raise ConfigError(refusal)

    def _refusals(self, zero_stage: int, mesh: Mesh) -> Iterator[str]:
        experts, tensors, sequences = mesh.expert_parallel, mesh.tensor_parallel, mesh.sequence_parallel
        for axis, key, size in (
            ("expert_parallel", "autoep_size", self.autoep_size),
            ("tensor_parallel", "autotp_size", self.autotp_size),
        ):
            if size > 1 and size != getattr(mesh, axis):
                yield (
                    f"{axis}={getattr(mesh, axis)}, but engine_config[{axis!r}] has {key}={size}; use one "
                    "number for both, or leave one out"
                )
        if self.sequence_parallel not in (1, sequences):
            yield (
                f"engine_config asks for sequence_parallel_size={self.sequence_parallel}, but the load for "
                f"sequence_parallel={sequences}; pass sequence_parallel={self.sequence_parallel}"
            )
        if mesh.world_size % min(self.secondary, mesh.world_size):
            yield (
                f"zero_hpz_partition_size={self.secondary} does not divide the {mesh.world_size} ranks; "
                "choose a divisor"
            )
        if zero_stage == 3 and self.predivide == mesh.data(0)[1] > 1:
            yield (
                f"gradient_predivide_factor={self.predivide} for the mean of {mesh.data(0)[1]} ranks at "
                "stage 3 is not available: DeepSpeed divides gradients by it, and does not multiply them by "
                "it again; use another factor"
            )
        if experts > 1:
            yield from self._expert_refusals(zero_stage)
        if tensors > 1:
            yield from self._tensor_refusals(mesh)
        if sequences > 1 and zero_stage == 0:
            yield (
                f"sequence_parallel={sequences} with zero_stage=0 is not available in this version; use "
                "stage 1, 2 or 3"
            )
        uneven = {
            f"gradient_predivide_factor={self.predivide}": self.predivide != 1.0,
            "reduce_scatter=False": "reduce_scatter" in self.unreduced,
        }
        for setting in (name for name, there in uneven.items() if there and sequences > 1):
            yield (
                f"sequence_parallel={sequences} with {setting} is not available in this version: DeepSpeed "
                "then averages some gradients over all ranks, and others only over ranks with different "
                f"batches; leave {setting.split('=')[0]} out of engine_config, or use sequence_parallel=1"
            )
        uncut = {
            f"zero_hpz_partition_size={self.secondary}": self.secondary > 1 and (experts > 1 or tensors > 1),
            "offload_param to nvme": self.offload == "nvme" and tensors > 1,
            "use_data_before_expert_parallelism": self.data_before_experts and (experts > 1 or tensors > 1),
        }
        for setting in (name for name, there in uncut.items() if there):
            axis = "tensor_parallel" if tensors > 1 else "expert_parallel"
            yield (
                f"{axis}={getattr(mesh, axis)} with {setting} is not available in this version; use "
                f"{axis}=1, or leave {setting.split('=')[0]} out of engine_config"
            )

    def _expert_refusals(self, zero_stage: int) -> Iterator[str]:
        if zero_stage < 1:
            yield (
                f"expert_parallel with zero_stage={zero_stage} is not available: DeepSpeed reduces gradients "
                "of experts at stages 1 to 3; use one of these, or engine='fsdp2'"
            )
        if zero_stage < 3 and self.unreduced:
            yield (
                "DeepSpeed reduces the gradients of experts at stages 1 and 2 only with "
                f"{self.unreduced[0]}, which engine_config['zero_optimization'] sets to False; leave it "
                "out, or use zero_stage=3"
            )
        if self.dtype == torch.bfloat16 and self._plain_bf16(zero_stage):
            yield (
                "expert_parallel at stage 1 in bf16 with grad_accum_dtype fp32 is not available: it "
                "selects DeepSpeed's BF16_Optimizer, which reduces gradients of experts only in "
                "DeepSpeed's own layers; use zero_stage=2 or 3, or leave grad_accum_dtype out of "
                "engine_config['data_types']"
            )

    def _tensor_refusals(self, mesh: Mesh) -> Iterator[str]:
        size = mesh.tensor_parallel
        if mesh.sequence_parallel > 1:
            yield (
                f"tensor_parallel={size} with sequence_parallel={mesh.sequence_parallel} is not available "
                "with DeepSpeed, where ranks that share tensors must have the same tokens of a sequence; "
                "use one of them, or engine='fsdp2'"
            )
        ruled = [key for key in TENSOR_RULES if self.tensors.get(key)]
        if ruled and self.tp_plan is not None:
            yield f"engine_config has both tp_plan and a {ruled[0]} in tensor_parallel; use one of them"
        if self.compiles_tensors:
            yield (
                f"tensor_parallel={size} with the pass 'autotp' of engine_config['compile'] is not "
                "available in this version; remove that pass, or use tensor_parallel=1"
            )

    def _plain_bf16(self, zero_stage: int) -> bool:
        return zero_stage == 1 and self.accumulates == torch.float32 and self.optimizer_home == "none"

    def flat_rules(self, zero_stage: int, partitions: int) -> FlatRules:
        """Return the flattening rules of the configured optimizer, a guess if unknown."""
        plain = self._plain_bf16(zero_stage)  # It knows neither option.
        return FlatRules(
            partitions, round_robin=self.round_robin and not plain, aligned=self.aligned and not plain
        )

    def homes(self, sizes: Mapping[str, tuple[int, int, int]], world_size: int) -> dict[str, str]:
        """Return the home of each parameter's partition, one of ``DEVICES``, by name.

        ``sizes`` has ``(elements, ranks that partition them, bytes of an element)``. Small parameters remain
        on the accelerator, in order, until they fill their budget (``Init._convert_to_deepspeed_param``).
        NVMe gets partitions of at least one block (``AsyncPartitionedParameterSwapper.swappable_tensor``).
        """
        homes: dict[str, str] = {}
        # In the order of the model, as DeepSpeed converts parameters: the first small ones use up the budget.
        kept, budget = 0, self.persistent_model // world_size
        for name, (numel, owners, itemsize) in sizes.items():
            persistent = numel <= self.persistent_parameter and kept + numel <= budget
            kept += numel if persistent else 0
            # Size of the padded partition: the files of all owners have one size.
            nbytes = -(-numel // owners) * itemsize
            if self.offload == "nvme" and nbytes >= max(MIN_SWAP, self.aio_block_size):
                homes[name] = "nvme"
            elif persistent or self.offload == "none":
                homes[name] = "none"
            else:
                homes[name] = "cpu"
        return homes


def _dtype(config: DeepSpeedConfig) -> torch.dtype | None:
    for key, dtype in _PRECISIONS.items():
        if section_of(config, key).get("enabled") is True:
            return dtype
    return None


def _optimizer(config: DeepSpeedConfig) -> str | None:
    section = section_of(config, "optimizer")
    if not section:
        return None
    # For the forecast only: unknown optimizers count as AdamW.
    kind = str(section.get("type", "")).lower()
    plain = section_of(section, "params", "engine_config['optimizer']").get("torch_adam") is True
    return "adamw" if plain or kind not in _OPTIMIZERS else _OPTIMIZERS[kind]


def _sizes(zero: DeepSpeedConfig) -> dict[str, Any]:
    """The fields that are numbers of elements or of ranks."""
    fields = DeepSpeedSettings
    return {
        "secondary": max(1, number(zero, "zero_hpz_partition_size", fields.secondary)),
        "stream_elements": number(zero, "stage3_partition_stream_chunk_size", fields.stream_elements),
        "persistent_parameter": number(
            zero, "stage3_param_persistence_threshold", fields.persistent_parameter
        ),
        "persistent_model": number(zero, "stage3_model_persistence_threshold", fields.persistent_model),
        "bucket": number(zero, "reduce_bucket_size", fields.bucket),
        "sub_group": number(zero, "sub_group_size", fields.sub_group),
    }


def _homes(zero: DeepSpeedConfig) -> dict[str, Any]:
    parameters = section_of(zero, "offload_param", _ZERO)
    offload = device_of(parameters, "offload_param", zero.get("cpu_offload_param"))
    if offload == "nvme" and not parameters.get("nvme_path"):
        raise ConfigError("offload_param to nvme needs nvme_path, a directory on the NVMe device")
    secondary = number(zero, "zero_hpz_partition_size", 1)
    if offload == "nvme" and secondary > 1:
        raise ConfigError(
            f"zero_hpz_partition_size={secondary} with offload_param to nvme is not available: "
            "DeepSpeed keeps secondary partitions where the parameters are, and has none on NVMe; use "
            "offload_param to cpu, or leave zero_hpz_partition_size out"
        )
    states = section_of(zero, "offload_optimizer", _ZERO)
    one_dtype = {"offload_param to nvme": offload == "nvme", _ALL_REDUCE: zero.get(_ALL_REDUCE) is True}
    return {
        "offload": offload,
        "states_pinned": states.get("pin_memory") is True,
        "optimizer_home": device_of(states, "offload_optimizer", zero.get("cpu_offload")),
        "swap_buffers": number(states, "buffer_count", SWAP_BUFFERS),
        "one_dtype": tuple(setting for setting, there in one_dtype.items() if there),
    }
