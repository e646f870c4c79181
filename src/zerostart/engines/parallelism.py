"""Resolve the mesh and parallel plans of a load against the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import default_device
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Mesh, Parallelism, ParallelPlan, expert_plan, tensor_plan
from zerostart.models import Attention, library_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def resolve(
    model: nn.Module,
    mesh: Mesh,
    experts_given: Mapping[str, str] | None = None,
    tensors_given: Mapping[str, str] | None = None,
    decide: Callable[[ParallelPlan], ParallelPlan] | None = None,
) -> Parallelism:
    """Return how ``mesh`` splits ``model``, which is on meta in its unsharded shapes.

    Passed plans (module or parameter names to transformers' styles) take precedence over the model's.
    ``decide`` makes the tensor-parallel plan from the expert-parallel one, for an engine with its own rules.
    Raises ConfigError.
    """
    if not mesh.parallel:
        return Parallelism(mesh)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    experts = tensors = ParallelPlan()
    if mesh.expert_parallel > 1:
        experts = _plan_experts(model, mesh, shapes, experts_given)
    if mesh.tensor_parallel > 1:
        # Tensors after experts, whose parameters are excluded from the tensor-parallel plan.
        if decide is not None:
            tensors = decide(experts)
        else:
            tensors = _plan_tensors(model, mesh, shapes, tensors_given)
        tensors = _without_experts(tensors, experts)
    return Parallelism(mesh, experts, tensors, shapes)


def _plan_experts(
    model: nn.Module, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]], override: Mapping[str, str] | None
) -> ParallelPlan:
    kind, size = type(model).__name__, mesh.expert_parallel
    rules = library_of(model).parallel_rules(model, "ep") if override is None else override
    plan = expert_plan(rules, {name: len(shape) for name, shape in shapes.items()}, _modules(model))
    if not plan.cuts:
        if not any("experts" in name for name in shapes):
            raise ConfigError(f"expert_parallel={size}, but {kind} has no experts; use expert_parallel=1")
        raise ConfigError(
            f"expert_parallel={size}, but {kind} declares no expert-parallel plan; use "
            "expert_parallel=1, or pass a plan: engine_config={'ep_plan': "
            "{'layers.*.experts.gate_up_proj': 'grouped_gemm', ...}}"
        )
    for name in plan.cuts:
        experts = shapes[name][0]
        if not _fills_ranks(experts, size):
            # ``max`` finds at least 1, with which every rank has all experts.
            fitting = max(n for n in range(1, size) if mesh.world_size % n == 0 and _fills_ranks(experts, n))
            raise ConfigError(
                f"expert_parallel={size} leaves some ranks without any of the {experts} experts of {name}, "
                f"at {-(-experts // size)} experts a rank; use expert_parallel={fitting}"
            )
    _check_complete(plan, shapes)
    return plan


def _check_complete(plan: ParallelPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError if a plan splits only some parameters with a row for each expert."""
    experts = {name.rpartition(".")[0]: shapes[name][0] for name in plan.cuts}
    for name, shape in shapes.items():
        owner = name.rpartition(".")[0]
        if name not in plan.cuts and owner in experts and shape[:1] == (experts[owner],):
            raise ConfigError(
                f"the expert-parallel plan splits {owner}, but not {name}, which has a row for each of the "
                f"{experts[owner]} experts; give it the style 'grouped_gemm' too"
            )


def _fills_ranks(experts: int, size: int) -> bool:
    return (size - 1) * -(-experts // size) < experts


def _plan_tensors(
    model: nn.Module,
    mesh: Mesh,
    shapes: Mapping[str, tuple[int, ...]],
    override: Mapping[str, str] | None,
) -> ParallelPlan:
    kind, size = type(model).__name__, mesh.tensor_parallel
    rules = library_of(model).parallel_rules(model, "tp") if override is None else override
    plan = tensor_plan(rules, {name: len(shape) for name, shape in shapes.items()}, _modules(model))
    if not plan.cuts:
        raise ConfigError(
            f"tensor_parallel={size}, but {kind} declares no tensor-parallel plan; use tensor_parallel=1, or "
            "give one as engine_config={'tp_plan': {'model.layers.*.self_attn.q_proj': 'colwise', ...}}"
        )
    _check_heads(model, size, plan)
    for name, cut in plan.cuts.items():
        try:
            # Called only to check the sizes.
            cut.section(shapes[name], 0, size)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"the tensor-parallel plan does not fit {name}: {error}") from error
    return plan


def _without_experts(tensors: ParallelPlan, experts: ParallelPlan) -> ParallelPlan:
    owners = {name.rpartition(".")[0] for name in experts.cuts}
    return ParallelPlan(
        {name: cut for name, cut in tensors.cuts.items() if name not in experts.cuts},
        {name: style for name, style in tensors.modules.items() if name not in owners},
    )


def _check_heads(model: nn.Module, size: int, plan: ParallelPlan) -> None:
    if not any("attn" in name or "attention" in name for name in plan.cuts):
        return
    config: PreTrainedConfig = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"tensor_parallel={size} does not divide the {heads} of {key} in {type(model).__name__}; "
                f"use tensor_parallel={max(n for n in range(1, size) if heads % n == 0)}"
            )


