"""Signals that arrive while ranks exchange a message: handled after it, for half a message hangs all."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

#: What ends a program by raising an exception somewhere in it.
_HELD = (signal.SIGINT, signal.SIGTERM)


class HeldSignals:
    """Inside, Python's handlers of SIGINT and SIGTERM wait; ``deliver`` calls them.

    Only in the main thread, which is the one that they run in. What the system does by itself is left alone.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
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
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
