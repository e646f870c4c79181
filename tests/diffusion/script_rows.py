"""Rows of small models in DiffSynth's table of those that it knows: data, and no change of its code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

__all__ = ["append_rows"]


def append_rows(table: ModuleType) -> None:
    """Append those of ``ZEROSTART_ROWS`` to the module ``diffsynth.configs.model_configs``."""
    table.MODEL_CONFIGS.extend(json.loads(Path(os.environ["ZEROSTART_ROWS"]).read_text()))
