"""What a rank does on an accelerator that it did not know, here ``npu``. Prints one JSON object."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist


def main() -> None:
    from zerostart.cli.launch import join_group, leave_group
    from zerostart.distributed.world import backend_of, default_device
    from zerostart.errors import ConfigError
    from zerostart.transfer.meter import PeakMeter, allocated_bytes, free_bytes, has_streams, release_cached

    os.environ["LOCAL_RANK"] = "3"
    device = default_device()
    known = dist.Backend.default_device_backend_map.pop("npu")
    try:
        backend_of(device)
        unknown = ""
    except ConfigError as error:
        unknown = str(error)
    dist.Backend.default_device_backend_map["npu"] = known
    join_group()
    with PeakMeter(device) as meter:
        release_cached()
    found = {
        "device": str(device),
        "unknown": unknown,
        "backend": backend_of(device),
        "current": torch.accelerator.current_device_index(),
        "allocated": allocated_bytes(device),
        "peak": meter.device_bytes,
        "free": free_bytes(device),
        "streams": has_streams(device),
    }
    leave_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
