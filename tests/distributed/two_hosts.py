"""Run one rank of a job on two hosts (network namespaces, see `test_two_hosts.py`).

    python two_hosts.py JOB FOLDER SECONDS

FOLDER is shared by the hosts, SECONDS is the process group's timeout. Prints the result or error as JSON.
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

job, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])


def load() -> nn.Module:
    return zerostart.load(folder / "checkpoint", lambda: nn.Linear(64, 64), engine="fsdp2", progress=False)


def save_and_resume() -> object:
    """Load, save, and save and load a training state; return the model's digest."""
    model = load()
    optimizer = torch.optim.AdamW(model.parameters())
    zerostart.save(model, folder / "saved")
    zerostart.save_state(folder / "state", model, optimizer)
    zerostart.load_state(folder / "state", model, optimizer)
    return zerostart.digest(model)


def save_after_cut() -> object:
    """Save after the test has cut the cable."""
    model = load()
    dist.barrier()
    (folder / f"ready{dist.get_rank()}").touch()
    while not (folder / "cut").exists():
        time.sleep(0.05)
    return zerostart.save(model, folder / "saved")


def main(jobs: dict[str, Callable[[], object]]) -> None:
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", timeout=limit)
    start = time.monotonic()
    try:
        result = {"value": repr(jobs[job]())}
    except zerostart.ZerostartError as error:
        result = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps({**result, "seconds": time.monotonic() - start}), flush=True)
    os._exit(0)  # as a launcher would end it


if __name__ == "__main__":
    torch.set_num_threads(1)
    main({"whole": save_and_resume, "cut": save_after_cut})
