"""Private parts of transformers: the forwards of its tensor-parallel styles."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from zerostart.upstream.registry import Lasts, PatchPoint, Use, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import TRANSFORMERS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel
    from transformers.distributed.tensor_parallel import TensorParallelLayer

TOUCHED = (
    Use(
        library=TRANSFORMERS,
        owner="transformers.distributed.tensor_parallel",
        names=("ALL_PARALLEL_STYLES",),
        why="the registry of styles",
    ),
    PatchPoint(
        library=TRANSFORMERS,
        owner="transformers.distributed.tensor_parallel:TensorParallelLayer",
        writes=("forward", "config"),
        why="a module whose parameters are cut runs by the library's own forward for its style",
        lasts=Lasts.MODEL,
        shapes=(
            Shape(
                "transformers.distributed.tensor_parallel:TensorParallelLayer.install_forward",
                leads=("module",),
            ),
        ),
    ),
)
_REMEDY = "tensor_parallel needs a transformers whose styles zerostart knows; use tensor_parallel=1"


@functools.cache
def require() -> None:
    """Raise UnsupportedVersionError unless the styles are there."""
    demand(TOUCHED, _REMEDY)


def _styles() -> Any:
    """The registry, filled."""
    require()
    from transformers.distributed import tensor_parallel

    return tensor_parallel.ALL_PARALLEL_STYLES


def run_in_style(model: PreTrainedModel, module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Make ``module`` of ``model`` run over the tensor-parallel ``mesh``, with its parameters cut."""
    layer: TensorParallelLayer = _styles()[style]
    if style == "mla_kv_a_proj":
        owner: Any = module
        # The style asks its module for the sizes of heads, and the plain Linear here has no configuration.
        owner.config = model.config.get_text_config()
    layer.install_forward(module, mesh)
