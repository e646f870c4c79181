"""The settings of a DeepSpeed configuration that decide what its engine allocates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ZeroCosts"]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
#: Buffers for swapped optimizer states, each of the largest sub-group (``offload_optimizer.buffer_count``).
SWAP_BUFFERS = 4


@dataclass(frozen=True)
class ZeroCosts:
    """Of ``zero_optimization`` and ``data_types``, with DeepSpeed's defaults (runtime/zero/config.py).

    ``bucket``: elements of the reduction bucket. ``sub_group``: elements updated at a time (stage 3).
    ``optimizer_home``: ``none``, ``cpu`` or ``nvme``. ``fused``: the update runs in DeepSpeedCPUAdam, which
    DeepSpeed insists on for offloaded states unless ``zero_force_ds_cpu_optimizer`` is false.
    ``accumulates``: dtype in which gradients are kept, None for the model's own. ``secondary``: ranks that
    share a secondary partition, 1 for none.
    """

    bucket: int = 500_000_000
    sub_group: int = 1_000_000_000
    optimizer_home: str = "none"
    fused: bool = True
    swap_buffers: int = SWAP_BUFFERS
    accumulates: torch.dtype | None = None
    secondary: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> ZeroCosts:
        """Read a configuration that is known to be sound; "auto" is the default."""
        known = config or {}
        zero: Mapping[str, Any] = known.get("zero_optimization") or {}
        section = zero.get("offload_optimizer")
        home = "cpu" if zero.get("cpu_offload") is True else "none"
        buffers = SWAP_BUFFERS
        if isinstance(section, Mapping):
            home = str(getattr(section.get("device"), "value", section.get("device")) or "none")
            buffers = _number(section, "buffer_count", SWAP_BUFFERS)
        types = known.get("data_types")
        kept = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
        return cls(
            bucket=_number(zero, "reduce_bucket_size", cls.bucket),
            sub_group=_number(zero, "sub_group_size", cls.sub_group),
            optimizer_home=home,
            fused=known.get("zero_force_ds_cpu_optimizer") is not False,
            swap_buffers=buffers,
            accumulates=_DTYPES.get(str(kept)),
            secondary=_number(zero, "zero_hpz_partition_size", 1),
        )

    @property
    def offloaded(self) -> bool:
        """Whether the states are in host memory."""
        return self.optimizer_home == "cpu"


def _number(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key)
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default
