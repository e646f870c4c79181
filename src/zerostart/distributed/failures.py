"""Failures of one rank that others wait for: errors that travel, signals that wait, ranks that are missing.

A collective waits in silence for a rank that does not come, and its error names none. So a rank that has
waited for a second writes into the store of the process group that it has come, and the first to find the
collective broken writes there what all raise.
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
_moments = itertools.count()


def report_of(failure: BaseException) -> bytes:
    """Pickle ``failure`` for other ranks, or its text; an interrupt is a PeerError to them."""
    text = _text(failure)
    if isinstance(failure, ZerostartError):
        made = failure
    elif isinstance(failure, Exception):
        made = ZerostartError(f"{type(failure).__name__}: {text}")
    else:
        name = type(failure).__name__ + (f": {text}" if text else "")
        made = PeerError(f"stopped by {name}; the operation in progress is incomplete: start all ranks again")
    try:
        # Tried in both directions: what can be pickled need not come back (an __init__ with other arguments).
        data = pickle.dumps(made)
        pickle.loads(data)
    except Exception:  # of a class of somebody else's, with arguments that do not travel
        ours = (kind for kind in type(made).__mro__ if kind.__module__ == errors.__name__)
        data = pickle.dumps(next(ours, ZerostartError)(text))
    return data


def restored(report: bytes, rank: int | None) -> ZerostartError:
    """The error of a report; its text names ``rank`` unless that is None."""
    error: ZerostartError = pickle.loads(report)
    if rank is not None:
        # In `args`, and not by a new error: the class and what else it carries stay as they were.
        error.args = (f"rank {rank}: {error}", *error.args[1:])
    return error


def now() -> int:
    """A moment of this process, for ``agreed_since``."""
    return next(_moments)


def mark_agreed(error: BaseException) -> None:
    """Note that every rank raises ``error``, or that no more can be told to the others."""
    error.__dict__[_AGREED] = now()


def beyond_telling(error: PeerError) -> PeerError:
    """``error`` of a rank that has gone, marked: whoever is left finds that out without being told."""
    mark_agreed(error)
    return error


def agreed_since(error: BaseException, moment: int) -> BaseException | None:
    """The error that all ranks agreed on after ``moment`` if ``error`` is it, or was raised because of it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        # Causes and contexts form a graph, which may have cycles: hence `seen`.
        found = left.pop(0)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if found.__dict__.get(_AGREED, -1) > moment:
            return found
        left += [found.__cause__, found.__context__]
    return None


def _text(failure: BaseException) -> str:
    try:
        return str(failure)
    except Exception:
        return "an error whose text cannot be had"


