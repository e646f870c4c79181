"""Errors of a conversion that a conversion's own ``except`` cannot hide.

A converter may try something that is refused here and go on with something else, where eager torch would have
had no error: what it then makes is not what it makes of real tensors. So a refusal is noted, and raised again
when the conversion is done. Errors that are not torch's own become refusals (``ours_are_refused``).
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
#: What eager torch raises for a call that it does not accept.
_OF_TORCH = (RuntimeError, IndexError, TypeError, ValueError)


def refusal(message: str) -> ConversionError:
    """The error to raise for something that eager torch would do; noted inside ``refusals_count``.

    A thread that a converter started inherits no context: what it is refused is noted for every conversion
    that runs.
    """
    error = ConversionError(message)
    own = _NOTED.get()
    with _LOCK:
        for noted in _OPEN if own is None else (own,):
            noted.append(error)
    return error


@contextlib.contextmanager
def refusals_count() -> Iterator[None]:
    """Inside, a refusal that is caught by what was refused is raised again at the end."""
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
            raise noted[0] from error  # what was made of the refusal
        raise
    finally:
        _NOTED.reset(token)
        with _LOCK:
            _OPEN[:] = [other for other in _OPEN if other is not noted]
    if noted:
        raise noted[0]


class _Torchs(Exception):
    """Carries an error that torch itself has for a call, past what takes all others for ours."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Inside ``ours_are_refused``, errors are torch's own, and the converter gets them as they are."""
    try:
        yield
    except ConversionError:
        raise
    except _OF_TORCH as error:
        raise _Torchs(error) from error


def ours_are_refused(function: Callable[P, T]) -> Callable[P, T]:
    """Have every error of ``function`` that is not torch's be a refusal, whatever it is."""

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
