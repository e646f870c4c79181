"""Units of FSDP2, and the shards of their parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zerostart.errors import EngineError
from zerostart.upstream.guard import Use, need
from zerostart.upstream.torch.tensors import wrap_local

_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_UNITS = Use("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", "the parameter groups of a unit")
_STATES = Use(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
    "_lazy_init, ._fsdp_param_group, ._is_root",
    "whether a unit has run",
)
_BACKWARD = Use("torch._C", "_current_graph_task_id", "whether a unit is called in a backward")
_GROUPS = Use(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
    ".modules, .offload_policy",
    "the parameters of resized embeddings leave their unit",
)
_SHARDS = Use(
    _PARAMETER,
    "_init_sharded_param, _setattr_on_modules, __init__(param, module_info, mesh_info, "
    "post_forward_mesh_info, device, shard_placement_fn, mp_policy, offload_policy), "
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:_get_param_module_infos(params, modules), "
    "._module_info, ._post_load_hook_handle, .device, .fsdp_placement, .mesh_info, .mp_policy, "
    ".post_forward_mesh_info, .sharded_param, .sharded_state",
    "a whole parameter is sharded",
)
_ACCUMULATED = Use(
    _PARAMETER, ".unsharded_accumulated_grad", "whether gradients have been accumulated that were not reduced"
)


def has_run(model: nn.Module) -> bool:
    """Return True if a unit of ``model`` has run."""
    need(_UNITS, _STATES)
    states = (m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    return any(state._is_root is not None for state in states)


def has_begun(model: nn.Module) -> bool:
    """Return True if ``model`` is not a unit, or is a root unit."""
    need(_UNITS, _STATES)
    return not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is not None


def has_sharded_parameters(model: nn.Module) -> bool:
    """Return True if ``model`` is a unit whose own parameters are not gathered."""
    need(_UNITS, _STATES)
    return isinstance(model, FSDPModule) and any(g.is_sharded for g in _groups(model._get_fsdp_state()))


def begin_at(model: nn.Module) -> None:
    """Make ``model`` the root of its units, also if another unit runs first."""
    refuse_replaced_parameters(model)
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def refuse_replaced_parameters(model: nn.Module) -> None:
    """Raise EngineError if a whole parameter has replaced a sharded one."""
    need(_UNITS, _STATES, _SHARDS)
    names = {id(module): name for name, module in model.named_modules()}
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for parameter in (p for u in units for g in _groups(u._get_fsdp_state()) for p in g.fsdp_params):
        info, at_rest = parameter._module_info, parameter.sharded_state.name == "SHARDED"
        current = info.module._parameters.get(info.param_name)
        if at_rest and current is not None and not isinstance(current, DTensor):
            name = f"{names.get(id(info.module), '')}.{info.param_name}".lstrip(".")
            raise EngineError(
                f"{name} was sharded by FSDP2, and another parameter has replaced it, which would not be "
                "trained: keep the parameter, and write the values to it with copy_, or inside "
                f"`with zerostart.gathered(model, {name!r}, modifier_rank=0)`"
            )


def are_reduced_as_shards() -> bool:
    """Return True if gradients are reduced in the shards' dtype by default (torch >= 2.15)."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return hasattr(FSDPParam, "unsharded_grad_dtype")


def in_backward() -> bool:
    """Return True if this thread is in a backward."""
    need(_BACKWARD)
    return torch._C._current_graph_task_id() >= 0


def has_unreduced(model: nn.Module) -> bool:
    """Return True if units of ``model`` have accumulated gradients that are not reduced."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if units:
        need(_UNITS, _STATES, _ACCUMULATED)
    groups = (group for unit in units for group in _groups(unit._get_fsdp_state()))
    return any(p.unsharded_accumulated_grad is not None for group in groups for p in group.fsdp_params)


@contextlib.contextmanager
def unshard_modules(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Make the parameters of ``modules`` whole inside the block, then shard their new values.

    Collective. Rank 0's values are used; after an error, the old values. ``model`` must be sharded over all
    ranks, and must not have run.
    """
    need(_UNITS, _STATES, _GROUPS, _SHARDS)
    places = _find_places(model, modules)
    whole = []
    for group, parameter in {id(one): (group, one) for group, one in places.values()}.values():
        whole.append((parameter, whole_tensor(parameter.sharded_param)))
        _set_parameter(*whole[-1])
        parameter._post_load_hook_handle.remove()
        group.fsdp_params.remove(parameter)
    try:
        yield
    except BaseException:
        for parameter, tensor in whole:
            _set_parameter(parameter, tensor)
        raise
    finally:
        _shard(modules, places)


def _set_parameter(parameter: Any, tensor: torch.Tensor) -> None:
    parameter._setattr_on_modules(nn.Parameter(tensor, parameter.sharded_param.requires_grad))


def _find_places(model: nn.Module, modules: Sequence[nn.Module]) -> dict[tuple[int, str], tuple[Any, Any]]:
    wanted_ids = {id(module) for module in modules}
    places = {}
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in _groups(unit._get_fsdp_state()):
            for parameter in group.fsdp_params:
                info = parameter._module_info
                owners = (info.module, *info.shared_modules)
                names = (info.param_name, *info.shared_param_names)
                for owner, name in zip(owners, names, strict=True):
                    if id(owner) in wanted_ids:
                        places[id(owner), name] = (group, parameter)
    return places


def _groups(state: Any) -> list[Any]:
    # Depending on the release, a unit has a list of groups, one group, or none.
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:
        several = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(several)


def whole_tensor(sharded: DTensor) -> torch.Tensor:
    """Return the whole of a sharded parameter, on the mesh's device. Collective."""
    local = sharded.to_local().detach()
    kind = sharded.device_mesh.device_type
    if local.device.type != kind:
        sharded = wrap_local(sharded, local.to(kind))
    with torch.no_grad():
        whole: torch.Tensor = sharded.full_tensor()
    return whole


def _shard(modules: Sequence[nn.Module], places: dict[tuple[int, str], tuple[Any, Any]]) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos

    plain = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in plain:
                plain[id(parameter)] = (parameter, *places[id(module), name])
    for parameter, group, old in plain.values():
        with torch.no_grad():
            # Ranks may have drawn different rows for a resized embedding.
            dist.broadcast(parameter.data, src=0)
        (info,) = _get_param_module_infos([parameter], group.modules)
        group.fsdp_params.append(
            FSDPParam(
                parameter,
                info,
                old.mesh_info,
                old.post_forward_mesh_info,
                old.device,
                functools.partial(_placement, old),
                old.mp_policy,  # torch 2.15 has one for each parameter, and none for a group
                group.offload_policy,
            )
        )


def _placement(old: Any, parameter: nn.Parameter) -> Any:
    return old.fsdp_placement
