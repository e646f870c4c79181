"""A call of some `from_pretrained` whose weights zerostart loads, and the one that a thread is in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Served(Protocol):
    """One call of ``from_pretrained`` whose weights zerostart loads."""

    #: The model, once it has its weights.
    model: Any
    #: Keyword arguments with which the library goes on.
    arguments: dict[str, Any]

    @property
    def setup(self) -> str:
        """What the model is loaded for, in the words of transformers' own message of ZeRO-3."""
        ...

    def building(self, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager[Any]]:
        """The dtype to build in, and a context for building; ``dtype`` is the one that the call has found."""
        ...

    def dequantising(self, config: Any) -> None:
        """Have a quantised checkpoint of the configuration ``config`` dequantised; others are left alone."""
        ...

    def load(self, model: Any, files: list[str] | None, state_dict: Any, config: Any) -> Findings:
        """Give ``model`` (on meta) its weights; collective."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """A context for the whole call; may raise another error in the place of one that is raised inside."""
        ...


#: Missing and unexpected names, and (name, shape in the checkpoint, shape in the model) of mismatched ones.
Findings = tuple[set[str], set[str], set[tuple[str, tuple[int, ...], tuple[int, ...]]]]

_calls = threading.local()


def current_call() -> Served | None:
    """The call that this thread is in."""
    stack = getattr(_calls, "stack", None)
    return stack[-1] if stack else None


@contextlib.contextmanager
def serving(served: Served) -> Iterator[None]:
    """Inside, ``served`` is the call that this thread is in."""
    if not hasattr(_calls, "stack"):
        _calls.stack = []
    _calls.stack.append(served)
    try:
        yield
    finally:
        _calls.stack.pop()
