"""Tensor parallelism under FSDP2: parameters as DTensors over the tensor mesh, modules in their styles."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from zerostart.engines.shard import replace_everywhere
from zerostart.errors import EngineError
from zerostart.geometry.layout import Parallelism, Ranges, ShardSpec
from zerostart.upstream.transformers.tensor import run_in_style

#: The style of modules with whole parameters that see part of the activations, such as norms of heads.
_SUMMED = "replicated_with_grad_allreduce"


def cut_tensors(model: nn.Module, parallelism: Parallelism, mesh: DeviceMesh) -> None:
    """Cut the meta parameters of ``model`` over ``mesh`` and make its modules work on what is left.

    Raises EngineError for a cut that DTensor has no placement for.
    """
    new: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        cut = parallelism.tensors.cuts.get(name)
        if cut is None:
            if _beside_a_cut(name, parallelism):
                new[id(parameter)] = distributed(parameter, parameter.data, mesh, [Replicate()])
            continue
        shape = cut.section(tuple(parameter.shape), *parallelism.mesh.tensor(mesh.get_local_rank())).shape
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        new[id(parameter)] = distributed(parameter, local, mesh, [_placement(cut, parameter.dim())])
    replace_everywhere(model, new)
    for name, style in parallelism.tensors.modules.items():
        module = model.get_submodule(name)
        if style == _SUMMED:
            _sum_gradients(module, mesh.get_group())
        else:
            run_in_style(model, module, style, mesh)


def _beside_a_cut(name: str, parallelism: Parallelism) -> bool:
    """Whether ``name`` is the whole bias of a weight that is cut: a row-wise layer adds it to their sum."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{module}.weight" in parallelism.tensors.cuts


def _placement(cut: ShardSpec | Ranges, dimensions: int) -> Placement:
    """DTensor's name for a cut."""
    dim = cut.dim % dimensions
    if isinstance(cut, Ranges) or isinstance(cut.parts, tuple):
        what = "cuts at any places" if isinstance(cut, Ranges) else f"fused parts of the sizes {cut.parts}"
        raise EngineError(f"DTensor has no placement for {what}")
    return Shard(dim) if cut.parts == 1 else _StridedShard(dim, split_factor=cut.parts)


def distributed(old: nn.Parameter, local: torch.Tensor, mesh: DeviceMesh, placements: Any) -> nn.Parameter:
    """A parameter like ``old`` whose local tensor over ``mesh`` is ``local``."""
    data = DTensor.from_local(local, mesh, placements, run_check=False, shape=old.shape, stride=old.stride())
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if not k.startswith("_local")})
    return new


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the module's parameters over ``group``, as they arise.

    A hook on the accumulated gradient, as transformers has it, would sum again what was summed before
    wherever gradients are accumulated without reduction.
    """
    runner: Any = module
    own_forward, summed = runner.forward, cast(Any, _Summed.apply)

    def forward(*args: Any, **kwargs: Any) -> Any:
        held: dict[str, Any] = module._parameters
        whole = {name: p for name, p in held.items() if p is not None}
        held.update({name: summed(p, group) for name, p in whole.items()})
        try:
            return own_forward(*args, **kwargs)
        finally:
            held.update(whole)

    runner.forward = forward


class _Summed(torch.autograd.Function):
    """The same tensor on all ranks of a group; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
