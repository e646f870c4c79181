"""Serve ``from_pretrained`` of other libraries: zerostart builds and fills the model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from zerostart.errors import BuildError
from zerostart.upstream.guard import Function
from zerostart.upstream.patches import RefCountedPatches

#: Missing and unexpected names, and (name, shape in the checkpoint, shape in the model) of mismatched ones.
Findings = tuple[set[str], set[str], set[tuple[str, tuple[int, ...], tuple[int, ...]]]]


_open_calls = threading.local()


def _calls() -> list[Any]:
    if not hasattr(_open_calls, "stack"):
        _open_calls.stack = []
    stack: list[Any] = _open_calls.stack
    return stack


class LoadingSeam(RefCountedPatches):
    """Serves the loading of one library while it is open.

    ``choose(class, keyword arguments)`` is called for each ``from_pretrained``. If it returns None, the
    library loads the model, and ``skipped(model)`` gets the result. Otherwise it returns a call with
    ``model`` (None until it has its weights), ``arguments`` (for the library), ``setup`` (words for a
    message), ``building(dtype)`` (the dtype and a context to build in) and ``agreeing()`` (a context that
    raises one error on all ranks).
    """

    def __init__(
        self,
        enter: Callable[[ExitStack], None],
        choose: Callable[[type, dict[str, object]], Any],
        skipped: Callable[[object], None],
    ) -> None:
        super().__init__(enter)
        self._choose = choose
        self._skipped = skipped
        self._own = threading.local()

    def innermost(self) -> Any:
        """Return this library's innermost call in this thread, or None."""
        call = getattr(self._own, "call", None)
        return call if _calls()[-1:] == [call] else None

    def without_weights(self) -> Any:
        """Return the innermost call if its model has no weights yet, or None."""
        call = self.innermost()
        return None if call is None or call.model is not None else call

    def from_pretrained(self, original: Function, cls: type, *args: Any, **kwargs: Any) -> object:
        """Serve one call of the library's class method ``original``."""
        # The contexts (meta, dtype) of the outer model would apply to this one.
        if any(outer.model is None for outer in _calls()[-1:]):
            raise BuildError(
                f"{cls.__name__}.from_pretrained is called while another model is built, which "
                "zerostart.enabled() does not support; load that model with zerostart.load"
            )
        call = self._choose(cls, kwargs)
        if call is None:
            result = original(cls, *args, **kwargs)
            self._skipped(result[0] if isinstance(result, tuple) else result)
            return result
        with self._serving(call), call.agreeing():
            return original(cls, *args, **call.arguments)

    @contextlib.contextmanager
    def _serving(self, call: Any) -> Iterator[None]:
        outer = getattr(self._own, "call", None)
        dtype = torch.get_default_dtype()
        _calls().append(call)
        self._own.call = call
        try:
            yield
        except BaseException:
            torch.set_default_dtype(dtype)  # diffusers does not reset it after an error
            raise
        finally:
            _calls().pop()
            self._own.call = outer
