"""Threads that take calls, also when the interpreter waits for a save in the background at its end."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """At most ``count`` threads that take calls in order.

    Those of ``concurrent.futures`` take none any more once the main thread has ended, while a save in the
    background has yet to come to its end.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[Future[object]] = []
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` made by a thread, and give what it will have given."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # whoever waits for the future is told
                future.set_exception(error)

        self._waiting = [one for one in self._waiting if not one.done()]
        self._waiting.append(future)  # type: ignore[arg-type]
        self._calls.put(run)
        if len(self._threads) < self._count:
            # A daemon, as who has begun it waits for its end, and is none.
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def end(self, cancel: bool = False) -> None:
        """Return when all calls have been made; with ``cancel``, when those have that have begun."""
        for future in self._waiting if cancel else ():
            future.cancel()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def all_of(calls: Iterable[Callable[[], T]], together: int) -> list[T]:
    """What calls give, ``together`` at once; raises the first error, after all have ended."""
    listed = list(calls)
    if len(listed) < 2:
        return [call() for call in listed]
    with contextlib.ExitStack() as stack:
        workers = Workers(min(together, len(listed)), "zerostart-requests")
        stack.callback(workers.end)
        futures = [workers.submit(call) for call in listed]
    return [future.result() for future in futures]
