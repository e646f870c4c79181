"""Share errors between ranks, delay signals, and name ranks that miss a collective.

A collective waits silently for a missing rank, and the error at its timeout does not name the rank. So each
rank that has waited for a second notes its arrival in the store of the process group. The first rank whose
collective fails writes an error text to the store, which all ranks raise.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import platform
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from zerostart import errors
from zerostart.errors import PeerError, ZerostartError, printable

_AGREED = "_zerostart_agreed"
_clock = itertools.count()


def pickle_error(failure: BaseException) -> bytes:
    """Pickle an error for other ranks; an interrupt becomes a PeerError.

    An error that cannot be pickled becomes one of zerostart's classes with the same text.
    """
    text = _text(failure)
    if isinstance(failure, ZerostartError):
        result = failure
    elif isinstance(failure, Exception):
        result = ZerostartError(f"{type(failure).__name__}: {text}")
    else:
        name = type(failure).__name__ + (f": {text}" if text else "")
        result = PeerError(
            f"stopped by {name}; the operation in progress is incomplete: start all ranks again"
        )
    try:
        # Unpickle it too: an error whose __init__ takes other arguments can be pickled, but not unpickled.
        data = pickle.dumps(result)
        pickle.loads(data)
    except Exception:  # a class of other code, with arguments that cannot be pickled
        ours = (kind for kind in type(result).__mro__ if kind.__module__ == errors.__name__)
        data = pickle.dumps(next(ours, ZerostartError)(text))
    return data


def restore_error(report: bytes, rank: int | None) -> ZerostartError:
    """Unpickle an error of ``pickle_error``; add ``rank`` to its text unless None."""
    error: ZerostartError = pickle.loads(report)
    if rank is not None:
        # Change `args` instead of making a new error, to keep its class and attributes.
        error.args = (f"rank {rank}: {error}", *error.args[1:])
    return error


def now() -> int:
    """Return the next logical time of this process, for ``find_agreed``."""
    return next(_clock)


def mark_agreed(error: BaseException) -> None:
    """Mark an error that every rank raises; it is not sent again."""
    error.__dict__[_AGREED] = now()


def mark_lost(error: PeerError) -> PeerError:
    """Mark and return the error of a lost rank, which all ranks detect."""
    mark_agreed(error)
    return error


def find_agreed(error: BaseException, moment: int) -> BaseException | None:
    """Return the error marked after ``moment`` among ``error`` and its causes, or None."""
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        # Causes and contexts form a graph that may have cycles.
        current = pending.pop(0)
        if current is None or id(current) in visited:
            continue
        visited.add(id(current))
        if current.__dict__.get(_AGREED, -1) > moment:
            return current
        pending += [current.__cause__, current.__context__]
    return None


def _text(failure: BaseException) -> str:
    try:
        return str(failure) if isinstance(failure, ZerostartError) else " ".join(str(failure).split())
    except Exception:
        return "an error whose text cannot be had"


#: Signals that end a program by an exception at any line.
_DELAYED = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """Delay Python's handlers of SIGINT and SIGTERM until ``deliver``.

    It has an effect in the main thread only.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._received: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _DELAYED:
                # Keep SIG_DFL and SIG_IGN, which cannot be called, and None, which is a handler in C.
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Call the handlers of the signals received so far; raises their errors."""
        while self._received:
            # Remove it first: if its handler raises, the next `deliver` handles the rest.
            number, frame = self._received.pop(0)
            self._handlers[number](number, frame)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, frame))


T = TypeVar("T")

#: Interval between two reads of the store, and timeout of one read, in seconds.
LOOK_SECONDS, ANSWER_SECONDS = 1.0, 10.0
_AGAIN = "The operation in progress is incomplete: start all ranks again"


def await_ranks(
    store: Any, keys: Sequence[str], seconds: float, is_elsewhere: Callable[[], bool] = lambda: False
) -> list[int]:
    """Wait up to ``seconds`` for all keys; return the ranks whose key is missing.

    Returns early if ``is_elsewhere`` says that a missing rank is in another call. Raises PeerError if the
    store does not answer.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    try:
        while not store.check(list(keys)):
            if time.monotonic() > deadline or is_elsewhere():
                return [rank for rank, key in enumerate(keys) if not store.check([key])]
            time.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS / 4)
    except RuntimeError as error:
        raise mark_lost(
            PeerError(f"the store of the process group does not answer: {error}. {_AGAIN}")
        ) from error
    return []


