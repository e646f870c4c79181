"""Add LoRA to experts that ranks share.

Each rank holds the factors of its local experts. PEFT wraps a parameter that stacks all experts in a layer
with two factors: A [experts * r, in] and B [out, r * experts]. ``r`` is the rank of the LoRA; all other ranks
are processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerostart.distributed.world import current_world
from zerostart.engines.exchange import Product, SharedExperts, local_parameters, shared_experts
from zerostart.engines.shard import full_shape, plain_name
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Ranges
from zerostart.live.model import get_record, remember_load
from zerostart.upstream.torch.tensors import wrap_local

#: PEFT's attributes for the two factors, and the dimension of each that stacks the experts.
_FACTORS = {"lora_A": 0, "lora_B": 1}


def add_factors(original: Callable[[], object], layer: Any, adapter: str) -> None:
    """Draw factors for all experts as PEFT does, and keep this rank's slices.

    It replaces ``ParamWrapper.update_layer``.
    """
    experts = layer.get_base_layer()
    shared = shared_experts(experts)
    if shared is None:
        original()
        return
    if len(full_shape(layer.get_param())) != 3:
        raise ConfigError(
            f"{layer.parameter_name} of {type(experts).__name__} has one vector for each expert, and ranks "
            "share the experts; leave it out of target_parameters, or use expert_parallel=1"
        )
    total = layer.num_experts = sum(shared.counts)
    try:
        original()
    except AttributeError as error:  # PEFT reads ``weight`` of layers for some values of init_lora_weights
        raise ConfigError(
            f"PEFT cannot initialise an adapter from {layer.parameter_name} of {type(experts).__name__}; use "
            "init_lora_weights=True or 'gaussian'"
        ) from error
    first, stop = shared.bounds(shared.rank)
    layer.num_experts = stop - first
    for kind, dim in _FACTORS.items():
        linear = getattr(layer, kind)[adapter]
        # The rows of A are ordered (expert, r), the columns of B (r, expert).
        split = linear.weight.data.unflatten(dim, (-1, total) if dim else (total, -1))
        local = split.narrow(2 * dim, first, stop - first).flatten(dim, dim + 1)
        linear.weight = nn.Parameter(local.clone(), requires_grad=linear.weight.requires_grad)
        linear.out_features, linear.in_features = local.shape


def adopt_factors(part: nn.Module, before: Collection[int]) -> list[nn.Parameter]:
    """Let the engine of the loaded ``part`` train its new factors like expert weights.

    Collective. ``before`` has the ids of the older parameters. Returns the new factors. Raises ConfigError
    for other parameters that were added to shared experts.
    """
    record = get_record(part)
    adopted: list[nn.Parameter] = []
    cuts: dict[str, Ranges] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    prefixes = {name.rpartition(".")[0] + "." for name in record.parallelism.experts.cuts}
    tensor_parallel = record.engine.mesh.tensor_parallel
    with current_world().collectives("sharing adapters of experts"):
        for path, linear, layer, dim in list(_find_factors(part)):
            if id(linear.weight) in before:
                continue
            if linear.weight.is_meta or tensor_parallel > 1:
                remedy = "tensor_parallel=1" if tensor_parallel > 1 else "low_cpu_mem_usage=False"
                raise ConfigError(f"{path} cannot adapt experts that ranks share; use {remedy}")
            name, shared = plain_name(f"{path}.weight"), shared_experts(layer.get_base_layer())
            assert shared is not None, "checked before"
            ranges, shape = cuts[name], shapes[name] = _find_ranges(linear.weight, shared, dim)
            linear.weight = record.engine.adopt_expert(linear.weight, layer.get_param(), ranges, shape)
            linear.register_load_state_dict_pre_hook(
                functools.partial(_slice_loaded, ranges, shape, shared.rank)
            )
            adopted.append(linear.weight)
    expected = {*before, *map(id, adopted)}
    for name, parameter in part.named_parameters():
        if id(parameter) not in expected and any(plain_name(name).startswith(prefix) for prefix in prefixes):
            raise ConfigError(
                f"{name} was added to experts of {type(part).__name__}, which are sharded (expert_parallel="
                f"{record.engine.mesh.expert_parallel}); only LoRA with target_parameters can adapt them"
            )
    if cuts:
        remember_load(part, replace(record, parallelism=record.parallelism.add_experts(cuts, shapes)))
    return adopted


def _find_factors(part: nn.Module) -> Iterator[tuple[str, Any, Any, int]]:
    """Yield each factor of shared experts.

    Each is a tuple of path, module, PEFT layer, and dimension that stacks the experts.
    """
    for prefix, layer in part.named_modules():
        if hasattr(layer, "parameter_name") and shared_experts(layer.get_base_layer()) is not None:
            for kind, dim in _FACTORS.items():
                for adapter, linear in getattr(layer, kind).items():
                    yield f"{prefix}.{kind}.{adapter}", linear, layer, dim


def _find_ranges(factor: torch.Tensor, shared: SharedExperts, dim: int) -> tuple[Ranges, tuple[int, ...]]:
    """Return each rank's ranges in the factor of all experts, and its shape.

    ``factor`` is this rank's slice of it, and ``dim`` the dimension that stacks the experts.
    """
    total, shape = sum(shared.counts), list(factor.shape)
    r = shape[dim] // shared.counts[shared.rank]
    shape[dim] = r * total
    bounds = [shared.bounds(number) for number in range(len(shared.counts))]
    if dim == 0:
        return Ranges(0, tuple(((first * r, stop * r),) for first, stop in bounds)), tuple(shape)
    ranges = (tuple((i * total + first, i * total + stop) for i in range(r)) for first, stop in bounds)
    return Ranges(1, tuple(ranges)), tuple(shape)


def _slice_loaded(
    ranges: Ranges,
    shape: tuple[int, ...],
    rank: int,
    linear: Any,
    state: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Replace a loaded factor of all experts by this rank's slices.

    The result is a DTensor if the current factor is one.
    """
    whole, current = state.get(f"{prefix}weight"), linear.weight
    if whole is None or isinstance(whole, DTensor) or tuple(whole.shape) != shape:
        return
    local = torch.cat([whole.narrow(ranges.dim, i, j - i) for i, j in ranges.ranks[rank]], ranges.dim)
    if isinstance(current, DTensor):
        local = wrap_local(current, local.to(current.device, current.dtype))
    state[f"{prefix}weight"] = local


