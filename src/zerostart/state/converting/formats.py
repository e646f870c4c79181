"""The table of formats that a conversion writes."""

from __future__ import annotations

import importlib

from zerostart.errors import ConfigError
from zerostart.state.converting.targets import TargetFormat

#: By the word of ``--to``, where the class is.
_FORMATS = {
    "hf": ("hugging_face", "HuggingFace"),
    "dcp": ("distributed", "Distributed"),
    "zero": ("zero", "Zero"),
    "universal": ("universal", "Universal"),
    "original": ("original", "Original"),
}


def target_format(name: str) -> TargetFormat:
    """The format called ``name``. Raises ConfigError where none is."""
    if name not in _FORMATS:
        raise ConfigError(f"to={name!r} is none of the formats that are written: {', '.join(_FORMATS)}")
    module, kind = _FORMATS[name]
    made: TargetFormat = getattr(importlib.import_module(f"zerostart.state.converting.{module}"), kind)()
    return made
