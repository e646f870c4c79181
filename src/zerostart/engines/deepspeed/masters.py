"""What the ZeRO-3 optimizer has to know of parameters: where dtypes mix, and who reads their masters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from zerostart.engines.deepspeed.partitions import arrange
from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.errors import EngineError
from zerostart.upstream.deepspeed.zero3.optimizer import Reader, mark, require_stage3


def mixed_dtypes(parameters: Mapping[str, nn.Parameter]) -> dict[torch.dtype, str]:
    """The dtypes of the trainable parameters, each with the first name that has it."""
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    return dtypes


def check_mixture(parameters: Mapping[str, nn.Parameter], settings: DeepSpeedSettings) -> None:
    """Raise EngineError where a setting of DeepSpeed handles trainable parameters of one dtype only."""
    dtypes = mixed_dtypes(parameters)
    if len(dtypes) < 2:
        return
    require_stage3()
    for setting in settings.one_dtype:
        found = ", ".join(f"{name} is {str(d).removeprefix('torch.')}" for d, name in dtypes.items())
        raise EngineError(
            f"DeepSpeed's {setting} handles parameters of one dtype, and this model mixes them: {found}. "
            f"Leave {setting} out of engine_config['zero_optimization'], or use engine='fsdp2'"
        )


def mark_parameters(model: nn.Module, rounded: Collection[str], reader: Reader | None) -> None:
    """Mark all parameters, those named ``rounded`` with what reads their masters."""
    load = object()
    for name, parameter in model.named_parameters():
        mark(parameter, name, reader if name in rounded else None, arrange, load)
