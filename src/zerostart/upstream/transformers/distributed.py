"""``DistributedConfig`` and tensor-parallel styles of transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from zerostart.upstream.guard import Function, Use, demand
from zerostart.upstream.patches import RefCountedPatches, wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import TensorParallelLayer


_CONFIG = "transformers.distributed.configuration_utils:DistributedConfig"
_ATTRIBUTE = "_zerostart_experts_alone"
_FLAG = Use(
    _CONFIG,
    "__post_init__, transformers.distributed.configuration_utils:DistributedConfig(*, tp_size, "
    "tp_plan, enable_expert_parallel, fsdp_size, pp_size)",
    "enable_expert_parallel without a size is recorded",
)
_PARSED = Use(_CONFIG, "from_dict", "the distributed_config of a call of from_pretrained")
_STYLES = Use("transformers.distributed.tensor_parallel", "ALL_PARALLEL_STYLES", "the registry of styles")
_FORWARDS = Use(
    "transformers.distributed.tensor_parallel:TensorParallelLayer",
    "install_forward(module)",
    "a module with cut parameters runs the library's forward of its style",
)


@dataclass(frozen=True)
class RequestedAxes:
    """Axes of a ``DistributedConfig``, as in its newest release."""

    #: Number of ranks that share experts; None if only the flag is set.
    experts: int | None
    tensors: int
    #: Rules that override the model's own, or None.
    expert_plan: Mapping[str, str] | None
    tensor_plan: Mapping[str, str] | None
    data: int
    replicas: int
    stages: int
    unserved: tuple[str, ...]

    @property
    def is_trivial(self) -> bool:
        """True if no axis has more than one rank."""
        return (self.experts, self.tensors, self.data, self.replicas, self.stages) == (1, 1, 1, 1, 1)


def _enter(stack: ExitStack) -> None:
    demand((_FLAG, _PARSED), "zerostart.enabled() cannot translate distributed_config; use zerostart.load")
    from transformers.distributed.configuration_utils import DistributedConfig

    wrap(stack, DistributedConfig, "__post_init__", _record_flag)


def _record_flag(original: Function, config: DistributedConfig) -> None:
    sizes = (config.tp_size, config.tp_plan, getattr(config, "ep_size", None))
    is_without_size = bool(config.enable_expert_parallel) and sizes == (None, None, None)
    original(config)
    if is_without_size:
        setattr(config, _ATTRIBUTE, True)


#: Record ``enable_expert_parallel`` without a size in each new ``DistributedConfig``.
flag_records = RefCountedPatches(_enter)


def requested_axes(config: object) -> RequestedAxes:
    """Return the axes of a ``DistributedConfig`` or a dict of its fields."""
    from transformers.distributed.configuration_utils import DistributedConfig

    parsed: DistributedConfig = DistributedConfig.from_dict(config) if isinstance(config, Mapping) else config
    tensors, plan = parsed.tp_size or 1, parsed.tp_plan
    sized = hasattr(parsed, "ep_size")
    experts = parsed.ep_size or 1 if sized else (tensors if parsed.enable_expert_parallel else 1)
    if getattr(parsed, _ATTRIBUTE, False):
        experts = None
    elif parsed.enable_expert_parallel and not sized:
        plan = {}  # Older releases use the plan of the experts instead.
    rules = plan if isinstance(plan, Mapping) else None
    defaults = {"fsdp_plan": None, "fsdp_cpu_offload": False, "fsdp_mixed_precision": False}
    unserved = [name for name, default in defaults.items() if getattr(parsed, name, default) != default]
    if getattr(parsed, "ep_implementation", "auto") not in ("auto", "all_to_all"):
        unserved.append("ep_implementation")
    return RequestedAxes(
        experts,
        # An empty plan has no rule.
        1 if rules is not None and not rules else tensors,
        getattr(parsed, "ep_plan", None),
        rules or None,
        parsed.fsdp_size or 1,
        getattr(parsed, "dp_replicate_size", None) or 1,
        parsed.pp_size or 1,
        tuple(unserved),
    )


_REMEDY = "tensor_parallel needs a transformers whose styles zerostart knows; use tensor_parallel=1"


@functools.cache
def require_styles() -> None:
    """Raise UnsupportedVersionError unless the styles are as expected."""
    demand((_STYLES, _FORWARDS), _REMEDY)


def _styles() -> Mapping[str, TensorParallelLayer]:
    require_styles()
    from transformers.distributed import tensor_parallel

    styles: Mapping[str, TensorParallelLayer] = tensor_parallel.ALL_PARALLEL_STYLES
    return styles


def run_in_style(model: PreTrainedModel, module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Run ``module`` with cut parameters over the tensor-parallel ``mesh``."""
    layer: TensorParallelLayer = _styles()[style]
    if style == "mla_kv_a_proj":
        owner: Any = module
        # The style reads the sizes of heads from its module's configuration.
        owner.config = model.config.get_text_config()
    layer.install_forward(module, mesh)
