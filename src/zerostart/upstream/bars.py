"""The progress bars of transformers and diffusers, which have no place in a log."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def without_bars(library: Literal["transformers", "diffusers"]) -> Iterator[None]:
    """Inside, ``library`` shows no bars for what it loads."""
    logging = importlib.import_module(f"{library}.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
