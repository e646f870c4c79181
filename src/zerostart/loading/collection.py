"""Garbage collection put aside, where it costs more than the work that it interrupts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage collection.

    Planning, and importing torch and transformers, make many objects and no cycles; a full collection amid
    them costs more than the plan.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
