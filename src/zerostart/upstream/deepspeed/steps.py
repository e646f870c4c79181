"""Find masters, moments and reduced gradients in the optimizers of DeepSpeed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerostart.errors import ConfigError, EngineError
from zerostart.upstream.deepspeed.zero12_optimizers import shares_of
from zerostart.upstream.guard import Use
from zerostart.upstream.torch.optimizer_steps import Member, SteppedTensor, plain_steps

if TYPE_CHECKING:
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

TOUCHED = (
    Use(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "get_param_id, _get_fp32_opt_state_partition, _setup_for_real_optimizer, .fp16_groups, "
        ".fp32_partitioned_groups_flat, .grad_partitions_flat_buffer, .grad_position, .offload_optimizer, "
        ".params_in_nvme_and_cpu, .sub_group_to_group_id, .swap_optimizer",
        "masters and moments of a parameter are a run of the flat tensor of its sub-group",
    ),
    Use(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "_get_compact_grad_partition_buffer, _use_compact_grad_partition_buffer, "
        "independent_gradient_partition_epilogue, .all_grad_tensors, .cpu_offload, "
        ".gradient_accumulation_dtype, .loss_scaler, .offloaded_states, .params_in_partition, "
        ".partition_gradients, .single_partition_of_fp32_groups",
        "masters, moments and reduced gradients of a rank are its partition of the flat group",
    ),
    Use(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
        ".fp32_groups_flat_partition",
        "the same for stage 1 in bf16 with gradients in fp32",
    ),
)


def optimizer_of_engine(engine: DeepSpeedEngine) -> Any:
    """Return DeepSpeed's optimizer of an engine; None if the engine only evaluates."""
    optimizer = engine.optimizer
    return None if optimizer is None or not hasattr(optimizer, "param_groups") else optimizer


def base_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside DeepSpeed's, or None."""
    wrapper = optimizer_of_engine(engine)
    if wrapper is None or isinstance(wrapper, torch.optim.Optimizer):
        return wrapper
    base = getattr(wrapper, "optimizer", None)
    return base if isinstance(base, torch.optim.Optimizer) else None


def check_movable(engine: DeepSpeedEngine) -> None:
    """Raise ConfigError or EngineError for a state that cannot be read and written."""
    wrapper = optimizer_of_engine(engine)
    if getattr(wrapper, "offloaded_states", None):
        raise ConfigError(
            "engine.offload_states() has moved the engine's state; call engine.reload_states() before"
        )
    if getattr(wrapper, "swap_optimizer", False) or getattr(wrapper, "params_in_nvme_and_cpu", False):
        raise EngineError(
            "state that DeepSpeed keeps on NVMe (offload_param or offload_optimizer to nvme) "
            "cannot be saved or restored as a training state; keep it on the host (device: cpu), "
            "or use engine.save_checkpoint"
        )
    if getattr(wrapper, "zenflow", False) or ".superoffload." in type(wrapper).__module__:
        raise EngineError(
            "ZenFlow and SuperOffload keep the optimizer's states in an order that zerostart "
            "cannot save; use engine.save_checkpoint"
        )


def steps_of(engine: DeepSpeedEngine) -> list[SteppedTensor]:
    """List the stepped tensors of an engine by group; the same number on all ranks."""
    wrapper, base = optimizer_of_engine(engine), base_optimizer(engine)
    if wrapper is None or base is None:
        return []
    if wrapper is base:
        return plain_steps(base)
    steps = list(masters_of(wrapper))
    if not steps:
        raise EngineError(
            f"{type(wrapper).__name__} is an optimizer of DeepSpeed that zerostart does not know; "
            "use engine.save_checkpoint"
        )
    return steps


def masters_of(wrapper: Any) -> Iterator[SteppedTensor]:
    """Yield the masters of an optimizer of DeepSpeed; none if the optimizer is unknown."""
    # The classes' modules may import packages that are not installed. Stage 3, then 1 and 2, then 0.
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        yield from _partitioned(wrapper, wrapper.optimizer)
    elif hasattr(wrapper, "single_partition_of_fp32_groups") or hasattr(
        wrapper, "fp32_groups_flat_partition"
    ):
        yield from _in_partitions(wrapper, wrapper.optimizer)
    elif hasattr(wrapper, "fp32_groups_flat") or hasattr(wrapper, "fp32_groups"):
        yield from _in_groups(wrapper, wrapper.optimizer)


