"""Create and partition ZeRO-3 parameters as DeepSpeed's ``zero.Init`` does."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart.errors import ConfigError, EngineError
from zerostart.upstream.deepspeed import nvme
from zerostart.upstream.deepspeed.muon import import_muon
from zerostart.upstream.guard import Use, demand
from zerostart.upstream.types import DeepSpeedConfig

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed.runtime.zero.partition_parameters import Init

logger = logging.getLogger("zerostart")

_MODULE = "deepspeed.runtime.zero.partition_parameters"
_INIT = f"{_MODULE}:Init"
_CONTEXTS = Use(
    "deepspeed.runtime.zero.partition_parameters",
    "shutdown_init_context, restore_init_context, top_level_context",
    "an open zero.Init is suspended while a model is built",
)
_HIERARCHICAL = Use(
    "deepspeed.utils.groups",
    "_create_zero_param_parallel_group, _get_zero_param_intra_parallel_group",
    "the groups of hierarchical partitions",
)
_LEAVES = Use(
    "deepspeed.utils.z3_leaf_module",
    "set_z3_leaf_module, z3_leaf_module",
    "a module that ranks may run in different parts is gathered as one",
)
TOUCHED = (
    Use(
        _INIT,
        "_convert_to_deepspeed_param, _enable_mem_efficient_linear, param_id, _aligned_size(param), "
        "_partition_world_size(param), .local_device, .mem_efficient_linear, .num_ranks_in_param_group, "
        ".param_swapper, .pin_memory, .remote_device",
        "an Init as an object, which converts parameters one by one",
    ),
    Use(_INIT, "_partition_param(param)", "a parameter gets its partition without a whole tensor"),
    Use(
        "deepspeed.runtime.zero.partition_parameters",
        "free_param, PartitionedParamStatus, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR",
        "the placeholder of a parameter is freed",
    ),
    _CONTEXTS,
    _HIERARCHICAL,
    _LEAVES,
)


def import_deepspeed() -> object:
    """Import and return ``deepspeed``, any version; raises EngineError if absent."""
    if not torch.accelerator.is_available():
        # Without it, the import looks for CUDA tools, and fails or warns on a machine without.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise EngineError(
            f"engine='deepspeed' needs DeepSpeed, which cannot be imported ({error}); "
            "install it with `pip install zerostart[deepspeed]`"
        ) from error
    return deepspeed


#: Builders of DeepSpeed's operations, compiled at first use: communication, and swapping.
OPERATIONS = ("ShareMemCommBuilder", "AsyncIOBuilder")


def load_operations(names: Iterable[str]) -> None:
    """Compile and load DeepSpeed's operations; skip those that the accelerator lacks.

    One process of a machine compiles, and the others wait for it.
    """
    import_deepspeed()
    import_muon()
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    for name in names:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
            continue
        lock = Path(cpp_extension._get_build_directory(builder.name, False), "lock")
        if hasattr(cpp_extension, "FileBaton") and lock.exists():
            logger.warning("%s: another process compiles, or was killed; if none runs, remove it", lock)
        try:
            builder.load()
        except (RuntimeError, OSError, ImportError) as error:
            raise EngineError(
                f"DeepSpeed's operation {builder.name} cannot be compiled on this machine ({error}); it "
                "needs a C++ compiler and ninja"
            ) from error


def is_gathered(parameter: torch.Tensor) -> bool:
    """Return True if ``parameter`` is inside DeepSpeed's ``GatheredParameters``."""
    module = sys.modules.get(_MODULE)
    return module is not None and getattr(parameter, module.DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0) > 0


@functools.cache
def _partition_parameters() -> ModuleType:
    import_deepspeed()
    demand(point for point in TOUCHED if point not in (_CONTEXTS, _HIERARCHICAL, _LEAVES))
    from deepspeed.runtime.zero import partition_parameters

    module: ModuleType = partition_parameters
    return module


def require_version() -> None:
    """Import DeepSpeed; raises EngineError if absent, UnsupportedVersionError if unknown."""
    _partition_parameters()


def join_group() -> None:
    """Initialise DeepSpeed's communication over the process group; collective."""
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", str(_local_rank()))
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)


def join_hierarchical_groups(size: int) -> None:
    """Create the groups of ``size`` ranks of hierarchical partitions; collective."""
    from deepspeed.utils import groups

    demand((_HIERARCHICAL,), "Leave out zero_hpz_partition_size")
    private: ModuleType = groups
    if private._get_zero_param_intra_parallel_group() is None:
        private._create_zero_param_parallel_group(size)


