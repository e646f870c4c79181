"""The configuration of DeepSpeed, read and checked in one place before anything is built or read."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Mesh
from zerostart.geometry.layout.flat import FlatRules
from zerostart.upstream.deepspeed.types import DeepSpeedConfig

#: Where parameters and states can be put.
DEVICES = ("none", "cpu", "nvme")


def section_of(config: DeepSpeedConfig, key: str, where: str = "engine_config") -> DeepSpeedConfig:
    """A section of ``config``, {} where there is none; raises ConfigError for anything but a section."""
    section = config.get(key)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where}[{key!r}] is not a dict")
    return section


def number(section: DeepSpeedConfig, key: str, default: int) -> int:
    """A whole number that is not negative; "auto" and None are the default. Raises ConfigError for others."""
    value = section.get(key, default)
    if value in ("auto", None):
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise ConfigError(f"engine_config has {key}={value!r}, which must be a whole number")
    return int(value)


def device_of(section: DeepSpeedConfig, key: str, outdated: object) -> str:
    """One of ``DEVICES``, that an offload section names; ``outdated`` is what stood in its place before it.

    Raises ConfigError for another device.
    """
    if not section:
        return "cpu" if outdated is True else "none"
    device = str(getattr(section.get("device"), "value", section.get("device")) or "none")
    if device not in DEVICES:
        raise ConfigError(f"{key} to {device!r} is unknown; choose one of {', '.join(DEVICES)}")
    return device


# The keys of a DeepSpeed configuration, and what a load refuses of them.
# Every key of it has a row in ``docs/deepspeed-config.md``: obeyed, without effect on a load, or refused.

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

#: How alike an unknown key and a known one are, at least, where one is a slip of the other.
_ALIKE = 0.85


def check_keys(config: DeepSpeedConfig) -> None:
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
                    f"engine_config has {key!r}, which DeepSpeed does not know and would silently "
                    "ignore; did "
                    f"you mean {near[0]!r}?"
                )
    if section_of(config, "weight_quantization").get("quantized_initialization"):
        raise ConfigError(
            "engine_config['weight_quantization'] has quantized_initialization, which would store "
            "weights in other bits than the checkpoint holds; leave it out"
        )
    _refuse_removed(section_of(config, "zero_optimization"))


def autoep_size(config: DeepSpeedConfig) -> int:
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


def _refuse_removed(zero: DeepSpeedConfig) -> None:
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


# The settings that a load goes by, from sections whose keys are known.

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
#: What of the section ``tensor_parallel`` says which layers are cut.
TENSOR_RULES = ("preset_model", "partition_config")
_ZERO = "engine_config['zero_optimization']"
_ALL_REDUCE = "stage3_use_all_reduce_for_fetch_params"


@dataclass(frozen=True)
class DeepSpeedSettings:
    """What a load and a forecast need to know of a configuration; "auto" is DeepSpeed's default."""

    #: None where the configuration does not say.
    stage: int | None = None
    #: None where the configuration does not say.
    dtype: torch.dtype | None = None
    #: Where partitions lie: ``none``, ``cpu`` or ``nvme``.
    offload: str = "none"
    pinned: bool = False
    states_pinned: bool = False
    #: Ranks of a hierarchical partition group (ZeRO++); 1 for none.
    secondary: int = 1
    #: DeepSpeed's ``stage3_partition_stream_chunk_size``, in elements; 0 for unset.
    stream_elements: int = 0
    #: Whether the configuration says which modules are leaves.
    names_leaves: bool = False
    quantized_weights: bool = False
    quantized_frozen_weights: bool = False
    persistent_parameter: int = 100_000
    persistent_model: int = sys.maxsize
    aio_block_size: int = MIN_SWAP
    #: How flat buffers are asked to be laid out, and so ``aligned``.
    round_robin: bool = False
    aligned: bool = False
    #: Elements of the reduction bucket.
    bucket: int = 500_000_000
    #: Elements updated at a time (stage 3).
    sub_group: int = 1_000_000_000
    #: As ``offload``, of the states.
    optimizer_home: str = "none"
    #: Whether the update runs in DeepSpeedCPUAdam, which DeepSpeed insists on for offloaded states unless
    #: ``zero_force_ds_cpu_optimizer`` is false.
    fused: bool = True
    swap_buffers: int = SWAP_BUFFERS
    #: Dtype in which gradients are kept; None for the model's own.
    accumulates: torch.dtype | None = None
    #: The one that the engine is to make, as ``zerostart.plan`` names it; None for none.
    optimizer: str | None = None
    #: Ranks that share sequences.
    sequence_parallel: int = 1
    #: Settings with which the gradients of ranks that share sequences have no one mean.
    unaveraged: tuple[str, ...] = ()
    #: Settings that DeepSpeed refuses at stages 2 and 3, where it scatters gradients.
    scaled: tuple[str, ...] = ()
    #: What DeepSpeed divides gradients by before it reduces them.
    predivide: float = 1.0
    #: Settings with which DeepSpeed handles trainable parameters of one dtype only.
    one_dtype: tuple[str, ...] = ()
    #: Settings at the top with which experts cannot be shared over ranks.
    unshared: tuple[str, ...] = ()
    #: Settings of ``zero_optimization`` with which stages 1 and 2 do not reduce the gradients of experts.
    unreduced: tuple[str, ...] = ()
    #: zerostart's own setting, which comes before the model's own plan.
    ep_plan: Mapping[str, str] | None = None
    #: The same for tensors.
    tp_plan: Mapping[str, str] | None = None
    #: The section ``tensor_parallel``.
    tensors: DeepSpeedConfig = field(default_factory=dict)
    #: Its number of ranks; 0 where it does not say.
    autotp_size: int = 0
    #: Whether a compiler's pass does the collectives of tensors.
    compiles_tensors: bool = False
    #: Number of ranks of an enabled section ``expert_parallel``; 0 where there is none.
    autoep_size: int = 0

    @classmethod
    def of(cls, config: DeepSpeedConfig | None) -> DeepSpeedSettings:
        """Read a configuration; raises ConfigError or EngineError for what no load can serve."""
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"engine_config is a {type(config).__name__}; DeepSpeed takes its configuration as a dict"
            )
        known: DeepSpeedConfig = config or {}
        check_keys(known)
        zero = section_of(known, "zero_optimization")
        accumulated = section_of(known, "data_types").get("grad_accum_dtype")
        unshared = {
            "use_data_before_expert_parallelism": known.get("use_data_before_expert_parallelism") is True,
        }
        return cls(
            stage=number(zero, "stage", 0) if zero.get("stage") not in (None, "auto") else None,
            dtype=_dtype(known),
            quantized_weights=zero.get("zero_quantized_weights") is True,
            quantized_frozen_weights=zero.get("zero_quantized_nontrainable_weights") is True,
            aio_block_size=number(section_of(known, "aio"), "block_size", MIN_SWAP),
            round_robin=zero.get("round_robin_gradients") is True,
            aligned=zero.get("parameter_alignment") is True,
            names_leaves="leaf_module" in zero,
            fused=known.get("zero_force_ds_cpu_optimizer") is not False,
            accumulates=_DTYPES.get(str(accumulated)),
            optimizer=_optimizer(known),
            sequence_parallel=number(known, "sequence_parallel_size", 1),
            unaveraged=_unaveraged(known, zero),
            predivide=_predivide(known),
            scaled=_scaled(known) if zero.get("reduce_scatter", True) is not False else (),
            unshared=tuple(setting for setting, there in unshared.items() if there),
            unreduced=tuple(key for key in _REDUCING if zero.get(key, True) is False),
            ep_plan=known.get("ep_plan"),
            tp_plan=known.get("tp_plan"),
            tensors=(tensors := section_of(known, "tensor_parallel")),
            autotp_size=number(tensors, "autotp_size", 0),
            compiles_tensors="autotp" in (section_of(known, "compile").get("passes") or ()),
            autoep_size=autoep_size(known),
            **_sizes(zero),
            **_homes(zero),
        )

    @property
    def states_on_host(self) -> bool:
        """Whether the optimizer's states are in host memory."""
        return self.optimizer_home == "cpu"

    def check_stage(self, zero_stage: int, parallel: bool) -> None:
        """Raise EngineError for a configuration of another stage.

        Raises ConfigError for what stages 1 and 2 do not serve.
        """
        if parallel and zero_stage < 1:
            raise ConfigError(
                f"expert_parallel with zero_stage={zero_stage} is not available: DeepSpeed reduces gradients "
                "of experts at stages 1 to 3; use one of these, or engine='fsdp2'"
            )
        if parallel and zero_stage < 3 and self.unreduced:
            raise ConfigError(
                "DeepSpeed reduces the gradients of experts at stages 1 and 2 only with "
                f"{self.unreduced[0]}, which engine_config['zero_optimization'] sets to False; leave it "
                "out, or use zero_stage=3"
            )
        # Which optimizer DeepSpeed takes follows from several settings at once: this combination alone gets
        # the one that knows no experts.
        if parallel and zero_stage == 1 and self.dtype == torch.bfloat16 and self._plain_bf16(zero_stage):
            raise ConfigError(
                "expert_parallel at stage 1 in bf16 with grad_accum_dtype fp32 is not available: it "
                "selects DeepSpeed's BF16_Optimizer, which reduces gradients of experts only in "
                "DeepSpeed's own layers; use zero_stage=2 or 3, or leave grad_accum_dtype out of "
                "engine_config['data_types']"
            )
        if self.stage not in (None, zero_stage):
            raise EngineError(
                f"engine_config asks for ZeRO stage {self.stage}, but the load for stage {zero_stage}; use "
                "the same stage in both"
            )

    def check_sequences(self, zero_stage: int, size: int) -> None:
        """Raise ConfigError for a configuration with which ``size`` ranks cannot share sequences."""
        if self.sequence_parallel not in (1, size):
            raise ConfigError(
                f"engine_config asks for sequence_parallel_size={self.sequence_parallel}, but the load for "
                f"sequence_parallel={size}; pass sequence_parallel={self.sequence_parallel}"
            )
        if size > 1 and zero_stage == 0:
            raise ConfigError(
                f"sequence_parallel={size} with zero_stage=0 is not available in this version; use stage 1, "
                "2 or 3"
            )
        for setting in self.unaveraged if size > 1 else ():
            raise ConfigError(
                f"sequence_parallel={size} with {setting} is not available in this version: DeepSpeed then "
                "averages some gradients over all ranks, and others only over ranks with different "
                f"batches; leave {setting.split('=')[0]} out of engine_config, or use sequence_parallel=1"
            )

    def check_scaling(self, zero_stage: int, averaging: int) -> None:
        """Raise ConfigError for gradients of ``averaging`` ranks that DeepSpeed scales wrongly, or not."""
        if zero_stage == 3 and self.predivide == averaging > 1 and not self.scaled:
            raise ConfigError(
                f"gradient_predivide_factor={self.predivide} for the mean of {averaging} ranks at stage 3 is "
                "not available: DeepSpeed divides gradients by it, and does not multiply them by it again; "
                "use another factor"
            )
        for setting in self.scaled if zero_stage > 1 else ():
            raise ConfigError(
                f"{setting} at stage {zero_stage} is not available: DeepSpeed does not support it with "
                "reduce_scatter; leave it out of engine_config, or set reduce_scatter to False in "
                "engine_config['zero_optimization']"
            )

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ConfigError for a mesh that cannot be trained, or not with these settings."""
        world_size = mesh.world_size
        self._check_tensors(mesh)
        if self.autoep_size and self.autoep_size != mesh.expert_parallel:
            raise ConfigError(
                f"expert_parallel={mesh.expert_parallel}, but engine_config['expert_parallel'] has "
                f"autoep_size={self.autoep_size}; use one number for both, or leave one out"
            )
        both = ("expert_parallel", "tensor_parallel")
        # Of each: the axes that it excludes, whether it is set, its name, and where the user finds it.
        for axes, there, setting, section in (
            (("tensor_parallel",), self.offload == "nvme", "offload_param to nvme", _ZERO),
            (both, self.secondary > 1, f"zero_hpz_partition_size={self.secondary}", _ZERO),
            *((both, True, setting, "engine_config") for setting in self.unshared),
        ):
            for shared in axes:
                if there and getattr(mesh, shared) > 1:
                    raise ConfigError(
                        f"{shared}={getattr(mesh, shared)} with {setting} is not available in this "
                        f"version; use {shared}=1, or leave {setting.split('=')[0]} out of {section}"
                    )
        if world_size % min(self.secondary, world_size):
            raise ConfigError(
                f"zero_hpz_partition_size={self.secondary} does not divide the {world_size} ranks; choose a "
                "divisor"
            )

    def _check_tensors(self, mesh: Mesh) -> None:
        size = mesh.tensor_parallel
        if self.autotp_size > 1 and self.autotp_size != size:
            raise ConfigError(
                f"tensor_parallel={size}, but engine_config['tensor_parallel'] has "
                f"autotp_size={self.autotp_size}; use one number for both, or leave one out"
            )
        if size == 1:
            return
        if mesh.sequence_parallel > 1:
            raise ConfigError(
                f"tensor_parallel={size} with sequence_parallel={mesh.sequence_parallel} is not available "
                "with DeepSpeed, where ranks that share tensors must have the same tokens of a sequence; "
                "use one of them, or engine='fsdp2'"
            )
        ruled = [key for key in TENSOR_RULES if self.tensors.get(key)]
        if ruled and self.tp_plan is not None:
            raise ConfigError(
                f"engine_config has both tp_plan and a {ruled[0]} in tensor_parallel; use one of them"
            )
        if self.compiles_tensors:
            raise ConfigError(
                f"tensor_parallel={size} with the pass 'autotp' of engine_config['compile'] is not "
                "available in this version; remove that pass, or use tensor_parallel=1"
            )

    def _plain_bf16(self, zero_stage: int) -> bool:
        """Whether a model in bf16 gets DeepSpeed's BF16_Optimizer."""
        return zero_stage == 1 and self.accumulates == torch.float32 and self.optimizer_home == "none"

    def flat_rules(self, zero_stage: int, partitions: int) -> FlatRules:
        """How the optimizer that the configuration asks for flattens; a guess where it says too little."""
        plain = self._plain_bf16(zero_stage)  # It knows neither option.
        return FlatRules(
            partitions, round_robin=self.round_robin and not plain, aligned=self.aligned and not plain
        )

    def homes(self, sizes: Mapping[str, tuple[int, int, int]], world_size: int) -> dict[str, str]:
        """Where each parameter's partition lies, one of ``DEVICES``, by name.

        ``sizes`` has ``(elements, ranks that partition them, bytes of an element)``. Small parameters stay on
        the accelerator, in order, until they fill their budget (``Init._convert_to_deepspeed_param``); NVMe
        gets partitions of at least one block (``AsyncPartitionedParameterSwapper.swappable_tensor``).
        """
        found: dict[str, str] = {}
        # In the order of the model, as DeepSpeed converts parameters: the budget is spent by the first small
        # ones.
        kept, budget = 0, self.persistent_model // world_size
        for name, (numel, owners, itemsize) in sizes.items():
            persistent = numel <= self.persistent_parameter and kept + numel <= budget
            kept += numel if persistent else 0
            # Of the padded partition: all owners have files of one size.
            nbytes = -(-numel // owners) * itemsize
            if self.offload == "nvme" and nbytes >= max(MIN_SWAP, self.aio_block_size):
                found[name] = "nvme"
            elif persistent or self.offload == "none":
                found[name] = "none"
            else:
                found[name] = "cpu"
        return found


def _unaveraged(config: DeepSpeedConfig, zero: DeepSpeedConfig) -> tuple[str, ...]:
    whole = ("reduce_scatter=False",) if zero.get("reduce_scatter") is False else ()
    return (*_predivided(config), *whole)


def _scaled(config: DeepSpeedConfig) -> tuple[str, ...]:
    before = ("prescale_gradients",) if config.get("prescale_gradients") is True else ()
    return (*_predivided(config), *before)


def _predivided(config: DeepSpeedConfig) -> tuple[str, ...]:
    factor = _predivide(config)
    return () if factor == 1.0 else (f"gradient_predivide_factor={factor}",)


def _predivide(config: DeepSpeedConfig) -> float:
    factor = config.get("gradient_predivide_factor", 1.0)
    return 1.0 if factor == "auto" else factor


def _dtype(config: DeepSpeedConfig) -> torch.dtype | None:
    for key, dtype in _PRECISIONS.items():
        if section_of(config, key).get("enabled") is True:
            return dtype
    return None


def _optimizer(config: DeepSpeedConfig) -> str | None:
    section = section_of(config, "optimizer")
    if not section:
        return None
    # Only for the forecast: an optimizer that it does not know is counted as AdamW.
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
    """The fields of what is offloaded; raises ConfigError for what DeepSpeed has not."""
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
        "pinned": parameters.get("pin_memory") is True,
        "states_pinned": states.get("pin_memory") is True,
        "optimizer_home": device_of(states, "offload_optimizer", zero.get("cpu_offload")),
        "swap_buffers": number(states, "buffer_count", SWAP_BUFFERS),
        "one_dtype": tuple(setting for setting, there in one_dtype.items() if there),
    }
