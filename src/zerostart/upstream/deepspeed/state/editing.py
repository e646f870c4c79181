"""Private parts of DeepSpeed: the fp32 master of a parameter, and what else follows when that changes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from zerostart.errors import ConfigError, UnsupportedVersionError
from zerostart.upstream.deepspeed.zero12.marks import marked
from zerostart.upstream.deepspeed.zero12.optimizers import shares_of
from zerostart.upstream.guard import Use
from zerostart.upstream.torch.tensors import row_major

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed.runtime.base_optimizer import ZeROOptimizer


TOUCHED = (
    Use(
        "deepspeed.runtime.zero.partition_parameters",
        "free_param, ZeroParamStatus",
        "a gathered copy of a changed parameter is dropped",
    ),
    Use(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "get_param_id, _get_fp32_opt_state_partition, _swappable_optimizer_subgroup, "
        "_optimizer_states_and_gradient_swap_out",
        "its fp32 master follows, in a swap file too",
    ),
)
_MODULE = "deepspeed.runtime.zero.partition_parameters"

#: ``(first, values)``: element ``i`` of the 1-D ``values`` is the master of element ``first + i`` of what
#: this rank holds of the parameter.
Master = tuple[int, torch.Tensor]


def has_own_values(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is of an expert of DeepSpeed's, with other values on other ranks."""
    return not getattr(parameter, "allreduce", True)


def check_editable(parameter: torch.Tensor, name: str) -> None:
    """Raise ConfigError where the values that are trained are not where they are changed."""
    if getattr(optimizer_of(parameter), "offloaded_states", None):
        raise ConfigError(
            f"{name} cannot be changed after engine.offload_states() has moved the engine's state; "
            "call engine.reload_states() before"
        )


@contextlib.contextmanager
def master_of(parameter: torch.Tensor) -> Iterator[Master | None]:
    """The master of this rank's share of ``parameter``, to be changed in place; None where there is none.

    Afterwards gathered copies of a changed partition are gone. Not collective, but every rank that has a
    share must come through it. Raises UnsupportedVersionError.
    """
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
        flat = any(hasattr(optimizer, name) for name in ("round_robin_bit16_groups", "bf16_groups"))
        if flat:
            yield _in_partition(optimizer, parameter)
        else:
            with _in_groups(optimizer, parameter) as found:
                yield found


def optimizer_of(parameter: torch.Tensor) -> ZeROOptimizer | None:
    """DeepSpeed's optimizer of a parameter, once there is one that is known here; None for others."""
    if hasattr(parameter, "ds_id"):
        return getattr(parameter, "_z3_optimizer", None)
    # Stages 1 and 2: nothing on the parameter itself leads to the optimizer, our keeper does.
    mark = marked(parameter)
    reference = None if mark is None else mark.keeper.optimizer
    return None if reference is None else reference()


@contextlib.contextmanager
def _partitioned(parameter: Any) -> Iterator[Master | None]:
    """As ``master_of``, at stage 3."""
    module: ModuleType = sys.modules[_MODULE]
    optimizer = optimizer_of(parameter)
    if optimizer is None or optimizer.get_param_id(parameter) not in optimizer.grad_position:
        yield None  # Not started, or frozen: what the partition holds is all there is.
    else:
        # Swapped in from NVMe where it lies there, and held until the block ends, so that an edit is written
        # back.
        values, group = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
        try:
            yield 0, values.detach()
        finally:
            if optimizer._swappable_optimizer_subgroup(group):
                optimizer._optimizer_states_and_gradient_swap_out(group)
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        parameter.ds_secondary_tensor = None  # Made again of what the next forward gathers.
    if parameter.ds_status == module.ZeroParamStatus.AVAILABLE:
        module.free_param(parameter)  # Gathered again when a module needs it.


def _in_partition(optimizer: ZeROOptimizer, parameter: torch.Tensor) -> Master | None:
    """As ``master_of``, at stages 1 and 2."""
    shares = shares_of(optimizer)
    return next(((first, share) for member, first, share in shares if member is parameter), None)


@contextlib.contextmanager
def _in_groups(optimizer: ZeROOptimizer, parameter: torch.Tensor) -> Iterator[Master | None]:
    """As ``master_of``, at stage 0: one flat buffer of masters for each group, or one tensor for each."""
    for number, group in enumerate(getattr(optimizer, "fp16_groups", ())):
        offset = 0
        for place, member in enumerate(group):
            if member is parameter:
                flats = getattr(optimizer, "fp32_groups_flat", None)
                if flats is not None:
                    yield 0, flats[number].detach()[offset : offset + parameter.numel()]
                    return
                with row_major(optimizer.fp32_groups[number][place].detach()) as values:
                    yield 0, values
                return
            offset += member.numel()
    yield None
