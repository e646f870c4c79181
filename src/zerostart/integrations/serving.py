"""Later calls of every model that is loaded, by whichever entrance: ``save_pretrained`` and resizing.

Its libraries would write what a rank has: of a model that ZeRO-3 shards, tensors without elements, and say
nothing. Imports nothing that is heavy: what saves or resizes is imported when something is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerostart.loading.record import record_of
from zerostart.upstream.saving_calls import Replacement, SavingCalls

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SAVE_PRETRAINED", "serve_resizing", "serve_saving"]


def _by(name: str) -> Replacement:
    """``integrations.saving``'s function of that name."""

    def call_it(original: Any, **call: Any) -> Any:
        from zerostart.integrations import saving

        return getattr(saving, name)(original, **call)

    return call_it


SAVE_PRETRAINED = {
    "PreTrainedModel.save_pretrained": _by("save_pretrained"),
    "ModelMixin.save_pretrained": _by("save_pretrained"),
    "DiffusionPipeline.save_pretrained": _by("save_pipeline"),
    "PeftModel.save_pretrained": _by("save_adapters"),
}
_pretrained = SavingCalls(SAVE_PRETRAINED)


def serve_saving(model: nn.Module) -> None:
    """Have ``save_pretrained`` of a loaded ``model`` save its shards, as long as it lives.

    Raises UpstreamError for a version of a library whose call is not known.
    """
    _pretrained.hold(model)


def serve_resizing(model: nn.Module) -> None:
    """Have ``resize_token_embeddings`` of a loaded ``model``, if it has that, resize its shards."""
    if not record_of(model).engine.whole and hasattr(model, "resize_token_embeddings"):
        from zerostart.upstream.transformers_loading import resize_by

        resize_by(model, functools.partial(_resize, model))


def _resize(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    from zerostart.integrations.resizing import resize_token_embeddings

    return resize_token_embeddings(model, *args, **kwargs)
