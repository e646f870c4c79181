"""Errors of a conversion that a converter cannot hide by catching them.

A converter may catch a refusal and continue in another way than with real tensors. Its result would be wrong.
So each refusal is recorded, and raised again when the conversion ends. Errors that are not torch's own become
refusals too (``refuse_own_errors``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from zerostart.errors import ConversionError

P = ParamSpec("P")
T = TypeVar("T")
Refusals = list[ConversionError]

_REFUSALS: ContextVar[Refusals | None] = ContextVar("refusals", default=None)
_OPEN: list[Refusals] = []
_LOCK = threading.Lock()
#: Types of torch's own errors for a wrong call.
_OF_TORCH = (RuntimeError, IndexError, TypeError, ValueError)


def refusal(message: str) -> ConversionError:
    """Return the error for a call that cannot be followed, and record it.

    Threads that a converter starts inherit no context, so their refusals count for every running conversion.
    """
    error = ConversionError(message)
    own = _REFUSALS.get()
    with _LOCK:
        for refusals in _OPEN if own is None else (own,):
            refusals.append(error)
    return error


@contextlib.contextmanager
def raise_refusals() -> Iterator[None]:
    """Raise a refusal again at the end if it was caught."""
    refusals: Refusals = []
    token = _REFUSALS.set(refusals)
    with _LOCK:
        _OPEN.append(refusals)
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        if refusals:
            raise refusals[0] from error  # the error that followed from the refusal
        raise
    finally:
        _REFUSALS.reset(token)
        with _LOCK:
            _OPEN[:] = [other for other in _OPEN if other is not refusals]
    if refusals:
        raise refusals[0]


class _Torchs(Exception):
    """Carry torch's own error past ``refuse_own_errors``."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def allow_torch_errors() -> Iterator[None]:
    """Pass torch's own errors to the converter unchanged, inside ``refuse_own_errors``."""
    try:
        yield
    except ConversionError:
        raise
    except _OF_TORCH as error:
        raise _Torchs(error) from error


def refuse_own_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Turn errors of ``function`` that are not torch's into refusals."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ConversionError:
            raise
        except _Torchs as torchs:
            raise torchs.error from torchs.error.__cause__
        except Exception as error:
            raise refusal(
                f"a conversion cannot be traced ({type(error).__name__}: {error}); use other operators"
            ) from error

    guarded.__name__, guarded.__doc__ = function.__name__, function.__doc__
    return guarded
