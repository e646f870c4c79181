"""Private parts of DeepSpeed: where its optimizers keep masters, moments, gradients, and what it counts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zerostart.errors import ConfigError, EngineError
from zerostart.upstream.deepspeed_editing import optimizer_of
from zerostart.upstream.deepspeed_stage12_optimizers import shares_of
from zerostart.upstream.registry import Lasts, PatchPoint, Shape, Use, demand
from zerostart.upstream.stepped import Member, Stepped, plain_steps
from zerostart.upstream.versions import DEEPSPEED

__all__ = [
    "TOUCHED",
    "base_optimizer",
    "check_engine_given",
    "check_movable",
    "counters",
    "drop_gathered",
    "engine_of",
    "engine_stage",
    "gradients",
    "is_window_open",
    "set_counters",
    "set_window",
    "steps_of",
    "window",
]

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_BFLOAT16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
TOUCHED = (
    Use(
        library=DEEPSPEED,
        owner=_STAGE3,
        names=("get_param_id",),
        attributes=(
            "fp16_groups",
            "fp32_partitioned_groups_flat",
            "grad_partitions_flat_buffer",
            "grad_position",
            "offload_optimizer",
            "params_in_nvme_and_cpu",
            "sub_group_to_group_id",
            "swap_optimizer",
        ),
        why="masters and moments of a parameter are a run of the flat tensor of its sub-group",
        shapes=(
            Shape(
                f"{_STAGE3}._get_fp32_opt_state_partition",
                has=(
                    "I, A, N = self.grad_position[self.get_param_id(param)]",
                    "P = self.fp32_partitioned_groups_flat[I]",
                    "S = P.narrow(0, A, N)",
                    "S = self.optimizer.state[P][optim_state_key].narrow(0, A, N)",
                ),
            ),
            Shape(
                f"{_STAGE3}._setup_for_real_optimizer",
                has=(
                    "P = list(itertools.chain.from_iterable(self.fp16_groups))",
                    "self.grad_partitions_flat_buffer.narrow(0, A, B.partition_numel())",
                ),
            ),
        ),
    ),
    Use(
        library=DEEPSPEED,
        owner=_ZERO,
        names=("_get_compact_grad_partition_buffer", "_use_compact_grad_partition_buffer"),
        attributes=(
            "all_grad_tensors",
            "cpu_offload",
            "gradient_accumulation_dtype",
            "loss_scaler",
            "offloaded_states",
            "params_in_partition",
            "partition_gradients",
            "single_partition_of_fp32_groups",
        ),
        why="masters, moments and reduced gradients of a rank are its partition of the flat group",
        shapes=(
            Shape(
                f"{_ZERO}.independent_gradient_partition_epilogue",
                has=(
                    "self._use_compact_grad_partition_buffer(I)",
                    "self.all_grad_tensors[I] = self.get_all_grad_tensors(self.params_in_partition[I], ...)",
                    "A.add_(G)",
                ),
            ),
        ),
    ),
    Use(
        library=DEEPSPEED,
        owner=_BFLOAT16,
        attributes=("fp32_groups_flat_partition",),
        why="the same for stage 1 in bf16 with gradients in fp32",
    ),
    PatchPoint(
        library=DEEPSPEED,
        owner=_ENGINE,
        writes=(
            "_unmanaged_backward_count",
            "global_samples",
            "global_steps",
            "micro_steps",
            "skipped_steps",
        ),
        attributes=(
            "_unmanaged_backward_count",
            "global_samples",
            "global_steps",
            "lr_scheduler",
            "micro_steps",
            "skipped_steps",
        ),
        why="a resumed run counts on, as its load_checkpoint has it",
        lasts=Lasts.MODEL,
        shapes=(
            Shape(
                f"{_ENGINE}._load_checkpoint",
                has=(
                    "self.global_steps = checkpoint['global_steps']",
                    "self.skipped_steps = checkpoint['skipped_steps']",
                ),
            ),
        ),
    ),
    PatchPoint(
        library=DEEPSPEED,
        owner="deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
        attributes=("cur_hysteresis", "cur_iter", "last_overflow_iter"),
        writes=("cur_hysteresis", "cur_iter", "cur_scale", "last_overflow_iter"),
        why="losses are scaled as they were, here and by the LossScaleConfig of stage 0",
        lasts=Lasts.OPTIMIZER,
    ),
    PatchPoint(
        library=DEEPSPEED,
        owner=_ZERO,
        writes=("all_grad_tensors", "micro_step_id", "_epilogue_ran_this_backward"),
        names=("_epilogue_ran_this_backward",),
        attributes=("all_grad_tensors", "micro_step_id"),
        why="the same at stage 2",
        lasts=Lasts.OPTIMIZER,
    ),
    PatchPoint(
        library=DEEPSPEED,
        owner=_STAGE3,
        writes=("micro_step_id", "_epilogue_ran_this_backward"),
        names=("_epilogue_ran_this_backward",),
        attributes=("micro_step_id",),
        why="gradients that were restored in the middle of a window are added to",
        lasts=Lasts.OPTIMIZER,
        shapes=(
            Shape(
                f"{_STAGE3}.clear_backward_seen_flag",
                has=("if self._epilogue_ran_this_backward: ...", "self.micro_step_id += 1"),
            ),
        ),
    ),
    Use(
        library=DEEPSPEED,
        owner="deepspeed.runtime.zero.partition_parameters",
        names=("free_param", "ZeroParamStatus"),
        why="gathered copies of restored parameters are dropped",
    ),
)

#: What the engine counts, and what its loss scalers know beside their settings.
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def engine_of(model: Any) -> Any:
    """The DeepSpeed engine that ``model`` is, under ``torch.compile`` or not; None for other models."""
    runtime = sys.modules.get("deepspeed.runtime.engine")
    while model is not None and runtime is not None:
        if isinstance(model, runtime.DeepSpeedEngine):
            demand(TOUCHED)
            return model
        model = getattr(model, "_orig_mod", None)
    return None


def check_engine_given(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ConfigError if a DeepSpeed engine trains ``parameters``: that is to be given, not the model."""
    if any(
        optimizer_of(parameter) is not None or getattr(parameter, "_hp_mapping", None) is not None
        for parameter in parameters
    ):
        raise ConfigError(
            "a DeepSpeed engine trains this model, and has the masters and the optimizer: pass what "
            "deepspeed.initialize or accelerator.prepare returned"
        )


