"""What weights can be pushed to, and how it is told apart: by what registered functions make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from zerostart.checkpoint.strict_json import JsonMapping


@runtime_checkable
class Driver(Protocol):
    """An engine whose workers have to be told when to connect, and when a push begins; used on rank 0."""

    #: How many workers connect.
    workers: int

    def join(self, how: JsonMapping) -> None:
        """Have the workers connect: ``address`` and ``secret`` are for their ``Connection``.

        Called in a thread of its own; returns when they have, and raises what the engine raised.
        """
        ...

    def follow(self, version: int) -> None:
        """Have each worker call ``Connection.follow``; returns when all are through.

        Called in a thread of its own, for each push; raises what the engine raised.
        """
        ...

    def leave(self) -> None:
        """Have the workers close their connections; raises nothing."""
        ...


_drivers: list[Callable[[object], Driver | None]] = []


def register_target(made: Callable[[object], Driver | None]) -> Callable[[object], Driver | None]:
    """Register a function that makes the driver of a target, or None of what it does not know."""
    _drivers.append(made)
    return made


def driver_of(target: object) -> Driver | None:
    """The driver of ``target``; None for what no registered function knows."""
    if isinstance(target, Driver):
        return target
    return next((driver for made in _drivers if (driver := made(target)) is not None), None)
