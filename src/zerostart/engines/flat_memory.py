"""What stage 0 takes after a load: everything whole on every rank.

DistributedDataParallel keeps its buckets beside the gradients (its default, ``gradient_as_bucket_view`` is
False). DeepSpeed's ``BF16_Optimizer`` and ``FP16_Optimizer`` keep fp32 masters and an fp32 gradient of each
element. Not compared with measurements yet.
"""

from __future__ import annotations

import torch

from zerostart.engines.forecast import FP32, MemoryPeak, OptimizerCost, ParameterBytes, Target


def after_load(
    held: ParameterBytes, whole: int, optimizer: OptimizerCost, target: Target, masters: bool
) -> list[MemoryPeak]:
    """The moments of ``initialize`` and of the first step; ``whole``: bytes of the flat buffers.

    ``masters``: DeepSpeed's optimizers train, with masters of their own, and not DistributedDataParallel.
    """
    gradients = held.gathers.total
    trained = gradients // held.dtype.itemsize
    mixed = masters and held.dtype != torch.float32
    each = FP32 if mixed else held.dtype.itemsize
    buckets = gradients if not masters and target.world_size > 1 else 0
    resident = {
        "parameters": whole,
        "buffers": held.buffers,
        "master weights": FP32 * trained * mixed,
        "buckets": buckets,
    }
    stepping = {
        **resident,
        "gradients": gradients + FP32 * trained * mixed,
        "optimizer state": each * trained * optimizer.states,
        "scratch": each * trained * optimizer.scratch(not target.accelerator),
    }
    return [MemoryPeak("initialize", {}, resident), MemoryPeak("step", {}, stepping)]
