"""Errors of a conversion that a converter cannot hide by catching them.

A converter may catch a refusal and continue in another way than with real tensors. Its result would be wrong.
So each refusal is recorded, and raised again when the conversion ends. Errors that are not torch's own become
refusals too (``ours_are_refused``).
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
Noted = list[ConversionError]

_NOTED: ContextVar[Noted | None] = ContextVar("refusals", default=None)
_OPEN: list[Noted] = []
_LOCK = threading.Lock()
#: Types of torch's own errors for a wrong call.
_OF_TORCH = (RuntimeError, IndexError, TypeError, ValueError)


def refusal(message: str) -> ConversionError:
    """Return the error for a call that eager torch would accept, and record it.

    Threads that a converter starts inherit no context, so their refusals count for every running conversion.
    """
    error = ConversionError(message)
    own = _NOTED.get()
    with _LOCK:
        for noted in _OPEN if own is None else (own,):
            noted.append(error)
    return error


@contextlib.contextmanager
def refusals_count() -> Iterator[None]:
    """Raise a refusal again at the end if the code inside caught it."""
    noted: Noted = []
    token = _NOTED.set(noted)
    with _LOCK:
        _OPEN.append(noted)
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        if noted:
            raise noted[0] from error  # the error that followed from the refusal
        raise
    finally:
        _NOTED.reset(token)
        with _LOCK:
            _OPEN[:] = [other for other in _OPEN if other is not noted]
    if noted:
        raise noted[0]


class _Torchs(Exception):
    """Carry torch's own error past ``ours_are_refused``."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Pass torch's own errors to the converter unchanged, inside ``ours_are_refused``."""
    try:
        yield
    except ConversionError:
        raise
    except _OF_TORCH as error:
        raise _Torchs(error) from error


def ours_are_refused(function: Callable[P, T]) -> Callable[P, T]:
    """Turn every error of ``function`` that is not torch's own into a refusal."""

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
