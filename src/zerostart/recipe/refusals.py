"""Errors of a conversion that a conversion's own ``except`` cannot hide.

A converter may try something that is refused here and go on with something else, where eager torch would have
had no error: what it then makes is not what it makes of real tensors. So a refusal is noted, and raised again
when the conversion is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from zerostart.errors import ConversionError

__all__ = ["refusal", "refusals_count"]

_NOTED: ContextVar[list[ConversionError] | None] = ContextVar("refusals", default=None)


def refusal(message: str) -> ConversionError:
    """The error to raise for something that eager torch would do; noted inside ``refusals_count``."""
    error = ConversionError(message)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(error)
    return error


@contextlib.contextmanager
def refusals_count() -> Iterator[None]:
    """Inside, a refusal that is caught by what was refused is raised again at the end."""
    noted: list[ConversionError] = []
    token = _NOTED.set(noted)
    try:
        yield
    finally:
        _NOTED.reset(token)
    if noted:
        raise noted[0]
