"""Private parts of DeepSpeed: the ZeRO-3 parameter contract.

Known for the versions in ``SUPPORTED`` (runtime/zero/partition_parameters.py). Used of it: ``zero.Init`` as
an object, ``Init._convert_to_deepspeed_param``, ``free_param``, ``PartitionedParamStatus``, and the
attributes that ``Init._partition_param`` sets on a parameter's partition.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart.errors import EngineError, UnsupportedVersionError

__all__ = [
    "SUPPORTED",
    "parameter_device",
    "partition_available",
    "partition_of",
    "partitioned_parameter",
    "partitioner",
    "require",
]

#: First known and first unknown version.
SUPPORTED = ((0, 19, 8), (0, 20))


@functools.cache
def _partition_parameters() -> Any:
    """The module ``deepspeed.runtime.zero.partition_parameters``, checked for what is used of it."""
    if not torch.accelerator.is_available():
        # DeepSpeed looks for CUDA tools otherwise, and its import fails or warns on a machine without.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.runtime.zero import partition_parameters
    except ImportError as error:
        raise EngineError(
            f"engine='deepspeed' needs DeepSpeed, which cannot be imported ({error}); "
            "install it with `pip install zerostart[deepspeed]`"
        ) from error
    version = tuple(
        int("".join(filter(str.isdigit, part)) or 0) for part in deepspeed.__version__.split(".")[:3]
    )
    init = partition_parameters.Init
    absent = [
        name
        for owner, name in (
            (init, "_convert_to_deepspeed_param"),
            (init, "_aligned_size"),
            (init, "param_id"),
            (partition_parameters, "free_param"),
            (partition_parameters, "PartitionedParamStatus"),
        )
        if not hasattr(owner, name)
    ]
    if not SUPPORTED[0] <= version < SUPPORTED[1] or absent:
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        raise UnsupportedVersionError(
            f"DeepSpeed {deepspeed.__version__} is installed; zerostart knows ZeRO-3 parameters of "
            f"versions from {low} to before {high}" + (f", and misses {', '.join(absent)}" if absent else "")
        )
    return partition_parameters


def require() -> None:
    """Import DeepSpeed; raises EngineError if it is absent, UnsupportedVersionError if it is unknown."""
    _partition_parameters()


def partitioner(world_size: int, dtype: torch.dtype | None, config: Mapping[str, Any] | None) -> Any:
    """A ``zero.Init`` that converts nothing by itself; sets up ``deepspeed.comm`` where needed.

    It is given a whole configuration, and not ``dtype=``, which is ignored for fp32 on a host without fp16.
    """
    module = _partition_parameters()
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", str(_local_rank()))
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    init = module.Init(config_dict_or_path=_init_config(world_size, dtype, config), enabled=True)
    if init.mem_efficient_linear:
        # Runs by itself only in a context or for a prebuilt module; ZeRO-3 needs it for its backward hooks.
        init._enable_mem_efficient_linear()
    return init


def _local_rank() -> int:
    """The rank on this host, for a launcher that does not say: ranks are laid out host by host."""
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return dist.get_rank() % max(1, devices)


def _init_config(
    world_size: int, dtype: torch.dtype | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What ``zero.Init`` reads of a configuration; without "auto" values, which a trainer fills in."""
    kept = ("zero_optimization", "bf16", "bfloat16", "fp16", "fp16_master_weights_and_grads")
    result = _settled({key: value for key, value in (config or {}).items() if key in kept})
    result.setdefault("zero_optimization", {})["stage"] = 3
    if dtype in (torch.bfloat16, torch.float16):
        result.setdefault("bf16" if dtype is torch.bfloat16 else "fp16", {})["enabled"] = True
    return {"train_micro_batch_size_per_gpu": 1, "train_batch_size": world_size, **result}


def _settled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _settled(item) for key, item in value.items() if item != "auto"}
    return value


def parameter_device(init: Any) -> torch.device:
    """Where the partitions live."""
    device: torch.device = torch.device(init.local_device)
    # "cuda:0" and "cpu:0" name the device that tensors report as "cuda:0" and "cpu".
    return torch.device("cpu") if device.type == "cpu" else device


def partitioned_parameter(init: Any, old: nn.Parameter, partition: torch.Tensor) -> nn.Parameter:
    """A ZeRO-3 parameter with the shape and attributes of ``old`` (on meta), whose share is ``partition``.

    Must be called in the same order on every rank, since DeepSpeed numbers parameters and sorts its
    collectives by that number. Follows ``Init._partition_param``.
    """
    module = _partition_parameters()
    placeholder = torch.empty(1, dtype=old.dtype, device=partition.device).expand(old.shape)
    new = nn.Parameter(placeholder, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    # The conversion wraps this method of the old object's dictionary otherwise.
    new.__dict__.pop("item", None)
    init._convert_to_deepspeed_param(new)
    aligned = init._aligned_size(new)
    size = aligned // init._partition_world_size(new)
    if size != partition.numel():
        raise EngineError(f"DeepSpeed partitions a parameter into {size} elements, not {partition.numel()}")
    state: Any = partition
    state.requires_grad = False
    state.ds_numel = size
    state.status = module.PartitionedParamStatus.AVAILABLE
    state.final_location = None
    converted: Any = new
    converted.ds_tensor = state
    converted.ds_numel_aligned = aligned
    module.free_param(new)
    return new


def partition_of(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], int, int] | None:
    """``(partition, logical shape, rank, world size)`` of a ZeRO-3 parameter; None for any other."""
    if "deepspeed" not in sys.modules or not hasattr(parameter, "ds_id"):
        return None
    p: Any = parameter
    return p.ds_tensor, tuple(p.ds_shape), p.ds_zero_partition_rank, p.ds_zero_partition_world_size


def partition_available(partition: torch.Tensor) -> bool:
    """Whether a ZeRO-3 partition is in memory, and not on NVMe."""
    state: Any = partition
    return bool(state.status == _partition_parameters().PartitionedParamStatus.AVAILABLE)
