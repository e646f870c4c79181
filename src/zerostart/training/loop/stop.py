"""A clean stop on Ctrl-C or SIGTERM: remember the wish, let the step in hand finish."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopSignal:
    """While entered, the first SIGINT or SIGTERM only sets :attr:`requested`; the next one interrupts.

    A rank must not act on :attr:`requested` alone: the others would wait for it in their next collective.
    The training loop adds up the wishes of all ranks in every step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned
        self._previous.clear()
