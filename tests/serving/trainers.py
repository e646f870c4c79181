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


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with adapters of its attention that are none, the same on every rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    targets = ["q_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=3, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    found: torch.nn.Module = get_peft_model(model, config)
    return found


def push_changed(path: Path, out: Path, address: str, workers: int, options: dict[str, Any]) -> str:
    """Two pushes, of the weights as they were and after a change; what the second has is saved to ``out``.

    With ``lora`` among the ``options`` adapters alone change, and are merged on the way.
    """
    options = dict(options)
    lora = options.pop("lora", False)
    model = zerostart.load(path, progress=False, **options)
    if lora:
        model = adapted(model)
    with zerostart.refit(model, address, workers=workers, timeout=120) as refitter:
        refitter.push()
        for tensor in [p.data for p in model.parameters() if p.requires_grad] if lora else shards(model):
            tensor.mul_(-0.75)
        zerostart.save(model, out, merge_adapters=lora)
        report = refitter.push()
        assert report.moved_bytes == report.owned_bytes
        assert report.peak_host_bytes < 256 << 20
        return str(report)
