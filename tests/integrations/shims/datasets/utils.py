"""``datasets.utils.logging``, which is quiet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["logging"]


def _nothing(*_: Any) -> None:
    """There is nothing to log."""


logging = SimpleNamespace(
    set_verbosity=_nothing,
    set_verbosity_error=_nothing,
    set_verbosity_warning=_nothing,
    enable_default_handler=_nothing,
    enable_explicit_format=_nothing,
)
