"""Add LoRA to experts that ranks share: each rank holds the factors of its own experts.

PEFT wraps a parameter of stacked experts in a layer with two factors for all experts together, A
[experts * r, in] and B [out, r * experts]. ``r`` is the rank of the LoRA; other ranks are processes.
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
    """Replace ``ParamWrapper.update_layer``: draw factors for all experts, keep this rank's slices."""
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
        own = split.narrow(2 * dim, first, stop - first).flatten(dim, dim + 1)
        linear.weight = nn.Parameter(own.clone(), requires_grad=linear.weight.requires_grad)
        linear.out_features, linear.in_features = own.shape


def adopt_factors(part: nn.Module, before: Collection[int]) -> list[nn.Parameter]:
    """Let the engine of the loaded ``part`` train new factors as expert weights; collective.

    ``before`` has the ids of the older parameters. Returns the new factors. Raises ConfigError for other
    parameters that were added to shared experts.
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
            cut, shape = cuts[name], shapes[name] = _cut(linear.weight, shared, dim)
            linear.weight = record.engine.adopt_expert(linear.weight, layer.get_param(), cut, shape)
            linear.register_load_state_dict_pre_hook(
                functools.partial(_slice_loaded, cut, shape, shared.rank)
            )
            adopted.append(linear.weight)
    known = {*before, *map(id, adopted)}
    for name, parameter in part.named_parameters():
        if id(parameter) not in known and any(plain_name(name).startswith(prefix) for prefix in prefixes):
            raise ConfigError(
                f"{name} was added to experts of {type(part).__name__}, which are sharded (expert_parallel="
                f"{record.engine.mesh.expert_parallel}); only LoRA with target_parameters can adapt them"
            )
    if cuts:
        remember_load(part, replace(record, parallelism=record.parallelism.add_experts(cuts, shapes)))
    return adopted


def _find_factors(part: nn.Module) -> Iterator[tuple[str, Any, Any, int]]:
    """Yield each factor of shared experts: path, module, PEFT layer and dimension that stacks experts."""
    for prefix, layer in part.named_modules():
        if hasattr(layer, "parameter_name") and shared_experts(layer.get_base_layer()) is not None:
            for kind, dim in _FACTORS.items():
                for adapter, linear in getattr(layer, kind).items():
                    yield f"{prefix}.{kind}.{adapter}", linear, layer, dim


def _cut(factor: torch.Tensor, shared: SharedExperts, dim: int) -> tuple[Ranges, tuple[int, ...]]:
    """Return the ranges of each rank in the factor of all experts, and the shape of that factor."""
    total, shape = sum(shared.counts), list(factor.shape)
    r = shape[dim] // shared.counts[shared.rank]
    shape[dim] = r * total
    bounds = [shared.bounds(number) for number in range(len(shared.counts))]
    if dim == 0:
        return Ranges(0, tuple(((first * r, stop * r),) for first, stop in bounds)), tuple(shape)
    ranges = (tuple((i * total + first, i * total + stop) for i in range(r)) for first, stop in bounds)
    return Ranges(1, tuple(ranges)), tuple(shape)


def _slice_loaded(
    cut: Ranges,
    shape: tuple[int, ...],
    rank: int,
    linear: Any,
    state: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Replace the loaded factor of all experts by this rank's slices, as a DTensor if needed."""
    whole, current = state.get(f"{prefix}weight"), linear.weight
    if whole is None or isinstance(whole, DTensor) or tuple(whole.shape) != shape:
        return
    own = torch.cat([whole.narrow(cut.dim, low, high - low) for low, high in cut.ranks[rank]], cut.dim)
    if isinstance(current, DTensor):
        own = wrap_local(current, own.to(current.device, current.dtype))
    state[f"{prefix}weight"] = own


def keep_marks(original: Callable[[], object], model: nn.Module) -> None:
    """Replace ``cast_adapter_dtype``: factors that it replaces keep the marks of their engine."""
    factors = [(linear, linear.weight) for _, linear, _, _ in _find_factors(model)]
    original()
    for linear, before in factors:
        if not isinstance(before, DTensor):  # whose attributes are its shard
            vars(linear.weight).update(vars(before))


def activate_factors(layer: Any, adapters: Sequence[str]) -> AbstractContextManager[None] | None:
    """Replace ``ParamWrapper._activate_lora`` for shared experts; return None for other layers.

    The experts' own forward adds the adapters inside the returned context. PEFT would add them earlier, when
    the engine has not gathered the weights.
    """
    shared = shared_experts(layer.get_base_layer())
    return None if shared is None else _adding(shared, layer, adapters)


@contextlib.contextmanager
def _adding(shared: SharedExperts, layer: Any, adapters: Sequence[str]) -> Iterator[None]:
    shared.added[layer.parameter_name] = functools.partial(_products, layer, adapters)
    try:
        yield
    finally:
        del shared.added[layer.parameter_name]


def _products(layer: Any, adapters: Sequence[str]) -> list[Product]:
    products = []
    for adapter in adapters:
        factors = layer.lora_A[adapter], layer.lora_B[adapter]
        with local_parameters(factors[0]), local_parameters(factors[1]):
            for factor in factors:
                _average_gradient(factor)
            products.append(layer.get_delta_factors(adapter))
    return products


def _average_gradient(factor: Any) -> None:
    """Average the gradient of a local factor over all ranks, whose tokens have all come to its experts.

    Not by a hook on the parameter: PEFT replaces that, without its hooks, when it casts adapters to float32.
    """
    parameter = factor._parameters["weight"]
    if isinstance(parameter, DTensor) and factor.weight.requires_grad:
        factor.weight.register_hook(functools.partial(_average, parameter.device_mesh))


def _average(mesh: DeviceMesh, gradient: torch.Tensor) -> torch.Tensor:
    average = gradient / mesh.size()
    for axis in mesh.mesh_dim_names or ():
        if axis != "expert":
            dist.all_reduce(average, group=mesh.get_group(axis))
    return average