def partitioner(
    world_size: int,
    dtype: torch.dtype | None,
    config: DeepSpeedConfig | None,
    secondary: int,
    owners: dist.ProcessGroup | None,
) -> Init:
    """Return a ``zero.Init`` for single parameters, which ``owners`` share."""
    module = _partition_parameters()
    import deepspeed

    hierarchical = deepspeed.utils.groups._get_zero_param_intra_parallel_group() if secondary > 1 else None
    with _refusals():
        init = module.Init(
            # It ignores ``dtype=`` for fp32 on a host without fp16.
            config_dict_or_path=_init_config(world_size, dtype, config),
            zero_param_parallel_group=hierarchical,
            data_parallel_group=owners,
            enabled=True,
        )
    _check_secondary(init, secondary, world_size)
    if init.mem_efficient_linear:
        # ZeRO-3 needs it for its backward hooks; Init does it only in a context or for a module.
        init._enable_mem_efficient_linear()
    return init


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    # DeepSpeed checks some settings by assert; pydantic's errors are ValueErrors.
    except (DeepSpeedConfigError, ValueError, AssertionError) as error:
        raise ConfigError(f"DeepSpeed rejects engine_config: {error}") from error


def _check_secondary(init: Init, secondary: int, world_size: int) -> None:
    size = min(secondary, world_size)
    if size > 1 and init.num_ranks_in_param_group != size:
        raise ConfigError(
            f"zero_hpz_partition_size={size}, but this process has made groups of "
            f"{init.num_ranks_in_param_group} ranks before, which DeepSpeed cannot change; use "
            "that number, or another process"
        )


def _local_rank() -> int:
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return dist.get_rank() % max(1, devices)


def _init_config(
    world_size: int, dtype: torch.dtype | None, config: DeepSpeedConfig | None
) -> dict[str, Any]:
    sections = ("zero_optimization", "aio", "bf16", "bfloat16", "fp16", "fp16_master_weights_and_grads")
    result = _settled({key: value for key, value in (config or {}).items() if key in sections})
    zero = result.setdefault("zero_optimization", {})
    zero["stage"] = 3
    # Report edits in place that GatheredParameters would drop; it synchronises an accelerator.
    zero.setdefault("enable_sanity_checks", not torch.accelerator.is_available())
    zero.pop("stage3_partition_stream_chunk_size", None)  # DeepSpeed does not know it.
    if dtype in (torch.bfloat16, torch.float16):
        result.setdefault("bf16" if dtype is torch.bfloat16 else "fp16", {})["enabled"] = True
    # Batch sizes are required, but not used.
    return {"train_micro_batch_size_per_gpu": 1, "train_batch_size": world_size, **result}


def _settled(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _settled(item) for key, item in value.items() if item != "auto"}
    return value


def check_sections(config: DeepSpeedConfig | None) -> None:
    """Raise ConfigError if DeepSpeed refuses a section about parameters."""
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config

    settled = _settled(config or {})
    with _refusals():
        for parse in (get_zero_config, get_bfloat16_config, get_float16_config):
            parse(settled)


