"""One rank of a job on two hosts, which are network namespaces (`test_two_hosts.py`); prints its end.

    python two_hosts.py WHAT FOLDER SECONDS

WHAT is what is done, FOLDER what the hosts share, SECONDS the time-out of the process group.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerostart

what, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])


def load() -> nn.Module:
    return zerostart.load(folder / "checkpoint", lambda: nn.Linear(64, 64), engine="fsdp2", progress=False)


def whole() -> object:
    """Load, save, and a training state; what all of it is."""
    model = load()
    optimizer = torch.optim.AdamW(model.parameters())
    zerostart.save(model, folder / "saved")
    zerostart.save_state(folder / "state", model, optimizer)
    zerostart.load_state(folder / "state", model, optimizer)
    return zerostart.digest(model)


def cut() -> object:
    """Save when the cable is cut."""
    model = load()
    dist.barrier()
    (folder / f"ready{dist.get_rank()}").touch()
    while not (folder / "cut").exists():
        time.sleep(0.05)
    return zerostart.save(model, folder / "saved")


def main(jobs: dict[str, Callable[[], object]]) -> None:
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", timeout=limit)
    begun = time.monotonic()
    try:
        told = {"value": repr(jobs[what]())}
    except zerostart.ZerostartError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps({**told, "seconds": time.monotonic() - begun}), flush=True)
    os._exit(0)  # as a launcher would end it


if __name__ == "__main__":
    torch.set_num_threads(1)
    main({"whole": whole, "cut": cut, "differ": load})
