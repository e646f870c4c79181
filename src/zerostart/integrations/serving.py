"""The later ``save_pretrained`` of every model that is loaded, by whichever entrance.

Its libraries would write what a rank has: of a model that ZeRO-3 shards, tensors without elements, and say
nothing. Imports nothing that is heavy: what saves is imported when something is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerostart.upstream.saving_calls import Replacement, SavingCalls

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SAVE_PRETRAINED", "serve_saving"]


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
