"""Private parts of DeepSpeed: what has to follow when the partition of a ZeRO-3 parameter is changed."""

from __future__ import annotations

import sys
from typing import Any

import torch

from zerostart.upstream.registry import Use
from zerostart.upstream.versions import DEEPSPEED

__all__ = ["TOUCHED", "partition_changed"]

TOUCHED = (
    Use(
        library=DEEPSPEED,
        owner="deepspeed.runtime.zero.partition_parameters",
        names=("free_param", "ZeroParamStatus"),
        why="a gathered copy of a changed parameter is dropped, for a module to gather it again",
    ),
    Use(
        library=DEEPSPEED,
        owner="deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        names=("set_local_hp_param",),
        why="its fp32 master follows",
    ),
    Use(
        library=DEEPSPEED,
        owner="deepspeed.utils",
        names=("safe_set_full_fp32_param",),
        why="the same at stages 1 and 2",
    ),
)
_MODULE = "deepspeed.runtime.zero.partition_parameters"


def partition_changed(parameter: torch.Tensor) -> None:
    """Make a gathered copy of ``parameter``, and its fp32 master, follow what was changed.

    Does nothing for a parameter that is not DeepSpeed's. Every rank that has a share must call it.
    """
    module: Any = sys.modules.get(_MODULE)
    if getattr(parameter, "_hp_mapping", None) is not None:
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(parameter, parameter.detach().float())
        return
    if module is None or not hasattr(parameter, "ds_id"):
        return
    p: Any = parameter
    optimizer = getattr(p, "_z3_optimizer", None)
    if optimizer is not None:
        optimizer.set_local_hp_param(p.ds_tensor.detach().float(), p)
    if p.ds_status == module.ZeroParamStatus.AVAILABLE:
        module.free_param(p)  # Gathered again when a module needs it.
