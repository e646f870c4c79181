"""What DeepSpeed's ZeRO-3 takes after a load: ``runtime/zero/stage3.py`` of version 0.19.8, moment by moment.

With n elements of a rank's share, p bytes each, g bytes of a kept gradient:

- ``_create_fp32_partitions``: 4 n masters, of fp32 partitions too.
- ``initialize_optimizer_states``: with offload an fp32 gradient of each sub-group, which stays; where states
  are swapped one of the largest.
- ``_setup_for_real_optimizer``: g n gradients, and the bucket, which is touched as it fills.
- backward: what is gathered, the gradient at hand, the bucket, and what the reduce-scatter copies of it.
- ``step``: the gradients of a sub-group flat, then in fp32; the states; what the update takes.

What ``offload_optimizer`` has page-locked, gradients, comes in powers of two: it is of torch's allocator.

What the constructor takes besides, a load spares it (``upstream/deepspeed/zero3_start.py``). Where that
cannot be done (``docs/placements.md`` says where) the stock copies come on top, which are not foreseen here.
"""

from __future__ import annotations

import numpy as np
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


def stage3_peaks(
    shares: ParameterBytes, settings: DeepSpeedSettings, optimizer: OptimizerCost, target: Target
) -> list[MemoryPeak]:
    """The moments of ``initialize`` and of the first step."""
    return _Stage3(shares, settings, optimizer, target).moments()


