"""Forecast the memory that DeepSpeed takes after a load, moment by moment.

Stage 3 follows ``runtime/zero/stage3.py`` of DeepSpeed 0.19.8. With n elements of a rank's share and g bytes
for an element of a kept gradient:

- ``_create_fp32_partitions``: masters of 4 n bytes, also of fp32 partitions.
- ``initialize_optimizer_states``: with offload an fp32 gradient of each sub-group, which remains. Swapped
  states need one of the largest sub-group.
- ``_setup_for_real_optimizer``: gradients of g n bytes, and the bucket, which is touched as it fills.
- backward: gathered parameters, the present gradient, the bucket, and the copies of the reduce-scatter.
- ``step``: the gradients of a sub-group flat, then in fp32; the states; scratch memory of the update.

Gradients that ``offload_optimizer`` page-locks are rounded up to powers of two by torch's allocator. Stock
copies that a load cannot avoid (see ``docs/placements.md``) are not forecast.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.engines.forecast import FP32, Array, MemoryInputs, MemoryPeak, Sizes, pinned_by_torch


def stage3_peaks(inputs: MemoryInputs, settings: DeepSpeedSettings) -> list[MemoryPeak]:
    """Forecast ``initialize`` and the first step of ZeRO-3."""
    shares, target = inputs.shares, inputs.target
    n, gathers, itemsize = shares.trained, shares.gathers, shares.dtype.itemsize
    gradient_dtype = settings.accumulates or shares.dtype
    offloaded, swapped = settings.optimizer_home != "none", settings.optimizer_home == "nvme"
    # A sub-group ends with the parameter that fills it.
    group: Array = np.minimum(n, settings.sub_group + shares.largest)
    # Swapped states are in memory one sub-group at a time, in several buffers.
    resident = np.minimum(n, settings.swap_buffers * group) if swapped else n
    gradients: Array = gradient_dtype.itemsize * n
    if settings.states_pinned and target.accelerator and settings.states_on_host:
        # fp32 gradients of offloaded states exist from the start, page-locked by sub-group.
        groups: Array = n // np.maximum(group, 1)
        remainder = n - groups * group
        gradients = pinned_by_torch(gradients) + groups * pinned_by_torch(FP32 * group)
        gradients = gradients + pinned_by_torch(FP32 * remainder)
    elif settings.states_on_host:
        gradients = gradients + FP32 * n
    copies = 0 if offloaded and settings.fused else inputs.scratch(on_host=offloaded)
    ready: Sizes = {"master weights": FP32 * resident, "gradients": gradients}
    full: Sizes = {**ready, "optimizer state": FP32 * inputs.optimizer.states * (0 * n if swapped else n)}
    flattened: Sizes = {} if offloaded else {"gradients": gradients + FP32 * group}
    # The gradients of a sub-group as one tensor, before their conversion to fp32.
    flat: Array = group * (0 if offloaded or gradient_dtype == torch.float32 else gradient_dtype.itemsize)

    bucket = settings.bucket * itemsize
    filled = min(gathers.total, bucket)
    idle, touched = (bucket, bucket) if target.accelerator else (0, filled)
    sharers = min(settings.secondary, target.world_size)
    secondary: Sizes = {"secondary partitions": gathers.total // sharers} if sharers > 1 else {}
    # The constructor of the hooks makes secondary partitions by gathering one parameter after another.
    hooked = gathers.largest if secondary else 0
    # A gradient larger than the bucket is reduced by itself, without a copy into the bucket.
    copied_together = filled if gathers.largest <= bucket else 0
    reducing: Sizes = {
        "gathered parameters": gathers.module * (1 + target.copies),
        "buckets": touched + copied_together + max(filled, gathers.largest) * target.copies,
        "incoming gradient": gathers.largest if filled < gathers.total else 0,
    }
    peak = functools.partial(inputs.peak, offloaded)
    stepping: Sizes = {"buckets": touched, **secondary}
    return [
        peak("initialize", {"master weights": FP32 * resident, "scratch": FP32 * group * swapped}),
        peak(
            "initialize",
            ready,
            secondary,
            {"buckets": idle, "gathered parameters": hooked * (1 + target.copies)},
        ),
        peak("step", ready, secondary, reducing),
        peak("step", {**ready, **flattened, "scratch": flat}, stepping),
        peak("step", {**full, **flattened, "scratch": FP32 * group * copies}, stepping),
    ]


# Stages 1 and 2 follow ``stage_1_and_2.py`` of DeepSpeed 0.19.8. With N elements in the flat buffers, n of
# them updated by a rank (N / ranks; for experts N / their owners), and p bytes for an element:
#
# - masters of 4 n bytes, converted from the partition. Offload adds a buffer of p n bytes, one of the largest
#   parameter on host and device, and an fp32 gradient of the partition.
# - backward: at stage 1 all gradients until the last micro-batch, then (at stage 2 at once) the bucket, its
#   copy that is reduced, and the gradients of this rank's partition. ``BF16_Optimizer`` (stage 1 with fp32
#   accumulation, ``bf16_optimizer.py``) has fp32 gradients of all parameters from the start instead.
# - ``step``: the partition's gradients flat, in fp32; the states; scratch memory; then an all-gather.

#: Elements that a partition is a multiple of (``nccl_start_alignment_factor``).
ALIGNED = 2


def flat_peaks(inputs: MemoryInputs, settings: DeepSpeedSettings, stage: int) -> list[MemoryPeak]:
    """Forecast ``initialize`` and the first step of ZeRO-1 or 2."""
    shares, target, offloaded = inputs.shares, inputs.target, settings.states_on_host
    gathers, itemsize, kept = shares.gathers, shares.dtype.itemsize, settings.accumulates or shares.dtype
    # Groups of experts are partitioned over the ranks that have the same ones.
    n = sum(
        -(-(nbytes // itemsize) // (ALIGNED * ranks)) * ALIGNED for ranks, nbytes in gathers.shared.items()
    )

    def locked(nbytes: int) -> int:
        pinned = settings.states_pinned and target.accelerator
        return int(pinned_by_torch(nbytes)) if pinned else nbytes

    all_fp32 = stage == 1 and kept == torch.float32 != shares.dtype and not offloaded
    masters: dict[str, Array | int] = {"master weights": FP32 * n}
    if offloaded:
        buffers = locked(itemsize * n) + locked(gathers.largest)
        masters = {"master weights": locked(FP32 * n), "buckets": buffers}
    ready = {**masters, "gradients": FP32 * (gathers.total // itemsize) if all_fp32 else 0}
    if offloaded:
        ready["gradients"] = locked(FP32 * n)
    full = {**ready, "optimizer state": FP32 * inputs.optimizer.states * n}
    fp32 = 0 if offloaded or all_fp32 else FP32 * n
    flat = kept.itemsize * n if fp32 and kept != torch.float32 else 0
    copies = 0 if offloaded and settings.fused else inputs.scratch(on_host=offloaded)
    filled = min(gathers.total, max(settings.bucket * itemsize, gathers.largest))
    buffer = settings.bucket * itemsize if target.accelerator else filled
    # The bucket holds the gradients themselves; at stage 1 they are counted already.
    buffer += (filled if target.world_size > 1 else 0) - (filled if stage == 1 else 0)
    reducing: Sizes = {
        "gradients": (0 if offloaded else kept.itemsize * n) + (gathers.total if stage == 1 else 0),
        "buckets": buffer,
        "incoming gradient": gathers.largest if filled < gathers.total else 0,
    }
    staging: Sizes = {"buckets": gathers.largest} if offloaded else {}
    peak = functools.partial(inputs.peak, offloaded)
    return [
        peak("initialize", {**masters, "scratch": itemsize * n if all_fp32 else 0}, staging),
        peak("initialize", ready, staging),
        peak("step", ready, staging, {"gradients": gathers.total} if all_fp32 else reducing),
        peak("step", {**ready, "scratch": flat + fp32}, staging),
        peak("step", {**full, "scratch": fp32 + FP32 * n * copies}, staging),
        peak("step", full, staging, {"gathered parameters": gathers.total * target.copies}),
    ]
