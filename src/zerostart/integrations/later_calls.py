"""Later calls of every model that is loaded, by whichever entrance: ``save_pretrained`` and resizing.

Its libraries would write what a rank has: of a model that ZeRO-3 shards, tensors without elements, and say
nothing. Imports nothing that is heavy: what saves or resizes is imported when something is.
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


def _by(name: str) -> Replacement:
    """``integrations.saving``'s function of that name."""

    def call_it(original: Callable[[], object], **call: object) -> object:
        from zerostart.integrations import saving

        return getattr(saving, name)(original, **call)

    return call_it


SAVE_PRETRAINED = {
    "PreTrainedModel.save_pretrained": _by("save_pretrained"),
    "ModelMixin.save_pretrained": _by("save_pretrained"),
    "DiffusionPipeline.save_pretrained": _by("save_pipeline"),
    "PeftModel.save_pretrained": _by("save_adapters"),
    "PreTrainedModel.push_to_hub": _by("push_to_hub"),
    "ModelMixin.push_to_hub": _by("push_to_hub"),
    "DiffusionPipeline.push_to_hub": _by("push_to_hub"),
    "PeftModel.push_to_hub": _by("push_to_hub"),
}
_pretrained = SavingCalls(SAVE_PRETRAINED)


def _adapters(name: str) -> Any:
    """``integrations.peft``'s function of that name."""

    def call_it(*args: object, **kwargs: object) -> object:
        from zerostart.integrations import peft

        return getattr(peft, name)(*args, **kwargs)

    return call_it


_added = AdapterCalls(*map(_adapters, ("injected", "surrounded", "merged", "disabled", "read")))
_shapes = LoraShapes(_adapters("shown"))


def serve(model: nn.Module) -> None:
    """All that is here, for a ``model`` of ``zerostart.load``; raises UpstreamError as ``serve_saving``."""
    serve_saving(model)
    serve_resizing(model)


def serve_saving(model: nn.Module) -> None:
    """Have ``save_pretrained`` of a loaded ``model`` save its shards, as long as it lives.

    Raises UpstreamError for a version of a library whose call is not known.
    """
    _pretrained.hold(model)
    serve_adapters(model)


def serve_adapters(model: nn.Module) -> None:
    """Have PEFT and diffusers put adapters into a loaded ``model`` in shards, as long as it lives.

    Raises UpstreamError as ``serve_saving``.
    """
    _added.hold(model)
    _shapes.hold(model)


def serve_resizing(model: nn.Module) -> None:
    """Have ``resize_token_embeddings`` of a loaded ``model``, or of a model in it, resize its shards."""
    if get_record(model).engine.replicates_parameters:
        return
    for part in model.modules():
        if hasattr(part, "resize_token_embeddings"):
            from zerostart.upstream.transformers.loading import resize_by

            resize_by(part, functools.partial(_resize, model, part))


def _resize(*args: Any, **kwargs: Any) -> object:
    from zerostart.integrations.transformers.resizing import resize_token_embeddings

    return resize_token_embeddings(*args, **kwargs)