def check_quantising() -> None:
    """Raise EngineError unless DeepSpeed's quantising kernels work on this host."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import QuantizerBuilder

    if get_accelerator().device_name() == "cpu" or not QuantizerBuilder().is_compatible(verbose=False):
        raise EngineError(
            "zero_quantized_weights needs DeepSpeed's CUDA quantising kernels, which this host does not "
            "have; remove it from engine_config['zero_optimization']"
        )


def parameter_device(init: Init) -> torch.device:
    """Return the device of the partitions."""
    device: torch.device = torch.device(init.local_device)
    # Tensors report "cpu", not "cpu:0".
    return torch.device("cpu") if device.type == "cpu" else device


@dataclass(frozen=True)
class Home:
    """Location of a partition."""

    device: torch.device
    pinned: bool = False
    nvme: bool = False


def converted_parameter(init: Init, old: nn.Parameter) -> nn.Parameter:
    """Convert ``old`` (on meta) to a ZeRO-3 parameter, unpartitioned; in one order on all ranks."""
    # An expanded element has the shape without its memory.
    single = torch.empty((1,) * old.dim(), dtype=old.dtype, device=parameter_device(init))
    new = nn.Parameter(single.expand(old.shape), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    # Otherwise the conversion wraps this method of the old object.
    new.__dict__.pop("item", None)
    init._convert_to_deepspeed_param(new)
    return new


def home_of(init: Init, parameter: nn.Parameter) -> Home:
    """Return the location of the partition of a converted parameter."""
    converted: Any = parameter
    local = parameter_device(init)
    remote = str(getattr(init.remote_device, "value", init.remote_device))
    if nvme.swaps(init, _partition_size(init, parameter)):
        return Home(torch.device("cpu"), nvme=True)
    if converted.ds_persist or remote not in ("cpu", "nvme"):
        return Home(local)
    return Home(torch.device("cpu"), pinned=bool(init.pin_memory) and local.type != "cpu")


def _partition_size(init: Init, parameter: nn.Parameter) -> int:
    return int(init._aligned_size(parameter)) // int(init._partition_world_size(parameter))


def give_partition(init: Init, parameter: nn.Parameter, partition: torch.Tensor, home: Home) -> None:
    """Make ``partition``, which may be written later, the share of a parameter."""
    module = _partition_parameters()
    size = _partition_size(init, parameter)
    if size != partition.numel():
        raise EngineError(f"DeepSpeed partitions a parameter into {size} elements, not {partition.numel()}")
    state: Any = torch.empty(0, dtype=parameter.dtype, device="cpu") if home.nvme else partition
    state.requires_grad = False
    state.ds_numel = size
    state.status = module.PartitionedParamStatus.AVAILABLE
    state.final_location = None
    converted: Any = parameter
    converted.ds_tensor = state
    converted.ds_numel_aligned = init._aligned_size(parameter)
    if home.nvme:
        nvme.leave_on_nvme(init, converted, state, module.PartitionedParamStatus)
    # Last: it removes the data, whose dtype and shape were used above.
    module.free_param(parameter)


def partition_of(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], int, int] | None:
    """Return ``(partition, shape, rank, world size)`` of a ZeRO-3 parameter, or None."""
    if "deepspeed" not in sys.modules or not hasattr(parameter, "ds_id"):
        return None
    p: Any = parameter
    partition = p.ds_tensor
    if p.nvme_swapper is not None:
        partition = nvme.current_partition(p, _partition_parameters().PartitionedParamStatus)
    return partition, tuple(p.ds_shape), p.ds_zero_partition_rank, p.ds_zero_partition_world_size


def partition_ranks(parameter: torch.Tensor) -> list[int]:
    """Return the ranks that share the partitions of a ZeRO-3 parameter."""
    p: Any = parameter
    return torch.distributed.get_process_group_ranks(p.ds_process_group)


def partition_available(partition: torch.Tensor) -> bool:
    """Return True if a ZeRO-3 partition is in memory, not on NVMe."""
    state: Any = partition
    return bool(state.status == _partition_parameters().PartitionedParamStatus.AVAILABLE)


@contextlib.contextmanager
def suspended_contexts() -> Iterator[None]:
    """Suspend an open ``zero.Init`` context; may be nested."""
    module = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    context = getattr(module, "top_level_context", None)
    if module is None or context is None or not context.patched:
        yield
        return
    demand((_CONTEXTS,), "Build the model outside of deepspeed.zero.Init")
    module.shutdown_init_context()
    try:
        yield
    finally:
        module.restore_init_context()


def mark_leaves(modules: Iterable[nn.Module]) -> None:
    """Mark ``modules`` as leaves of ZeRO-3, until ``unset_z3_leaf_modules``."""
    demand((_LEAVES,))
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)


#: Number of elements to compare at a time.
_CHUNK = 1 << 20


def update_master(master: torch.Tensor, values: torch.Tensor) -> bool:
    """Copy changed values of a parameter to its 1-D master; return True if any changed."""
    has_changed = False
    for start in range(0, master.numel(), _CHUNK):
        high = master[start : start + _CHUNK]
        low = values[start : start + _CHUNK].to(high.device)
        differs = high.to(low.dtype) != low
        if bool(differs.any()):
            high.copy_(torch.where(differs, low.to(high.dtype), high))
            has_changed = True
    return has_changed


def log_changed_masters(names: Sequence[str]) -> None:
    """Log parameters whose masters do not start from the checkpoint."""
    if names:
        logger.info(
            "%d parameters were changed between the load and the start of the engine (%s%s): "
            "their fp32 masters start from the changed values",
            len(names),
            ", ".join(names[:3]),
            ", ..." if len(names) > 3 else "",
        )


def refresh_master(master: torch.Tensor, parameter: Any) -> bool:
    """Copy a changed partition, which may be on NVMe, to its master."""
    swapped = not partition_available(parameter.ds_tensor)
    if swapped:
        demand(nvme.TOUCHED, "Leave the parameters in memory: offload_param to cpu")
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    has_changed = update_master(master, parameter.ds_tensor.data)
    if swapped:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
    return has_changed