def engine_stage(engine: Any) -> int:
    """The ZeRO stage at which an engine runs."""
    return int(engine.zero_optimization_stage())


def _wrapper(engine: Any) -> Any:
    """DeepSpeed's optimizer of an engine; None for an engine without one, which only evaluates."""
    found = engine.optimizer
    return None if found is None or not hasattr(found, "param_groups") else found


def base_optimizer(engine: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer that steps, inside DeepSpeed's; None where an engine has none."""
    wrapper = _wrapper(engine)
    if wrapper is None or isinstance(wrapper, torch.optim.Optimizer):
        return wrapper
    base = getattr(wrapper, "optimizer", None)
    return base if isinstance(base, torch.optim.Optimizer) else None


def check_movable(engine: Any) -> None:
    """Raise ConfigError or EngineError for a state that is not where it can be read and written."""
    wrapper = _wrapper(engine)
    if getattr(wrapper, "offloaded_states", None):
        raise ConfigError(
            "engine.offload_states() has moved the state of the engine; call engine.reload_states() before"
        )
    if getattr(wrapper, "swap_optimizer", False) or getattr(wrapper, "params_in_nvme_and_cpu", False):
        raise EngineError(
            "what DeepSpeed keeps on NVMe (offload_param or offload_optimizer to nvme) is not saved or "
            "restored as training state; keep it on the host (device: cpu), or use engine.save_checkpoint"
        )
    if getattr(wrapper, "zenflow", False) or ".superoffload." in type(wrapper).__module__:
        raise EngineError(
            "ZenFlow and SuperOffload keep states in an order of their own; use engine.save_checkpoint"
        )


def steps_of(engine: Any) -> list[Stepped]:
    """What the optimizer of an engine steps, in the order of its groups; the same number on every rank."""
    wrapper, base = _wrapper(engine), base_optimizer(engine)
    if wrapper is None or base is None:
        return []
    if wrapper is base:
        return plain_steps(base)
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return list(_partitioned(wrapper, base))
    if hasattr(wrapper, "single_partition_of_fp32_groups") or hasattr(wrapper, "fp32_groups_flat_partition"):
        return list(_in_partitions(wrapper, base))
    if hasattr(wrapper, "fp32_groups_flat") or hasattr(wrapper, "fp32_groups"):
        return list(_in_groups(wrapper, base))
    raise EngineError(
        f"{type(wrapper).__name__} is not an optimizer of DeepSpeed's that zerostart knows; use "
        "engine.save_checkpoint"
    )


def _partitioned(wrapper: Any, base: torch.optim.Optimizer) -> Iterator[Stepped]:
    """At stage 3: one flat tensor for each sub-group, of the partitions of its parameters."""
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
        yield Stepped(steps, flat, wrapper.sub_group_to_group_id[number], members)


def _in_partitions(wrapper: Any, base: torch.optim.Optimizer) -> Iterator[Stepped]:
    """At stages 1 and 2: this rank's partition of each flat group."""
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
        yield Stepped(base, flat, number, members)


def _in_groups(wrapper: Any, base: torch.optim.Optimizer) -> Iterator[Stepped]:
    """At stage 0: whole masters, one flat tensor for each group, or one for each parameter."""
    for number, parameters in enumerate(wrapper.fp16_groups):
        flats = getattr(wrapper, "fp32_groups_flat", None)
        if flats is None:
            for parameter, master in zip(parameters, wrapper.fp32_groups[number], strict=True):
                yield Stepped(base, master, number, (Member(parameter, 0, parameter.numel()),))
            continue
        offsets = [0, *itertools.accumulate(p.numel() for p in parameters)]
        members = tuple(
            Member(parameter, at, parameter.numel())
            for parameter, at in zip(parameters, offsets, strict=False)
        )
        yield Stepped(base, flats[number], number, members)


def counters(engine: Any) -> dict[str, Any]:
    """What the engine counts and how its losses are scaled now, as JSON values."""
    found: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
    found["scale"] = {
        name: float(value) if isinstance(value, torch.Tensor) else value
        for name in _SCALE
        if (value := getattr(_scaler(engine), name, None)) is not None
    }
    return found


def set_counters(engine: Any, found: Mapping[str, Any]) -> None:
    """Put back what ``counters`` gave; what this engine does not have is left out."""
    engine.global_steps = found.get("global_steps", engine.global_steps)
    engine.global_samples = found.get("global_samples", engine.global_samples)
    engine.micro_steps = found.get("micro_steps", engine.micro_steps)
    engine.skipped_steps = found.get("skipped_steps", engine.skipped_steps)
    scale, scaler = found.get("scale", {}), _scaler(engine)
    if hasattr(scaler, "cur_scale"):
        scaler.cur_scale = scale.get("cur_scale", scaler.cur_scale)
    if hasattr(scaler, "cur_iter"):
        scaler.cur_iter = scale.get("cur_iter", scaler.cur_iter)
    if hasattr(scaler, "last_overflow_iter"):
        scaler.last_overflow_iter = scale.get("last_overflow_iter", scaler.last_overflow_iter)
    if hasattr(scaler, "cur_hysteresis"):
        scaler.cur_hysteresis = scale.get("cur_hysteresis", scaler.cur_hysteresis)


def _scaler(engine: Any) -> Any:
    wrapper = _wrapper(engine)
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


def is_window_open(engine: Any) -> bool:
    """Whether gradients have been accumulated that no step has taken yet."""
    if base_optimizer(engine) is None:
        return False
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count)
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def window(engine: Any) -> dict[str, Any]:
    """Where stages 2 and 3 are in an open window, as JSON values."""
    wrapper = _wrapper(engine)
    return {
        "micro_step_id": wrapper.micro_step_id,
        "epilogue_ran": wrapper._epilogue_ran_this_backward,
        "unmanaged": engine._unmanaged_backward_count,
    }