class _Stage3:
    """The quantities that the moments are made of."""

    def __init__(
        self, shares: ParameterBytes, settings: DeepSpeedSettings, optimizer: OptimizerCost, target: Target
    ) -> None:
        self.shares, self.settings, self.target = shares, settings, target
        n, kept = shares.trained, settings.accumulates or shares.dtype
        self.aside = settings.optimizer_home != "none"
        swapped = settings.optimizer_home == "nvme"
        # A sub-group ends with the parameter that fills it.
        self.group: Array = np.minimum(n, settings.sub_group + shares.largest)
        # What is swapped is in memory a sub-group at a time, in so many buffers.
        resident = np.minimum(n, settings.swap_buffers * self.group) if swapped else n
        self.masters: Array = FP32 * resident
        self.pinned = self.settings.states_pinned and target.accelerator and settings.states_on_host
        kept_bytes: Array = kept.itemsize * n
        self.gradients: Array = pinned_by_torch(kept_bytes) if self.pinned else kept_bytes
        self.states: Array = FP32 * optimizer.states * (0 * n if swapped else n)
        fused = self.aside and settings.fused
        self.update: Array = FP32 * self.group * (0 if fused else optimizer.scratch(self._on_host))
        # Gradients of the sub-group at hand as one tensor, as they are kept and in fp32.
        self.flat: Array = self.group * (0 if kept == torch.float32 else kept.itemsize)
        self.fp32: Array = self.group * FP32

    @property
    def _on_host(self) -> bool:
        return self.aside or not self.target.accelerator

    def moments(self) -> list[MemoryPeak]:
        """In the order in which they come."""
        ready = {"master weights": self.masters, "gradients": self._kept}
        full = {**ready, "optimizer state": self.states}
        secondary = self._secondary()
        filled = {**self._buckets(touched=True), **secondary}
        # Secondary partitions are made in the hooks' constructor, which gathers one parameter after another.
        hooked = self._gathered(self.shares.gathers.largest) if secondary else {}
        flattened = {} if self.aside else {"gradients": self._kept + self.fp32}
        unread = self.fp32 if self.settings.optimizer_home == "nvme" else 0
        return [
            self._moment("initialize", {"master weights": self.masters, "scratch": unread}),
            self._moment("initialize", ready, self._buckets(), secondary, hooked),
            self._moment("step", ready, self._gathered(self.shares.gathers.module), self._reducing(filled)),
            self._moment("step", {**ready, **flattened, "scratch": self._flattening}, filled),
            self._moment("step", {**full, **flattened, "scratch": self.update}, filled),
        ]

    @property
    def _stays(self) -> Array:
        """The fp32 gradients of offloaded states, kept from the start."""
        if self.pinned:  # each sub-group's by itself
            groups, rest = np.divmod(self.shares.trained, np.maximum(self.group, 1))
            return groups * pinned_by_torch(FP32 * self.group) + pinned_by_torch(FP32 * rest)
        return FP32 * self.shares.trained if self.settings.states_on_host else 0 * self.shares.trained

    @property
    def _kept(self) -> Array:
        return self.gradients + self._stays

    @property
    def _flattening(self) -> Array:
        return 0 * self.flat if self.aside else self.flat

    def _gathered(self, nbytes: int) -> Sizes:
        return {"gathered parameters": nbytes * (1 + self.target.copies)}

    def _buckets(self, touched: bool = False) -> Sizes:
        gathers, each = self.shares.gathers, self.shares.dtype.itemsize
        if self.target.accelerator:
            return {"buckets": self.settings.bucket * each}
        return {"buckets": min(gathers.total, self.settings.bucket * each) if touched else 0}

    def _secondary(self) -> Sizes:
        """Partitions over a few ranks (ZeRO++), until the end of a step."""
        sharers = min(self.settings.secondary, self.target.world_size)
        return {"secondary partitions": self.shares.gathers.total // sharers} if sharers > 1 else {}

    def _reducing(self, buckets: Sizes) -> Sizes:
        gathers, each = self.shares.gathers, self.shares.dtype.itemsize
        bucketed = min(gathers.total, self.settings.bucket * each)
        # A gradient that is bigger than the bucket is reduced by itself, and not copied together before.
        together = bucketed if gathers.largest <= self.settings.bucket * each else 0
        copied = together + max(bucketed, gathers.largest) * self.target.copies
        incoming = gathers.largest if bucketed < gathers.total else 0
        return {**buckets, "buckets": buckets["buckets"] + copied, "incoming gradient": incoming}

    def _moment(self, phase: str, beside: Sizes, *on_device: Sizes) -> MemoryPeak:
        host: dict[str, Array | int] = {"parameters": self.shares.host}
        device: dict[str, Array | int] = {"parameters": self.shares.device, "buffers": self.shares.buffers}
        home = host if self.aside else device
        for sizes, where in ((beside, home), *((sizes, device) for sizes in on_device)):
            for name, size in sizes.items():
                where[name] = where.get(name, 0) + size
        return MemoryPeak(phase, host, device)


# What DeepSpeed's ZeRO stages 1 and 2 take after a load: ``stage_1_and_2.py`` of version 0.19.8.
# With N elements of the flat buffers and n = N / ranks of them updated here (of experts, N / their owners), p
# bytes each:
#
# - masters, 4 n, converted from the partition. With offload a buffer of p n beside them, and one of the
#   largest parameter on the host and on the device, and an fp32 gradient of the partition.
# - backward: at stage 1 all gradients until the last micro-batch, then (at stage 2 at once) the bucket, the
#   copy of it that is reduced, and the gradients of this rank's partition. ``BF16_Optimizer`` (stage 1 with
#   fp32 accumulation, ``bf16_optimizer.py``) has fp32 gradients of all from the start instead.
# - ``step``: that partition's gradients flat, in fp32; the states; what the update takes; then an all-gather.

#: Elements that a partition is a multiple of (``nccl_start_alignment_factor``).
ALIGNED = 2


def flat_peaks(
    shares: ParameterBytes,
    whole: int,
    settings: DeepSpeedSettings,
    optimizer: OptimizerCost,
    target: Target,
    stage: int,
) -> list[MemoryPeak]:
    """The moments of ``initialize`` and of the first step; ``whole``: bytes of the flat buffers."""
    return _Stage12(shares, whole, settings, optimizer, target, stage).moments()


class _Stage12:
    """The quantities that the moments are made of."""

    def __init__(
        self,
        shares: ParameterBytes,
        whole: int,
        settings: DeepSpeedSettings,
        optimizer: OptimizerCost,
        target: Target,
        stage: int,
    ) -> None:
        self.shares, self.whole, self.settings, self.target, self.stage = (
            shares,
            whole,
            settings,
            target,
            stage,
        )
        self.itemsize, self.kept = shares.dtype.itemsize, settings.accumulates or shares.dtype
        self.aside = settings.states_on_host
        self.trained = shares.gathers.total // self.itemsize
        # Groups of experts are partitioned over the ranks that have the same ones.
        self.n = sum(
            -(-(nbytes // self.itemsize) // (ALIGNED * ranks)) * ALIGNED
            for ranks, nbytes in shares.gathers.shared.items()
        )
        self.part = self.itemsize * self.n
        self.states = FP32 * optimizer.states * self.n
        fused = self.aside and settings.fused
        on_host = self.aside or not target.accelerator
        self.update = FP32 * self.n * (0 if fused else optimizer.scratch(on_host))
        self.separate = self.kept == torch.float32 and shares.dtype != torch.float32
        self.all_fp32 = stage == 1 and self.separate and not self.aside

    def moments(self) -> list[MemoryPeak]:
        """In the order in which they come."""
        copied = self.part if self.all_fp32 else 0  # by BF16_Optimizer
        begun = {**self._masters, "gradients": FP32 * self.trained if self.all_fp32 else 0}
        ready = {**begun, **({"gradients": self._at_rest(FP32 * self.n)} if self.aside else {})}
        full = {**ready, "optimizer state": self.states}
        sent = self.shares.gathers.total * self.target.copies
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
        buckets = self._at_rest(self.part) + self._at_rest(self.shares.gathers.largest)
        return {"master weights": self._at_rest(FP32 * self.n), "buckets": buckets}

    def _at_rest(self, nbytes: int) -> int:
        pinned = self.settings.states_pinned and self.target.accelerator
        return int(pinned_by_torch(nbytes)) if pinned else nbytes

    @property
    def _fp32(self) -> int:
        return 0 if self.aside or self.all_fp32 else FP32 * self.n

    @property
    def _flattened(self) -> int:
        kept = self.kept.itemsize * self.n
        return 0 if self.aside or self.all_fp32 or self.kept == torch.float32 else kept

    def _reducing(self) -> Sizes:
        """Gradients while the backward reduces them."""
        gathers, each = self.shares.gathers, self.itemsize
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
        device: dict[str, Array | int] = {"parameters": self.whole, "buffers": self.shares.buffers}
        if self.aside:
            device["buckets"] = self.shares.gathers.largest
        host: dict[str, Array | int] = {}
        for sizes, home in ((beside, host if self.aside else device), (on_device or {}, device)):
            for name, size in sizes.items():
                home[name] = home.get(name, 0) + size
        return MemoryPeak(phase, host, device)