def name_ranks(store: Any, ranks: Sequence[int]) -> str:
    """Return the numbers and hosts of up to eight ranks as text."""
    shown = []
    for rank in ranks[:8]:
        key = f"host/{rank}"
        host = f" (on {printable(store.get(key).decode())})" if store.check([key]) else ""
        shown.append(f"{rank}{host}")
    if len(ranks) > len(shown):
        shown.append(f"{len(ranks) - len(shown)} more")
    text = " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class Attendance:
    """Record of which ranks have arrived at each collective of a process group.

    Each rank numbers the collectives in its own order. ``seconds`` is the timeout of the process group.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, seconds: float) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        # A process group that is created again may reuse the store, with the old keys in it.
        self._series = f"{name}/{store.add(f'{name}/{rank}', 1)}"
        store.set(f"host/{rank}", platform.node())
        self._calls = 0
        self._is_silent = False

    def gather(self, call: str) -> None:
        """Wait until all ranks are at ``call``. Raises PeerError that names missing ranks."""
        place = self._next_key()
        self._store.set(f"{place}/{self._rank}", "")
        keys = [f"{place}/{rank}" for rank in range(self._size)]
        missing = await_ranks(self._store, keys, self._seconds)
        if missing:
            own = self._describe_timeout(missing, call)
            text = self._store.compare_set(f"{place}/lost", "", own).decode()
            self._leave(place)
            raise mark_lost(PeerError(text))

    def wait(self, work: dist.Work, call: str, explain_loss: Callable[[str], str]) -> None:
        """Wait for a collective; raise PeerError if it fails.

        ``explain_loss`` makes the error text from the names of the missing ranks. All ranks raise one text.
        """
        place, started, is_recorded = self._next_key(), time.monotonic(), False
        while True:
            # Read before the wait. The RuntimeError below means that a second has passed if the collective
            # still runs, and that the collective failed if it had ended.
            has_ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))
                return
            except RuntimeError as error:
                failure, text = error, ""
            read_failure = functools.partial(self._read_failure, place, not is_recorded)
            report = functools.partial(
                self._report, place, call, time.monotonic() - started, failure, explain_loss
            )
            is_recorded = True
            try:
                text = self._query_store(read_failure)
                if has_ended and not text:
                    text = self._query_store(report)
            except RuntimeError:  # the host of the store died: the collective will fail by itself
                text = explain_loss("") if has_ended else ""
            if text:
                raise mark_lost(PeerError(text)) from failure

    def _read_failure(self, place: str, is_first: bool) -> str:
        """Read the error text of a failed collective; empty if it has not failed."""
        if is_first:
            self._store.set(f"{place}/{self._rank}", "")
            self._store.add(f"{place}/came", 1)
        key = f"{place}/lost"
        if not self._store.check([key]):
            return ""
        self._leave(place)
        return str(self._store.get(key).decode())

    def _report(
        self,
        place: str,
        call: str,
        seconds: float,
        failure: RuntimeError,
        explain_loss: Callable[[str], str],
    ) -> str:
        if seconds < self._seconds:
            time.sleep(1.5 * LOOK_SECONDS)  # by then each waiting rank has noted its arrival
        missing = [rank for rank in range(self._size) if not self._store.check([f"{place}/{rank}"])]
        # At the timeout torch ends the collective. An earlier end means that a rank died.
        if missing and seconds > 0.9 * self._seconds:
            text = self._describe_timeout(missing, call)
        else:
            text = explain_loss(f"not there: {name_ranks(self._store, missing)}" if missing else "")
        text = self._store.compare_set(f"{place}/lost", "", f"{text}{explain(failure)}").decode()
        self._leave(place)
        return str(text)

    def _leave(self, place: str) -> None:
        self._store.add(f"{place}/left", 1)
        deadline = time.monotonic() + 3 * LOOK_SECONDS
        while self._rank == 0 and time.monotonic() < deadline:
            if self._store.add(f"{place}/left", 0) >= max(2, self._store.add(f"{place}/came", 0)):
                break
            time.sleep(LOOK_SECONDS / 10)

    def _describe_timeout(self, missing: Sequence[int], call: str) -> str:
        has = "has" if len(missing) == 1 else "have"
        return (
            f"{name_ranks(self._store, missing)} {has} not come to {call} within {self._seconds:.0f} s, the "
            "time-out of the process group. Every rank has to make this call: look at that rank's own "
            "output, and for a call that only some ranks make (`if rank == 0:`); a rank that was merely slow "
            f"needs a longer init_process_group(timeout=...). {_AGAIN}"
        )

    def _query_store(self, question: Callable[[], T]) -> T:
        answers: list[T | RuntimeError] = []

        def query() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                answers.append(error)

        # A store call cannot be interrupted and hangs for minutes if the host is unreachable.
        if not self._is_silent:
            thread = threading.Thread(target=query, daemon=True)
            thread.start()
            thread.join(ANSWER_SECONDS)
        self._is_silent = not answers
        answer = answers[0] if answers else dist.DistStoreError("the store does not answer")
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def _next_key(self) -> str:
        self._calls += 1
        return f"{self._series}/{self._calls}"


def explain(error: BaseException) -> str:
    """Return a remedy for an error of gloo after a space; empty if unknown."""
    text = str(error).lower()
    if "too many open files" in text:
        return " Raise the limit of open files (ulimit -n; see docs/clusters.md)."
    if any(
        words in text
        for words in ("unable to find", "connect timeout", "connection refused", "no route", "connecttimeout")
    ):
        return (
            " Ranks cannot connect to each other: set GLOO_SOCKET_IFNAME on every host to the interface that "
            "leads to the others (see docs/clusters.md)."
        )
    return ""