def set_window(engine: Any, found: Mapping[str, Any]) -> None:
    """Put back what ``window`` gave."""
    wrapper = _wrapper(engine)
    wrapper.micro_step_id = found["micro_step_id"]
    wrapper._epilogue_ran_this_backward = found["epilogue_ran"]
    engine._unmanaged_backward_count = found["unmanaged"]


def gradients(engine: Any, steps: Sequence[Stepped], make: bool = False) -> list[torch.Tensor] | None:
    """Gradients that have been reduced in an open window, 1-D, of each member of ``steps`` in turn.

    ``make``: give room for them, zeros, in a window to be. None where the engine keeps unreduced ones.
    """
    wrapper = _wrapper(engine)
    if hasattr(wrapper, "grad_partitions_flat_buffer"):
        counts = [member.count for step in steps for member in step.members]
        buffer: torch.Tensor = wrapper.grad_partitions_flat_buffer
        return list(torch.split(buffer[: sum(counts)], counts))
    if not getattr(wrapper, "partition_gradients", False) or wrapper.cpu_offload:
        return None
    return [part for step in steps for part in _reduced(wrapper, step, make)]


def _reduced(wrapper: Any, step: Stepped, make: bool) -> Iterator[torch.Tensor]:
    """The same at stage 2, for one group: in a flat partition, or in whole tensors of which a part counts."""
    number = step.group
    if wrapper._use_compact_grad_partition_buffer(number):
        flat = wrapper._get_compact_grad_partition_buffer(number).flat_partition
        yield from (flat[member.at : member.at + member.count] for member in step.members)
        return
    parameters = wrapper.params_in_partition[number]
    if make:
        dtype = wrapper.gradient_accumulation_dtype
        made = [torch.zeros_like(p, dtype=dtype, requires_grad=False) for p in parameters]
        wrapper.all_grad_tensors[number] = made
    held = {id(p): g for p, g in zip(parameters, wrapper.all_grad_tensors[number], strict=True)}
    for member in step.members:
        first = member.first or 0
        whole = held.get(id(member.parameter), member.parameter).detach().view(-1)
        yield whole[first : first + member.count]


def drop_gathered(parameters: Any) -> None:
    """Drop gathered copies of ZeRO-3 parameters whose partitions have changed; others are left alone."""
    module: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    for parameter in parameters:
        if module is None or not hasattr(parameter, "ds_id"):
            continue
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None
        if parameter.ds_status == module.ZeroParamStatus.AVAILABLE:
            module.free_param(parameter)
