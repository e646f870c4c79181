"""On trainer ranks: a model in shards, changed, saved, and pushed."""

from pathlib import Path
from typing import Any

import torch

import zerostart


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """What this rank has of each parameter, to be written."""
    found = []
    for parameter in model.parameters():
        held = getattr(parameter, "ds_tensor", None)
        data = parameter.data if held is None else held.data
        found.append(getattr(data, "_local_tensor", data))
    return found


def push_changed(path: Path, out: Path, address: str, workers: int, options: dict[str, Any]) -> str:
    """Two pushes, of the weights as they were and after a change; what the second has is saved to ``out``."""
    model = zerostart.load(path, progress=False, **options)
    with zerostart.refit(model, address, workers=workers, timeout=120) as refitter:
        refitter.push()
        for tensor in shards(model):
            tensor.mul_(-0.75)
        zerostart.save(model, out)
        report = refitter.push()
        assert report.moved_bytes == report.owned_bytes
        assert report.peak_host_bytes < 256 << 20
        return str(report)