def _partitioned(wrapper: DeepSpeedOptimizer, base: torch.optim.Optimizer) -> Iterator[SteppedTensor]:
    for number, (flat, parameters) in enumerate(
        zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True)
    ):
        places = [wrapper.grad_position[wrapper.get_param_id(p)] for p in parameters]
        members = tuple(
            Member(parameter, int(at), int(count))
            for parameter, (_, at, count) in zip(parameters, places, strict=True)
        )
        steps = base
        devices = getattr(wrapper, "subgroup_to_device", None)
        if devices and devices[number] != "cpu" and hasattr(wrapper, "backup_optimizer"):
            steps = wrapper.backup_optimizer
        yield SteppedTensor(steps, flat, wrapper.sub_group_to_group_id[number], members)


def _in_partitions(wrapper: DeepSpeedOptimizer, base: torch.optim.Optimizer) -> Iterator[SteppedTensor]:
    flats = getattr(wrapper, "single_partition_of_fp32_groups", None)
    if flats is None:
        flats = wrapper.fp32_groups_flat_partition
    groups = getattr(wrapper, "round_robin_bit16_groups", None)
    counts = [len(group) for group in (wrapper.bf16_groups if groups is None else groups)]
    shares = iter(shares_of(wrapper))
    for number, (flat, count) in enumerate(zip(flats, counts, strict=True)):
        members = tuple(
            Member(parameter, int(share.storage_offset() - flat.storage_offset()), share.numel(), low)
            for parameter, low, share in itertools.islice(shares, count)
        )
        yield SteppedTensor(base, flat, number, members)


def _in_groups(wrapper: DeepSpeedOptimizer, base: torch.optim.Optimizer) -> Iterator[SteppedTensor]:
    for number, parameters in enumerate(wrapper.fp16_groups):
        flats = getattr(wrapper, "fp32_groups_flat", None)
        if flats is None:
            for parameter, master in zip(parameters, wrapper.fp32_groups[number], strict=True):
                yield SteppedTensor(base, master, number, (Member(parameter, 0, parameter.numel()),))
            continue
        offsets = [0, *itertools.accumulate(p.numel() for p in parameters)]
        members = tuple(
            Member(parameter, at, parameter.numel())
            for parameter, at in zip(parameters, offsets, strict=False)
        )
        yield SteppedTensor(base, flats[number], number, members)


def gradients(
    engine: DeepSpeedEngine, steps: Sequence[SteppedTensor], make: bool = False
) -> list[torch.Tensor] | None:
    """Return the reduced gradients of an open window, or None; ``make`` creates zeros."""
    wrapper = optimizer_of_engine(engine)
    if hasattr(wrapper, "grad_partitions_flat_buffer"):
        counts = [member.count for step in steps for member in step.members]
        # One buffer in the order of the sub-groups, with padding at the end.
        buffer: torch.Tensor = wrapper.grad_partitions_flat_buffer
        return list(torch.split(buffer[: sum(counts)], counts))
    # Stage 1, and stage 2 with offload, reduce gradients only in the step.
    if not getattr(wrapper, "partition_gradients", False) or wrapper.cpu_offload:
        return None
    return [part for step in steps for part in _reduced(wrapper, step, make)]


def _reduced(wrapper: DeepSpeedOptimizer, step: SteppedTensor, make: bool) -> Iterator[torch.Tensor]:
    number = step.group
    if wrapper._use_compact_grad_partition_buffer(number):
        flat = wrapper._get_compact_grad_partition_buffer(number).flat_partition
        yield from (flat[member.at : member.at + member.count] for member in step.members)
        return
    parameters = wrapper.params_in_partition[number]
    if make:
        dtype = wrapper.gradient_accumulation_dtype
        zeros = [torch.zeros_like(p, dtype=dtype, requires_grad=False) for p in parameters]
        wrapper.all_grad_tensors[number] = zeros
    gradients_by_id = {id(p): g for p, g in zip(parameters, wrapper.all_grad_tensors[number], strict=True)}
    for member in step.members:
        first = member.first or 0
        whole = gradients_by_id.get(id(member.parameter), member.parameter).detach().view(-1)
        yield whole[first : first + member.count]
