"""Objects that DeepSpeed pickles into its checkpoints, and the script that it leaves beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zerostart.upstream.guard import Use, need

_SCALER = Use(
    "deepspeed.runtime.fp16.loss_scaler",
    "LossScaler, DynamicLossScaler",
    "a ZeRO checkpoint has the loss scaler as an object",
)
_STAGE = Use(
    "deepspeed.runtime.zero.config",
    "ZeroStageEnum",
    "a ZeRO checkpoint has its stage as an object",
)
_SLICE = Use(
    "deepspeed.utils.tensor_fragment",
    "fragment_address",
    "a ZeRO checkpoint says where parameters lie in a rank's buffer, for ds_to_universal.py",
)
_SCRIPT = Use(
    "deepspeed.utils.zero_to_fp32",
    "get_fp32_state_dict_from_zero_checkpoint",
    "a ZeRO checkpoint has the script beside it",
)
TOUCHED = (_SCALER, _STAGE, _SLICE, _SCRIPT)


def scaling(dtype: torch.dtype, scale: float | None) -> dict[str, Any]:
    """What optimizer states of stage 3 have of the loss scale; other stages keep that of the engine.

    That of bf16 and fp32 is 1. That of fp16 is dynamic, with DeepSpeed's defaults where ``scale`` is None.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    need(_SCALER)
    fp16 = dtype == torch.float16
    # A window of 1000 steps, a scale of 1 at least, a hysteresis of 2: the defaults of its configuration.
    scaler = DynamicLossScaler(scale or 2.0**16, 1000, 1, 2, False) if fp16 else LossScaler(scale=1.0)
    return {"loss_scaler": scaler, "dynamic_loss_scale": fp16, "overflow": False}


def stage_of(number: int) -> Any:
    """The stage, as it is pickled."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    need(_STAGE)
    return ZeroStageEnum(number)


def slice_of(start: int, numel: int) -> Any:
    """Where the elements of a parameter lie in a rank's buffer, as it is pickled."""
    from deepspeed.utils.tensor_fragment import fragment_address

    need(_SLICE)
    return fragment_address(start=start, numel=numel)


def version() -> str:
    """That of the installed DeepSpeed."""
    import deepspeed

    return str(deepspeed.__version__)


def recovery_script() -> bytes:
    """``zero_to_fp32.py``, which makes an fp32 state dict of a ZeRO checkpoint."""
    from deepspeed.utils import zero_to_fp32

    need(_SCRIPT)
    return Path(zero_to_fp32.__file__).read_bytes()
