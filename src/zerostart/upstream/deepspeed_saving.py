"""Private parts of DeepSpeed: the state dict that Trainer and accelerate save, where experts are shared out.

Used: ``DeepSpeedEngine._zero3_consolidated_16bit_state_dict``, which gathers over the group of each parameter
and keeps rank 0's: of experts that several ranks share it would keep a part, and save it as if it were all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from zerostart.errors import UnsupportedVersionError

__all__ = ["replace_consolidation"]

_METHOD = "_zero3_consolidated_16bit_state_dict"

#: The whole state dict of a model (True: without frozen parameters) on rank 0 and None elsewhere, or
#: NotImplemented for a model that DeepSpeed gathers by itself.
Whole = Callable[[torch.nn.Module, bool], Any]


@functools.cache
def replace_consolidation(whole: Whole) -> None:
    """Ask ``whole`` first, from now on; for other models everything is as before."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = getattr(DeepSpeedEngine, _METHOD, None)
    if original is None:
        raise UnsupportedVersionError(
            f"DeepSpeedEngine has no {_METHOD}; zerostart knows DeepSpeed 0.19. "
            "Experts that several ranks share would be saved in part"
        )

    @functools.wraps(original)
    def consolidated(engine: Any, exclude_frozen_parameters: bool = False) -> Any:
        found = whole(engine.module, exclude_frozen_parameters)
        return original(engine, exclude_frozen_parameters) if found is NotImplemented else found

    setattr(DeepSpeedEngine, _METHOD, consolidated)