#: What ends a program by raising an exception somewhere in it.
_HELD = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """Inside, Python's handlers of SIGINT and SIGTERM wait; ``deliver`` calls them. Main thread only."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                # SIG_DFL and SIG_IGN are no callables, and None is a handler of C code: these stay in force.
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
            # Taken out first: a handler that raises leaves the rest for the next `deliver`.
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))


T = TypeVar("T")

#: Seconds between two looks into the store, and for which it may take to answer.
LOOK_SECONDS, ANSWER_SECONDS = 1.0, 10.0
_AGAIN = "The operation in progress is incomplete: start all ranks again"


def await_ranks(
    store: Any, keys: Sequence[str], seconds: float, is_elsewhere: Callable[[], bool] = lambda: False
) -> list[int]:
    """Wait until each rank has set its key; return those that have not after so many ``seconds``.

    Gives up sooner if a missing rank ``is_elsewhere``. Raises PeerError if the store does not answer.
    """
    until, pause = time.monotonic() + seconds, 0.01
    try:
        while not store.check(list(keys)):
            if time.monotonic() > until or is_elsewhere():
                return [rank for rank, key in enumerate(keys) if not store.check([key])]
            time.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS / 4)
    except RuntimeError as error:
        raise beyond_telling(
            PeerError(f"the store of the process group does not answer: {error}. {_AGAIN}")
        ) from error
    return []


def name_ranks(store: Any, ranks: Sequence[int]) -> str:
    """Format up to eight ranks, each with its host: ``ranks 1 (on a) and 2 (on b)``."""
    shown = []
    for rank in ranks[:8]:
        key = f"host/{rank}"
        host = f" (on {printable(store.get(key).decode())})" if store.check([key]) else ""
        shown.append(f"{rank}{host}")
    if len(ranks) > len(shown):
        shown.append(f"{len(ranks) - len(shown)} more")
    listed = " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


class Attendance:
    """The collectives of one process group, which each rank counts in its own order.

    ``seconds`` is the timeout of the process group.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, seconds: float) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        # A group that is made again often has the store of the one before it, with all its keys.
        self._series = f"{name}/{store.add(f'{name}/{rank}', 1)}"
        store.set(f"host/{rank}", platform.node())
        self._calls = 0
        self._is_silent = False

    def gather(self, call: str) -> None:
        """Return when all ranks are at ``call``. Raises PeerError, naming those missing."""
        place = self._next()
        self._store.set(f"{place}/{self._rank}", "")
        keys = [f"{place}/{rank}" for rank in range(self._size)]
        missing = await_ranks(self._store, keys, self._seconds)
        if missing:
            own = self._overdue(missing, call)
            text = self._store.compare_set(f"{place}/lost", "", own).decode()
            self._leave(place)
            raise beyond_telling(PeerError(text))

    def wait(self, work: dist.Work, call: str, lost: Callable[[str], str]) -> None:
        """Wait for a collective. Raises PeerError with what ``lost`` makes of the missing ranks' names.

        All ranks that wait raise the same text.
        """
        place, begun, has_come = self._next(), time.monotonic(), False
        while True:
            # Asked before the wait: its RuntimeError is the second's end if the collective goes on, and the
            # collective's own failure if it had ended by then.
            has_ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))
                return
            except RuntimeError as error:
                failure, text = error, ""
            look = functools.partial(self._look, place, not has_come)
            settle = functools.partial(self._settle, place, call, time.monotonic() - begun, failure, lost)
            has_come = True
            try:
                text = self._ask(look)
                if has_ended and not text:
                    text = self._ask(settle)
            except RuntimeError:  # the store is gone: the collective ends by itself, as its host has ended
                text = lost("") if has_ended else ""
            if text:
                raise beyond_telling(PeerError(text)) from failure

    def _look(self, place: str, is_first: bool) -> str:
        """Read why others have left a collective; empty if they have not."""
        if is_first:
            self._store.set(f"{place}/{self._rank}", "")
            self._store.add(f"{place}/came", 1)
        key = f"{place}/lost"
        if not self._store.check([key]):
            return ""
        self._leave(place)
        return str(self._store.get(key).decode())

    def _settle(
        self, place: str, call: str, seconds: float, failure: RuntimeError, lost: Callable[[str], str]
    ) -> str:
        if seconds < self._seconds:
            time.sleep(1.5 * LOOK_SECONDS)  # whoever waits in it has come by then
        missing = [rank for rank in range(self._size) if not self._store.check([f"{place}/{rank}"])]
        # At the timeout torch breaks the collective itself, sooner it can only be a rank that has gone.
        if missing and seconds > 0.9 * self._seconds:
            text = self._overdue(missing, call)
        else:
            text = lost(f"not there: {name_ranks(self._store, missing)}" if missing else "")
        text = self._store.compare_set(f"{place}/lost", "", f"{text}{explain(failure)}").decode()
        self._leave(place)
        return str(text)

    def _leave(self, place: str) -> None:
        self._store.add(f"{place}/left", 1)
        until = time.monotonic() + 3 * LOOK_SECONDS
        while self._rank == 0 and time.monotonic() < until:
            if self._store.add(f"{place}/left", 0) >= max(2, self._store.add(f"{place}/came", 0)):
                break
            time.sleep(LOOK_SECONDS / 10)

    def _overdue(self, missing: Sequence[int], call: str) -> str:
        has = "has" if len(missing) == 1 else "have"
        return (
            f"{name_ranks(self._store, missing)} {has} not come to {call} within {self._seconds:.0f} s, the "
            "time-out of the process group. Every rank has to make this call: look at that rank's own "
            "output, and for a call that only some ranks make (`if rank == 0:`); a rank that was merely slow "
            f"needs a longer init_process_group(timeout=...). {_AGAIN}"
        )

    def _ask(self, question: Callable[[], T]) -> T:
        answers: list[T | RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                answers.append(error)

        # A call of the store cannot be interrupted, and would wait for minutes if its host is cut off.
        if not self._is_silent:
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(ANSWER_SECONDS)
        self._is_silent = not answers
        answer = answers[0] if answers else dist.DistStoreError("the store does not answer")
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def _next(self) -> str:
        self._calls += 1
        return f"{self._series}/{self._calls}"


def explain(error: BaseException) -> str:
    """Say what to do about gloo's ``error``, with a space before it; empty for one of another kind."""
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
