"""One rank of a job on several nodes, which are network namespaces (``nodes.py``); prints its end.

python node_rank.py ENGINE SETTINGS, as JSON: ``url``, options of the load, ``seconds``, the time-out, and
``ready``, a folder in which it makes a file when it begins.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerostart

WIDTH, LAYERS = 1024, 14


def network() -> nn.Module:
    """58.8 MB in fp32."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def main(engine: str, settings: dict[str, object]) -> None:
    seconds, url, ready = settings.pop("seconds"), settings.pop("url"), settings.pop("ready", None)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(str(seconds))))
    dist.barrier()
    if ready is not None:
        Path(str(ready), f"ready{dist.get_rank()}").touch()
    begun = time.monotonic()
    told: dict[str, object]
    try:
        model = zerostart.load(url, network, engine=engine, progress=False, **settings)  # type: ignore[arg-type]
        report = zerostart.report(model)
        told = {
            "seconds": time.monotonic() - begun,
            "reading": report.phases["read"],
            "read": report.read_bytes,
            "planned": report.planned_bytes,
            "got": report.exchanged_bytes,
            "text": str(report),
            "digest": zerostart.digest(model),
        }
    except zerostart.ZerostartError as error:
        told = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    print(json.dumps(told), flush=True)
    os._exit(0)  # as a launcher would end it


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
