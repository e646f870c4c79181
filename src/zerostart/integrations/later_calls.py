"""Serve ``save_pretrained``, adapters and resizing of every loaded model.

The libraries would save only a rank's shards, without an error: at ZeRO-3, tensors without elements. The
modules that save and resize are imported on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zerostart.live.model import get_record
from zerostart.upstream.diffusers.loading import LoraShapes
from zerostart.upstream.peft.adapters import AdapterCalls
from zerostart.upstream.saving_calls import Replacement, SavingCalls

if TYPE_CHECKING:
    from torch import nn


def _call_saving(name: str) -> Replacement:
    """Return a call of the named function of ``integrations.saving``."""

    def call_it(original: Callable[[], object], **call: object) -> object:
        from zerostart.integrations import saving

        return getattr(saving, name)(original, **call)

    return call_it


SAVE_PRETRAINED = {
    "PreTrainedModel.save_pretrained": _call_saving("save_pretrained"),
    "ModelMixin.save_pretrained": _call_saving("save_pretrained"),
    "DiffusionPipeline.save_pretrained": _call_saving("save_pipeline"),
    "PeftModel.save_pretrained": _call_saving("save_adapters"),
    "PreTrainedModel.push_to_hub": _call_saving("push_to_hub"),
    "ModelMixin.push_to_hub": _call_saving("push_to_hub"),
    "DiffusionPipeline.push_to_hub": _call_saving("push_to_hub"),
    "PeftModel.push_to_hub": _call_saving("push_to_hub"),
}
_pretrained = SavingCalls(SAVE_PRETRAINED)


def _call_peft(name: str) -> Any:
    """Return a call of the named function of ``integrations.peft`` or ``expert_adapters``."""

    def call_it(*args: object, **kwargs: object) -> object:
        from zerostart.integrations import expert_adapters, peft

        return getattr(expert_adapters if hasattr(expert_adapters, name) else peft, name)(*args, **kwargs)

    return call_it


_CALLS = (
    "inject_adapter",
    "add_prompt_encoder",
    "merge_adapter",
    "unmerge_adapter",
    "read_adapter_state",
    "add_factors",
    "activate_factors",
    "cast_adapters",
)
_adapter_calls = AdapterCalls(*map(_call_peft, _CALLS))
_lora_shapes = LoraShapes(_call_peft("show_whole_shapes"))


def serve(model: nn.Module) -> None:
    """Serve all later calls of a ``model`` of ``zerostart.load``.

    Raises UpstreamError as ``serve_saving``.
    """
    serve_saving(model)
    serve_resizing(model)


def serve_saving(model: nn.Module) -> None:
    """Let ``save_pretrained`` of a loaded ``model`` save its shards while it lives.

    Raises UpstreamError for an unknown version of a library's call.
    """
    _pretrained.hold(model)
    serve_adapters(model)


def serve_adapters(model: nn.Module) -> None:
    """Let PEFT and diffusers add adapters to a loaded ``model`` while it lives.

    Raises UpstreamError as ``serve_saving``.
    """
    _adapter_calls.hold(model)
    _lora_shapes.hold(model)


def serve_resizing(model: nn.Module) -> None:
    """Let ``resize_token_embeddings`` of a loaded ``model``, or of its parts, resize the shards."""
    if get_record(model).engine.replicates_parameters:
        return
    for part in model.modules():
        if hasattr(part, "resize_token_embeddings"):
            from zerostart.upstream.transformers.loading import resize_by

            resize_by(part, functools.partial(_resize, model, part))


def _resize(*args: Any, **kwargs: Any) -> object:
    from zerostart.integrations.transformers.resizing import resize_token_embeddings

    return resize_token_embeddings(*args, **kwargs)
