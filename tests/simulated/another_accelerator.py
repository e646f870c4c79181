"""A process whose accelerator is torch's backend for others, here ``npu``: what a rank does with it.

It computes nothing. ``hccl`` is gloo by another name. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration as parts


class Module(parts._DummyBackendModule):
    def device_count(self) -> int:
        return 2


class Guard(parts._DummyDeviceGuard):
    index = 0

    def set_device(self, device: torch.device) -> None:
        Guard.index = device.index or 0

    def exchange_device(self, device: torch.device) -> torch.device:
        before, Guard.index = Guard.index, device.index or 0
        return torch.device("npu", before)


def hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def main() -> None:
    parts._setup_privateuseone_for_python_backend("npu", Module(), None, Guard())
    chosen: list[int] = []
    torch.accelerator.set_device_index = lambda device: chosen.append(torch.device(device).index)
    from zerostart.cli.worker import join_group, leave_group
    from zerostart.distributed.world import backend_of, default_device
    from zerostart.errors import ConfigError
    from zerostart.training.progress import peak_memory_bytes
    from zerostart.transfer.memory import PeakMeter, allocated_bytes, free_bytes, has_streams, release_cached

    os.environ["LOCAL_RANK"] = "3"
    device = default_device()
    try:
        backend_of(device)
        unknown = ""
    except ConfigError as error:
        unknown = str(error)
    dist.Backend.register_backend("hccl", hccl, devices=["npu"])
    join_group()
    with PeakMeter(device) as meter:
        release_cached()
    found = {
        "device": str(device),
        "unknown": unknown,
        "backend": backend_of(device),
        "chosen": chosen,
        "allocated": allocated_bytes(device),
        "peak": meter.device_bytes,
        "held": peak_memory_bytes(device),
        "free": free_bytes(device),
        "streams": has_streams(device),
    }
    leave_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
