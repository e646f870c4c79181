"""Counters, gradient accumulation and masters of a DeepSpeed engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zerostart.errors import ConfigError, UnsupportedVersionError
from zerostart.upstream.deepspeed.steps import TOUCHED as STEPS
from zerostart.upstream.deepspeed.steps import base_optimizer, masters_of, optimizer_of_engine
from zerostart.upstream.deepspeed.zero12_groups import mark_of
from zerostart.upstream.guard import Use, demand
from zerostart.upstream.torch.tensors import row_major

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

TOUCHED = (
    Use(
        "deepspeed.runtime.engine:DeepSpeedEngine",
        "_load_checkpoint, ._is_gradient_accumulation_boundary, ._unmanaged_backward_count, "
        ".global_samples, .global_steps, .lr_scheduler, .micro_steps, .skipped_steps",
        "a resumed run counts on, as its load_checkpoint has it",
    ),
    Use(
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
        ".cur_hysteresis, .cur_iter, .last_overflow_iter",
        "losses are scaled as they were",
    ),
    Use(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "_epilogue_ran_this_backward, .all_grad_tensors, .micro_step_id",
        "the same at stage 2",
    ),
    Use(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "_epilogue_ran_this_backward, clear_backward_seen_flag, .micro_step_id",
        "gradients that were restored in the middle of a window are added to",
    ),
    Use(
        "deepspeed.runtime.zero.partition_parameters",
        "free_param, ZeroParamStatus",
        "gathered copies of restored parameters are dropped",
    ),
)

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def engine_of(model: object) -> DeepSpeedEngine | None:
    """Return ``model``, compiled or not, as a DeepSpeed engine; None if it is none."""
    runtime = sys.modules.get("deepspeed.runtime.engine")
    while model is not None and runtime is not None:
        if isinstance(model, runtime.DeepSpeedEngine):
            demand(_concerning(model))
            return model
        model = getattr(model, "_orig_mod", None)
    return None


def _concerning(engine: DeepSpeedEngine) -> tuple[Use, ...]:
    parts = (engine, optimizer_of_engine(engine), _scaler(engine))
    kinds = {f"{kind.__module__}:{kind.__qualname__}" for part in parts for kind in type(part).__mro__}
    partitioned = engine_stage(engine) == 3
    return tuple(p for p in (*TOUCHED, *STEPS) if p.owner in kinds or (partitioned and ":" not in p.owner))


def check_engine_given(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ConfigError if a DeepSpeed engine trains ``parameters``."""
    if any(
        optimizer_of(parameter) is not None or getattr(parameter, "_hp_mapping", None) is not None
        for parameter in parameters
    ):
        raise ConfigError(
            "a DeepSpeed engine trains this model, and has the masters and the optimizer: pass what "
            "deepspeed.initialize or accelerator.prepare returned"
        )


def engine_stage(engine: DeepSpeedEngine) -> int:
    """Return the ZeRO stage of an engine."""
    return int(engine.zero_optimization_stage())


