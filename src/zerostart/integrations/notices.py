"""Telling whoever listens which loads of a script were taken over, and which were left to the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """One model of a script: the name of its class, and ``how`` it was taken over, None where it was not."""

    model: str
    how: str | None


_listeners: list[Callable[[Notice], None]] = []


def listen(listener: Callable[[Notice], None]) -> Callable[[], None]:
    """Have ``listener`` called from now on; returns what ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def tell(notice: Notice) -> None:
    """Tell everybody who listens."""
    for listener in list(_listeners):
        listener(notice)
