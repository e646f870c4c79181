"""A small stand-in for `parameterized`: one method of a test case for each set of arguments."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["parameterized"]


class parameterized:  # the name of the library's class
    """``@parameterized.expand(cases, name_func=...)`` inside a test case."""

    @staticmethod
    def to_safe_name(text: str) -> str:
        return re.sub(r"\W+", "_", str(text))

    @staticmethod
    def expand(
        cases: Sequence[Any], name_func: Callable[..., str] | None = None, **_: Any
    ) -> Callable[[Any], None]:
        def decorate(function: Any) -> None:
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            for number, case in enumerate(cases):
                arguments = tuple(case) if isinstance(case, (list, tuple)) else (case,)
                name = f"{function.__name__}_{number}"
                if name_func is not None:
                    name = name_func(function, str(number), SimpleNamespace(args=arguments))

                @functools.wraps(function)
                def method(self: Any, _arguments: tuple[Any, ...] = arguments) -> Any:
                    return function(self, *_arguments)

                del method.__wrapped__  # pytest would take the arguments for fixtures
                frame.f_back.f_locals[name] = method

        return decorate