def _modules(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


# Ranks that share tensors draw the same numbers, so that dropout is equal on all of them.


def share_random_states(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Use one random state on all ranks of ``group`` in each training forward.

    All these ranks take part in each training forward. In evaluation nothing is drawn, so ranks do not wait.
    """

    # A function, not a partial: copying the model would copy the partial's group, which fails.
    def begin(module: nn.Module, _: object) -> None:
        if module.training:
            _share_random_state(group)

    model.register_forward_pre_hook(begin)


def _share_random_state(group: dist.ProcessGroup) -> None:
    device = default_device()
    backend: ModuleType = torch if device.type == "cpu" else torch.get_device_module(device)
    arguments = () if device.type == "cpu" else (device,)
    state = backend.get_rng_state(*arguments).to(device)
    dist.broadcast(state, group=group, group_src=0)
    backend.set_rng_state(state.cpu(), *arguments)


# Checks of sequence parallelism, before anything is read.


def check_heads(model: nn.Module, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can share the heads of ``model``."""
    attention = _attention(model, size)
    if attention.implementation != "sdpa" and "flash" not in attention.implementation:
        raise _refused(model, size, f"the attention implementation {attention.implementation!r}", _ATTENTION)
    if attention.heads % size:
        raise _indivisible(model, size, "num_attention_heads", attention.heads)
    if attention.key_value_heads % size and size % attention.key_value_heads:
        raise _indivisible(model, size, "num_key_value_heads", attention.key_value_heads)


def check_ring(model: nn.Module, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can exchange the keys and values of ``model``."""
    attention = _attention(model, size)
    if attention.implementation != "sdpa":
        raise _refused(model, size, f"the attention implementation {attention.implementation!r}", _ATTENTION)
    if others := sorted(attention.kinds - {"full_attention"}):
        raise _refused(model, size, f"layers of type {', '.join(others)}", "use engine='deepspeed'")


#: Remedy for another attention implementation.
_ATTENTION = "build it with attn_implementation='sdpa'"


def _attention(model: nn.Module, size: int) -> Attention:
    attention = library_of(model).attention(model)
    if attention.obstacle:
        raise _refused(model, size, attention.obstacle, "use sequence_parallel=1")
    return attention


def _refused(model: nn.Module, size: int, reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"sequence_parallel={size} is not available for {type(model).__name__}, which has {reason}; {remedy}"
    )


def _indivisible(model: nn.Module, size: int, key: str, heads: int) -> ConfigError:
    fitting = max(n for n in range(1, size) if heads % n == 0)
    return ConfigError(
        f"sequence_parallel={size} does not divide the {heads} of {key} in {type(model).__name__}; use "
        f"sequence_parallel={fitting}"
    )
