"""LoRA on experts that ranks share: each rank has the factors of its own experts.

PEFT's layer around a parameter of experts has two factors for all experts together: A [experts * rank, in]
and B [out, rank * experts].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.distributed.world import current_world
from zerostart.engines.exchange import SharedExperts, local_parameters, shared_experts
from zerostart.engines.shard import full_shape, plain_name
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Ranges
from zerostart.live.model import get_record, remember_load
from zerostart.upstream.torch.tensors import wrap_local

#: The attributes with the factors, and the dimension of each factor that has the experts.
_FACTORS = {"lora_A": 0, "lora_B": 1}


def add_factors(original: Callable[[], object], layer: Any, adapter: str) -> None:
    """Replace ``ParamWrapper.update_layer``: keep this rank's slices of what PEFT draws for all experts."""
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
            f"PEFT makes no adapter of the values of {layer.parameter_name} of {type(experts).__name__}; use "
            "init_lora_weights=True or 'gaussian'"
        ) from error
    first, stop = shared.bounds(shared.rank)
    layer.num_experts = stop - first
    for kind, dim in _FACTORS.items():
        linear = getattr(layer, kind)[adapter]
        # Experts are the outer part of the rows of A, and the inner part of the columns of B.
        split = linear.weight.data.unflatten(dim, (-1, total) if dim else (total, -1))
        own = split.narrow(2 * dim, first, stop - first).flatten(dim, dim + 1)
        linear.weight = nn.Parameter(own.clone(), requires_grad=linear.weight.requires_grad)
        linear.out_features, linear.in_features = own.shape


def adopt_factors(part: nn.Module, before: Collection[int]) -> list[nn.Parameter]:
    """Make new factors of the loaded ``part`` its engine's experts; return them. Collective.

    Raises ConfigError for other parameters that were added to shared experts.
    """
    record = get_record(part)
    adopted: list[nn.Parameter] = []
    cuts: dict[str, Ranges] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    owners = {name.rpartition(".")[0] + "." for name in record.parallelism.experts.cuts}
    size = record.engine.mesh.tensor_parallel
    with current_world().collectives("sharing adapters of experts"):
        for path, linear, layer, dim in list(_find_factors(part)):
            if id(linear.weight) in before:
                continue
            if linear.weight.is_meta or size > 1:
                remedy = "tensor_parallel=1" if size > 1 else "low_cpu_mem_usage=False"
                raise ConfigError(f"{path} is an adapter of experts that ranks share; use {remedy}")
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
        if id(parameter) not in known and any(plain_name(name).startswith(owner) for owner in owners):
            raise ConfigError(
                f"{name} was added to experts of {type(part).__name__}, which are sharded (expert_parallel="
                f"{record.engine.mesh.expert_parallel}); only LoRA with target_parameters can adapt them"
            )
    if cuts:
        remember_load(part, replace(record, parallelism=record.parallelism.add_experts(cuts, shapes)))
    return adopted


def _find_factors(part: nn.Module) -> Iterator[tuple[str, Any, Any, int]]:
    """Yield path, module, layer and dimension of the factors of shared experts."""
    for prefix, layer in part.named_modules():
        if hasattr(layer, "parameter_name") and shared_experts(layer.get_base_layer()) is not None:
            for kind, dim in _FACTORS.items():
                for adapter, linear in getattr(layer, kind).items():
                    yield f"{prefix}.{kind}.{adapter}", linear, layer, dim


def _cut(factor: torch.Tensor, shared: SharedExperts, dim: int) -> tuple[Ranges, tuple[int, ...]]:
    """Return how ranks share the factor of all experts, and its shape."""
    total, shape = sum(shared.counts), list(factor.shape)
    rank = shape[dim] // shared.counts[shared.rank]
    shape[dim] = rank * total
    bounds = [shared.bounds(number) for number in range(len(shared.counts))]
    if dim == 0:
        return Ranges(0, tuple(((first * rank, stop * rank),) for first, stop in bounds)), tuple(shape)
    ranges = (tuple((i * total + first, i * total + stop) for i in range(rank)) for first, stop in bounds)
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
    """Replace the loaded factor of all experts by this rank's slices, in the form of the parameter."""
    whole, current = state.get(f"{prefix}weight"), linear.weight
    if whole is None or isinstance(whole, DTensor) or tuple(whole.shape) != shape:
        return
    own = torch.cat([whole.narrow(cut.dim, low, high - low) for low, high in cut.ranks[rank]], cut.dim)
    if isinstance(current, DTensor):
        own = wrap_local(current, own.to(current.device, current.dtype))
    state[f"{prefix}weight"] = own


def activate_factors(layer: Any, adapters: Sequence[str]) -> AbstractContextManager[None] | None:
    """Replace ``ParamWrapper._activate_lora`` of experts that ranks share; None for other layers.

    The experts' weights are gathered only in the experts' own call: the adapters are added there.
    """
    shared = shared_experts(layer.get_base_layer())
    return None if shared is None else _changing(shared, layer, adapters)


@contextlib.contextmanager
def _changing(shared: SharedExperts, layer: Any, adapters: Sequence[str]) -> Iterator[None]:
    shared.changes[layer.parameter_name] = functools.partial(_add_adapters, layer, adapters)
    try:
        yield
    finally:
        del shared.changes[layer.parameter_name]


def _add_adapters(layer: Any, adapters: Sequence[str], weight: torch.Tensor) -> torch.Tensor:
    for adapter in adapters:
        with local_parameters(layer.lora_A[adapter]), local_parameters(layer.lora_B[adapter]):
            lhs, rhs, scaling = layer.get_delta_factors(adapter)
            # As PEFT does: the product is in the dtype of the weight.
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, lhs, rhs, alpha=scaling)
    return weight
