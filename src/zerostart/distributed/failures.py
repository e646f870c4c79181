"""Failures of one rank that others wait for: errors that travel to them, and signals that are put off.

An error is raised on the other ranks with the same type and text. A signal that arrives while ranks exchange
a message is handled after it, for half a message hangs all.
"""

from __future__ import annotations

import itertools
import pickle
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from zerostart import errors
from zerostart.errors import PeerError, ZerostartError

_AGREED = "_zerostart_agreed"
_moments = itertools.count()


def report_of(failure: BaseException) -> bytes:
    """What tells ``failure`` to another process: itself if it is ours and can be pickled, else its text.

    An interrupt of this rank (KeyboardInterrupt, SystemExit) is a PeerError to the others.
    """
    text = _text(failure)
    if isinstance(failure, ZerostartError):
        made = failure
    elif isinstance(failure, Exception):
        made = ZerostartError(f"{type(failure).__name__}: {text}")
    else:
        name = type(failure).__name__ + (f": {text}" if text else "")
        made = PeerError(f"stopped by {name}; the operation in progress is incomplete: start all ranks again")
    try:
        # Tried in both directions: what can be pickled need not come back (an __init__ with other arguments).
        data = pickle.dumps(made)
        pickle.loads(data)
    except Exception:  # of a class of somebody else's, with arguments that do not travel
        ours = (kind for kind in type(made).__mro__ if kind.__module__ == errors.__name__)
        data = pickle.dumps(next(ours, ZerostartError)(text))
    return data


def restored(report: bytes, rank: int | None) -> ZerostartError:
    """The error of a report; its text names ``rank`` unless that is None."""
    error: ZerostartError = pickle.loads(report)
    if rank is not None:
        # In `args`, and not by a new error: the class and what else it carries stay as they were.
        error.args = (f"rank {rank}: {error}", *error.args[1:])
    return error


def now() -> int:
    """A moment of this process, for ``agreed_since``."""
    return next(_moments)


def mark_agreed(error: BaseException) -> None:
    """Note that every rank raises ``error``, or that no more can be told to the others."""
    error.__dict__[_AGREED] = now()


def beyond_telling(error: PeerError) -> PeerError:
    """``error`` of a rank that has gone, marked: whoever is left finds that out without being told."""
    mark_agreed(error)
    return error


def agreed_since(error: BaseException, moment: int) -> BaseException | None:
    """The error that all ranks agreed on after ``moment`` if ``error`` is it, or was raised because of it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        # Causes and contexts form a graph, which may have cycles: hence `seen`.
        found = left.pop(0)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if found.__dict__.get(_AGREED, -1) > moment:
            return found
        left += [found.__cause__, found.__context__]
    return None


def _text(failure: BaseException) -> str:
    try:
        return str(failure)
    except Exception:
        return "an error whose text cannot be had"


#: What ends a program by raising an exception somewhere in it.
_HELD = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """Inside, Python's handlers of SIGINT and SIGTERM wait; ``deliver`` calls them.

    Only in the main thread, which is the one that they run in. What the system does by itself is left alone.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                # SIG_DFL and SIG_IGN are no callables, and None is a handler of C code: these stay in force.
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Handle what came meanwhile, now; raises what the handlers raise."""
        while self._came:
            # Taken out first: a handler that raises leaves the rest for the next `deliver`.
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
