"""Private parts of transformers: what its ``DistributedConfig`` asks for, and its tensor-parallel styles."""

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
    "enable_expert_parallel without a size is noted",
)
_ASKED = Use(_CONFIG, "from_dict", "what a call of from_pretrained asks for")
_STYLES = Use("transformers.distributed.tensor_parallel", "ALL_PARALLEL_STYLES", "the registry of styles")
_FORWARDS = Use(
    "transformers.distributed.tensor_parallel:TensorParallelLayer",
    "install_forward(module)",
    "a module whose parameters are cut runs by the library's own forward for its style",
)


@dataclass(frozen=True)
class AxesAsked:
    """What a ``DistributedConfig`` asks for, in the words of its newest release."""

    #: Ranks that share experts; None for the flag alone, which leaves the number open.
    experts: int | None
    tensors: int
    #: Rules over the model's own; None for these alone.
    expert_plan: Mapping[str, str] | None
    tensor_plan: Mapping[str, str] | None
    data: int
    replicas: int
    stages: int
    unserved: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        """Whether no axis has more than one rank."""
        return (self.experts, self.tensors, self.data, self.replicas, self.stages) == (1, 1, 1, 1, 1)


def _enter(stack: ExitStack) -> None:
    demand((_FLAG, _ASKED), "zerostart.enabled() cannot translate distributed_config; use zerostart.load")
    from transformers.distributed.configuration_utils import DistributedConfig

    wrap(stack, DistributedConfig, "__post_init__", _note_flag)


def _note_flag(original: Function, config: DistributedConfig) -> None:
    sizes = (config.tp_size, config.tp_plan, getattr(config, "ep_size", None))
    alone = bool(config.enable_expert_parallel) and sizes == (None, None, None)
    original(config)
    if alone:
        setattr(config, _ATTRIBUTE, True)


#: Note ``enable_expert_parallel`` without a size in each new ``DistributedConfig``.
flag_notes = RefCountedPatches(_enter)


def axes_asked(config: object) -> AxesAsked:
    """What ``config``, a ``DistributedConfig`` or a dict of its fields, asks for."""
    from transformers.distributed.configuration_utils import DistributedConfig

    made: DistributedConfig = DistributedConfig.from_dict(config) if isinstance(config, Mapping) else config
    tensors, plan = made.tp_size or 1, made.tp_plan
    sized = hasattr(made, "ep_size")
    experts = made.ep_size or 1 if sized else (tensors if made.enable_expert_parallel else 1)
    if getattr(made, _ATTRIBUTE, False):
        experts = None
    elif made.enable_expert_parallel and not sized:
        plan = {}  # Releases without a size of its own have the experts' plan in the place of the tensors'.
    given = plan if isinstance(plan, Mapping) else None
    others = {"fsdp_plan": None, "fsdp_cpu_offload": False, "fsdp_mixed_precision": False}
    unserved = [name for name, default in others.items() if getattr(made, name, default) != default]
    if getattr(made, "ep_implementation", "auto") not in ("auto", "all_to_all"):
        unserved.append("ep_implementation")
    return AxesAsked(
        experts,
        # An empty plan applies no rule, however many ranks there are for it.
        1 if given is not None and not given else tensors,
        getattr(made, "ep_plan", None),
        given or None,
        made.fsdp_size or 1,
        getattr(made, "dp_replicate_size", None) or 1,
        made.pp_size or 1,
        tuple(unserved),
    )


_REMEDY = "tensor_parallel needs a transformers whose styles zerostart knows; use tensor_parallel=1"


@functools.cache
def require_styles() -> None:
    """Raise UnsupportedVersionError unless the styles are there."""
    demand((_STYLES, _FORWARDS), _REMEDY)


def _styles() -> Mapping[str, TensorParallelLayer]:
    require_styles()
    from transformers.distributed import tensor_parallel

    styles: Mapping[str, TensorParallelLayer] = tensor_parallel.ALL_PARALLEL_STYLES
    return styles


def run_in_style(model: PreTrainedModel, module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Make ``module`` of ``model`` run over the tensor-parallel ``mesh``, with its parameters cut."""
    layer: TensorParallelLayer = _styles()[style]
    if style == "mla_kv_a_proj":
        owner: Any = module
        # The style asks its module for the sizes of heads, and the plain Linear here has no configuration.
        owner.config = model.config.get_text_config()
    layer.install_forward(module, mesh)