def counters(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the counters and the loss scale of an engine as JSON values."""
    result: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
    result["scale"] = {
        name: float(value) if isinstance(value, torch.Tensor) else value
        for name in _SCALE
        if (value := getattr(_scaler(engine), name, None)) is not None
    }
    return result


def set_counters(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restore the values of ``counters``; ignore those that this engine does not have."""
    scaler = _scaler(engine)
    for owner, names, values in ((engine, _COUNTERS, saved), (scaler, _SCALE, saved.get("scale", {}))):
        for name in names:
            if hasattr(owner, name) and name in values:
                setattr(owner, name, values[name])
    if "window" not in saved:  # Begin a new window.
        engine.micro_steps += -engine.micro_steps % engine.gradient_accumulation_steps()


def _scaler(engine: DeepSpeedEngine) -> object:
    wrapper = optimizer_of_engine(engine)
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


def is_window_open(engine: DeepSpeedEngine) -> bool:
    """Return True if a step has not used all accumulated gradients yet."""
    if base_optimizer(engine) is None:
        return False
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count)
    if engine._is_gradient_accumulation_boundary is not None:
        # accelerate sets it, and steps the engine only at the end of a window.
        return not engine._is_gradient_accumulation_boundary
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def window(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the position of stages 2 and 3 in an open window as JSON values."""
    wrapper = optimizer_of_engine(engine)
    return {
        "micro_step_id": wrapper.micro_step_id,
        "epilogue_ran": wrapper._epilogue_ran_this_backward,
        "unmanaged": engine._unmanaged_backward_count,
        "accumulation": engine.gradient_accumulation_steps(),
    }


def set_window(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restore the values of ``window``."""
    wrapper = optimizer_of_engine(engine)
    wrapper.micro_step_id = saved["micro_step_id"]
    wrapper._epilogue_ran_this_backward = saved["epilogue_ran"]
    engine._unmanaged_backward_count = saved["unmanaged"]


def drop_gathered(parameters: Iterable[Any]) -> None:
    """Free gathered copies of ZeRO-3 parameters whose partitions have changed."""
    module: ModuleType | None = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    for parameter in parameters:
        if module is None or not hasattr(parameter, "ds_id"):
            continue
        # The next gather would read the old values from ZeRO++'s copy.
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None
        if parameter.ds_status == module.ZeroParamStatus.AVAILABLE:
            module.free_param(parameter)


_MODULE = "deepspeed.runtime.zero.partition_parameters"

#: First element in this rank's part of a parameter, and its 1-D master from there on.
Master = tuple[int, torch.Tensor]


def has_own_values(parameter: torch.Tensor) -> bool:
    """Return True for a parameter of an expert, with other values on other ranks."""
    return not getattr(parameter, "allreduce", True)


def check_editable(parameter: torch.Tensor, name: str) -> None:
    """Raise ConfigError if the engine has moved the trained values."""
    if getattr(optimizer_of(parameter), "offloaded_states", None):
        raise ConfigError(
            f"{name} cannot be changed after engine.offload_states() has moved the engine's state; "
            "call engine.reload_states() before"
        )


@contextlib.contextmanager
def master_of(parameter: torch.Tensor) -> Iterator[Master | None]:
    """Yield the master of this rank's share, to edit in place; call it on every rank."""
    if "deepspeed" not in sys.modules:
        yield None
    elif hasattr(parameter, "ds_id"):
        with _partitioned(parameter) as found:
            yield found
    else:
        optimizer = optimizer_of(parameter)
        if optimizer is None and hasattr(parameter, "_hp_mapping"):
            raise UnsupportedVersionError(
                "zerostart does not know this version of DeepSpeed, and the fp32 masters of its "
                "optimizer would not follow a change; install a known version (zerostart env lists "
                "them)"
            )
        steps = masters_of(optimizer)
        pairs = ((step, m) for step in steps for m in step.members if m.parameter is parameter)
        step, member = next(pairs, (None, None))
        if step is None or member is None:
            yield None
        else:
            with row_major(step.tensor.detach()) as values:
                yield member.first or 0, values[member.at : member.at + member.count]


def optimizer_of(parameter: torch.Tensor) -> ZeROOptimizer | None:
    """Return DeepSpeed's optimizer of a parameter, or None."""
    if hasattr(parameter, "ds_id"):
        return getattr(parameter, "_z3_optimizer", None)
    # Stages 1 and 2: DeepSpeed does not refer to the optimizer on the parameter.
    mark = mark_of(parameter)
    reference = None if mark is None else mark.keeper.optimizer
    return None if reference is None else reference()


@contextlib.contextmanager
def _partitioned(parameter: Any) -> Iterator[Master | None]:
    module: ModuleType = sys.modules[_MODULE]
    optimizer = optimizer_of(parameter)
    if optimizer is None or optimizer.get_param_id(parameter) not in optimizer.grad_position:
        yield None  # Not started, or frozen: there is no master.
    else:
        # Keep the buffers: an edit of a swapped master is written back below.
        values, group = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
        try:
            yield 0, values.detach()
        finally:
            if optimizer._swappable_optimizer_subgroup(group):
                optimizer._optimizer_states_and_gradient_swap_out(group)
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        parameter.ds_secondary_tensor = None  # The next forward makes it again.
    if parameter.ds_status == module.ZeroParamStatus.AVAILABLE:
        module.free_param(parameter)  # Gathered again when a module needs it.
