"""The end of a run: a model directory that plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zerostart.state.saving import SaveReport, SaveRequest, save

__all__ = ["export_model"]


def export_model(model: nn.Module, tokenizer: Any, directory: Path, max_shard_size: str) -> SaveReport:
    """Save ``model``, as loaded or as trained, with its settings and ``tokenizer``; see ``zerostart.save``.

    Collective. What an earlier run has saved in ``directory`` is replaced once the new is whole.
    """
    return save(model, directory, SaveRequest(max_shard_size, beside=tokenizer.save_pretrained))