def cast_adapters(original: Callable[[], object], model: nn.Module) -> None:
    """Cast adapters as PEFT's ``cast_adapter_dtype``, and keep the engine's attributes of factors.

    PEFT replaces parameters that it casts. DeepSpeed recognises parameters of experts by these attributes.
    """
    factors = [(linear, linear.weight) for _, linear, _, _ in _find_factors(model)]
    original()
    for linear, before in factors:
        if not isinstance(before, DTensor):  # a DTensor's attributes hold its data
            vars(linear.weight).update(vars(before))


def activate_factors(layer: Any, adapters: Sequence[str]) -> AbstractContextManager[None] | None:
    """Return a context in which the experts' forward adds ``adapters``; None without shared experts.

    It replaces ``ParamWrapper._activate_lora``, which would add them before the engine gathers the weights.
    """
    shared = shared_experts(layer.get_base_layer())
    return None if shared is None else _add_in_forward(shared, layer, adapters)


@contextlib.contextmanager
def _add_in_forward(shared: SharedExperts, layer: Any, adapters: Sequence[str]) -> Iterator[None]:
    shared.added[layer.parameter_name] = functools.partial(_list_products, layer, adapters)
    try:
        yield
    finally:
        del shared.added[layer.parameter_name]


def _list_products(layer: Any, adapters: Sequence[str]) -> list[Product]:
    products = []
    for adapter in adapters:
        factors = layer.lora_A[adapter], layer.lora_B[adapter]
        with local_parameters(factors[0]), local_parameters(factors[1]):
            for factor in factors:
                _average_gradient(factor)
            products.append(layer.get_delta_factors(adapter))
    return products


def _average_gradient(factor: Any) -> None:
    """Average the gradient of a local factor over all ranks.

    Its experts run tokens of all ranks. The hook is on the local tensor of this forward. PEFT drops hooks of
    a parameter when it casts adapters to float32.
    """
    parameter = factor._parameters["weight"]
    if isinstance(parameter, DTensor) and factor.weight.requires_grad:
        factor.weight.register_hook(functools.partial(_average, parameter.device_mesh))


def _average(mesh: DeviceMesh, gradient: torch.Tensor) -> torch.Tensor:
    # The exchange of tokens has summed it over the axis "expert".
    average = gradient / mesh.size()
    for axis in mesh.mesh_dim_names or ():
        if axis != "expert":
            dist.all_reduce(average, group=mesh.get_group(axis))
    return average
