"""Private parts of transformers: its models initialise themselves when they are built, also on meta."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from zerostart.upstream.patches import replaced
from zerostart.upstream.registry import Lasts, PatchPoint, Use, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.transformers.models import without_zero_init
from zerostart.upstream.versions import TRANSFORMERS

_DEVICE = PatchPoint(
    library=TRANSFORMERS,
    owner="transformers.modeling_utils",
    names=("get_torch_context_manager_or_global_device",),
    why="a model that is built on meta initialises its weights as one on the CPU does, for the log of calls",
    lasts=Lasts.LOAD,
    shapes=(
        Shape(
            "transformers.modeling_utils:PreTrainedModel.init_weights",
            has=("get_torch_context_manager_or_global_device()", "self.initialize_weights()"),
        ),
    ),
)
TOUCHED = (
    _DEVICE,
    Use(
        library=TRANSFORMERS,
        owner="transformers.initialization",
        names=("meta_device_safe_creation_ops",),
        why="the library's own context for a model that is built on meta",
    ),
)


def is_configuration(value: object) -> bool:
    """Whether ``value`` is a transformers configuration, without importing transformers to find out."""
    return any(
        base.__module__ == "transformers.configuration_utils" and base.__name__ == "PreTrainedConfig"
        for base in type(value).__mro__
    )


@contextlib.contextmanager
def initialising(dtype: torch.dtype) -> Iterator[None]:
    """Inside, models are built on the meta device in ``dtype``, initialised and tied as on the CPU.

    Raises UnsupportedVersionError.
    """
    demand(TOUCHED)
    from transformers import initialization, modeling_utils

    module: Any = modeling_utils
    (name,) = _DEVICE.names
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with (
            replaced(_DEVICE, module, name, lambda: None),
            without_zero_init(),
            torch.device("meta"),
            initialization.meta_device_safe_creation_ops(),
        ):
            yield
    finally:
        torch.set_default_dtype(before)
