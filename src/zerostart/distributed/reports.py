"""Errors that travel to other ranks, where they are raised with the same type and text."""

from __future__ import annotations

import itertools
import pickle

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
        made = PeerError(f"stopped by {name}; what was under way is not complete: start all ranks again")
    try:
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
        error.args = (f"rank {rank}: {error}", *error.args[1:])
    return error


def now() -> int:
    """A moment of this process, for ``agreed_since``."""
    return next(_moments)


def mark_agreed(error: BaseException) -> None:
    """Note that every rank raises ``error``, or that no more can be told to the others."""
    error.__dict__[_AGREED] = now()


def agreed_since(error: BaseException, moment: int) -> BaseException | None:
    """The error that all ranks agreed on after ``moment`` if ``error`` is it, or was raised because of it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
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
