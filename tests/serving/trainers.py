"""Trainer ranks that change, save and push a model."""

from pathlib import Path
from typing import Any

import torch

import zerostart


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return this rank's shards of all parameters."""
    tensors = []
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        data = parameter.data if shard is None else shard.data
        tensors.append(getattr(data, "_local_tensor", data))
    return tensors


def adapted(model: torch.nn.Module, experts: bool = False) -> torch.nn.Module:
    """Add equal LoRA adapters on every rank, with ``experts`` to experts as well."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    config = LoraConfig(
        r=3,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"] if experts else None,
        init_lora_weights=False,
    )
    peft_model: torch.nn.Module = get_peft_model(model, config)
    return peft_model


def push_changed(path: Path, out: Path, address: str, workers: int, options: dict[str, Any]) -> str:
    """Push, change the weights, save them to ``out``, and push again.

    With ``lora`` in ``options``, only adapters change, and they are merged. ``lora="experts"`` adds some to
    experts as well.
    """
    options = dict(options)
    lora = options.pop("lora", False)
    model = zerostart.load(path, progress=False, **options)
    if lora:
        model = adapted(model, lora == "experts")
    with zerostart.refit(model, address, workers=workers, timeout=120) as refitter:
        refitter.push()
        for tensor in [p.data for p in model.parameters() if p.requires_grad] if lora else shards(model):
            tensor.mul_(-0.75)
        zerostart.save(model, out, merge_adapters=bool(lora))
        report = refitter.push()
        assert report.moved_bytes == report.owned_bytes
        assert report.peak_host_bytes < 256 << 20
        return str(report)


def save_adapters(path: Path, out: Path, options: dict[str, Any]) -> None:
    """Save adapters of attention and experts to ``out``, in both formats."""
    model = adapted(zerostart.load(path, progress=False, **options), experts=True)
    zerostart.save(model, out / "adapter", adapters_only=True)
    zerostart.save(model, out / "served", adapters_only=True, per_expert=True)
