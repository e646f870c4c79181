"""What DeepSpeed's ZeRO stages 1 and 2 take after a load: ``stage_1_and_2.py`` of version 0.19.8.

With N elements of the flat buffers and n = N / ranks of them updated here (of experts, N / their owners), p
bytes each:

- masters, 4 n, converted from the partition. With offload a buffer of p n beside them, and one of the
  largest parameter on the host and on the device, and an fp32 gradient of the partition.
- backward: at stage 1 all gradients until the last micro-batch, then (at stage 2 at once) the bucket, the
  copy of it that is reduced, and the gradients of this rank's partition. ``BF16_Optimizer`` (stage 1 with
  fp32 accumulation, ``bf16_optimizer.py``) has fp32 gradients of all from the start instead.
- ``step``: that partition's gradients flat, in fp32; the states; what the update takes; then an all-gather.
"""

from __future__ import annotations

import torch

from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.engines.forecast import (
    FP32,
    Array,
    MemoryPeak,
    OptimizerCost,
    ParameterBytes,
    Sizes,
    Target,
    pinned_by_torch,
)

#: Elements that a partition is a multiple of (``nccl_start_alignment_factor``).
ALIGNED = 2


def after_load(
    held: ParameterBytes,
    whole: int,
    settings: DeepSpeedSettings,
    optimizer: OptimizerCost,
    target: Target,
    stage: int,
) -> list[MemoryPeak]:
    """The moments of ``initialize`` and of the first step; ``whole``: bytes of the flat buffers."""
    return _Stage12(held, whole, settings, optimizer, target, stage).moments()


class _Stage12:
    """The quantities that the moments are made of."""

    def __init__(
        self,
        held: ParameterBytes,
        whole: int,
        settings: DeepSpeedSettings,
        optimizer: OptimizerCost,
        target: Target,
        stage: int,
    ) -> None:
        self.held, self.whole, self.settings, self.target, self.stage = held, whole, settings, target, stage
        self.itemsize, self.kept = held.dtype.itemsize, settings.accumulates or held.dtype
        self.aside = settings.states_on_host
        self.trained = held.gathers.total // self.itemsize
        # Groups of experts are partitioned over the ranks that have the same ones.
        self.n = sum(
            -(-(nbytes // self.itemsize) // (ALIGNED * ranks)) * ALIGNED
            for ranks, nbytes in held.gathers.shared.items()
        )
        self.part = self.itemsize * self.n
        self.states = FP32 * optimizer.states * self.n
        fused = self.aside and settings.fused
        on_host = self.aside or not target.accelerator
        self.update = FP32 * self.n * (0 if fused else optimizer.scratch(on_host))
        self.separate = self.kept == torch.float32 and held.dtype != torch.float32
        self.all_fp32 = stage == 1 and self.separate and not self.aside

    def moments(self) -> list[MemoryPeak]:
        """In the order in which they come."""
        copied = self.part if self.all_fp32 else 0  # by BF16_Optimizer
        begun = {**self._masters, "gradients": FP32 * self.trained if self.all_fp32 else 0}
        ready = {**begun, **({"gradients": self._at_rest(FP32 * self.n)} if self.aside else {})}
        full = {**ready, "optimizer state": self.states}
        sent = self.held.gathers.total * self.target.copies
        return [
            self._moment("initialize", {**self._masters, "scratch": copied}),
            self._moment("initialize", ready),
            self._moment("step", ready, self._reducing()),
            self._moment("step", {**ready, "scratch": self._flattened + self._fp32}),
            self._moment("step", {**full, "scratch": self._fp32 + self.update}),
            self._moment("step", full, {"gathered parameters": sent}),
        ]

    @property
    def _masters(self) -> dict[str, Array | int]:
        if not self.aside:
            return {"master weights": FP32 * self.n}
        buckets = self._at_rest(self.part) + self._at_rest(self.held.gathers.largest)
        return {"master weights": self._at_rest(FP32 * self.n), "buckets": buckets}

    def _at_rest(self, nbytes: int) -> int:
        """Of a buffer of DeepSpeed's on the host, which torch locks if ``offload_optimizer`` says so."""
        pinned = self.settings.states_pinned and self.target.accelerator
        return int(pinned_by_torch(nbytes)) if pinned else nbytes

    @property
    def _fp32(self) -> int:
        """The partition's gradients in fp32, for the update alone."""
        return 0 if self.aside or self.all_fp32 else FP32 * self.n

    @property
    def _flattened(self) -> int:
        """The same as one tensor of the dtype that they are kept in, on the way to fp32."""
        kept = self.kept.itemsize * self.n
        return 0 if self.aside or self.all_fp32 or self.kept == torch.float32 else kept

    def _reducing(self) -> Sizes:
        """Gradients while the backward reduces them."""
        gathers, each = self.held.gathers, self.itemsize
        if self.all_fp32:
            return {"gradients": gathers.total}
        filled = min(gathers.total, max(self.settings.bucket * each, gathers.largest))
        buffer = self.settings.bucket * each if self.target.accelerator else filled
        own = 0 if self.aside else self.kept.itemsize * self.n
        return {
            "gradients": own + (gathers.total if self.stage == 1 else 0),
            # The bucket has the gradients themselves; at stage 1 they are counted already.
            "buckets": buffer
            - (filled if self.stage == 1 else 0)
            + (filled if self.target.world_size > 1 else 0),
            "incoming gradient": gathers.largest if filled < gathers.total else 0,
        }

    def _moment(self, phase: str, beside: Sizes, on_device: Sizes | None = None) -> MemoryPeak:
        """The flat buffers, what is ``beside`` at the optimizer's home, and what is on the device anyway."""
        device: dict[str, Array | int] = {"parameters": self.whole, "buffers": self.held.buffers}
        if self.aside:
            device["buckets"] = self.held.gathers.largest
        host: dict[str, Array | int] = {}
        for sizes, home in ((beside, host if self.aside else device), (on_device or {}, device)):
            for name, size in sizes.items():
                home[name] = home.get(name, 0) + size
        return MemoryPeak(phase, host, device)
