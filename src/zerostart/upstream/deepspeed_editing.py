"""Private parts of DeepSpeed: what has to follow when the partition of a ZeRO-3 parameter is changed.

Used: ``free_param`` and ``ZeroParamStatus`` of ``runtime/zero/partition_parameters.py``; and, once there is
an optimizer, ``set_local_hp_param`` of the ``_z3_optimizer`` that it leaves on each parameter (as
``deepspeed.utils.safe_set_local_fp32_param`` does). At stages 1 and 2 ``_hp_mapping``, which the optimizer
leaves on a parameter, and ``deepspeed.utils.safe_set_full_fp32_param``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["partition_changed"]

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
