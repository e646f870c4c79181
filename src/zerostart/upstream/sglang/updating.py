"""Derived tensors and the weight version of SGLang after an update."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from zerostart.upstream.guard import Use, demand, find_misfits
from zerostart.upstream.patches import patch

_DERIVED = Use(
    "sglang.srt.model_loader.loader",
    "post_load_weights(model)",
    "what a model derives from weights is none of its parameters: it is made after a fill, and left "
    "out while its loader is followed",
)
_VERSION = Use(
    "sglang.srt.managers.io_struct",
    "UpdateWeightVersionReqInput, "
    "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.update_weight_version(obj)",
    "an engine in this process has no other call that sets its weight version",
)


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless SGLang derives tensors from weights as expected."""
    demand((_DERIVED,), "zerostart.refit cannot fill its parameters; SGLang's own updates can")


@contextmanager
def skip_derived(model: nn.Module) -> Iterator[None]:
    """Let ``load_weights`` fill only parameters, no derived tensors, inside the block."""
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "post_load_weights"):
                stack.enter_context(patch(module, "post_load_weights", lambda *_, **__: None))
        yield


def update_derived(model: nn.Module) -> None:
    """Update the tensors that ``model`` derives from its weights."""
    from sglang.srt.model_loader import loader

    loader.post_load_weights(model)


def set_version(engine: Any, version: str) -> None:
    """Set the weight version of an ``Engine`` in this process."""
    if find_misfits((_VERSION,)):
        return
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
    engine.loop.run_until_complete(engine.tokenizer_manager.update_weight_version(request))
