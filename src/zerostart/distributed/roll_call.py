"""Who of the ranks has come to a call that all of them make, by the store of the process group.

A collective waits in silence for a rank that does not come, and its error at the time-out names none. The
store is beside all collectives: a rank that waits writes down there that it has come, and reads who has not.
Nothing is written by ranks that wait for less than a second.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

from zerostart.distributed.failures import beyond_telling
from zerostart.distributed.network import explained
from zerostart.errors import PeerError, printable

logger = logging.getLogger("zerostart")
T = TypeVar("T")

#: Seconds for which a rank waits for the others before it says which have not come.
SILENCE = 20.0
#: Seconds between two looks into the store of a rank that waits in a collective.
LOOK = 1.0
#: Seconds between two looks, at most, of a rank that waits by the store alone.
_PAUSE = 0.25
#: Looks for which rank 0 waits for others to learn an error, and these for what it has sent as it ended.
_LAST = 5
#: Ranks in one number of the store: its numbers have 63 bits and a sign.
_BITS = 48
_AGAIN = "What was under way is not complete: start all ranks again"


@contextlib.contextmanager
def _store_needed(call: str) -> Iterator[None]:
    """Inside, the store has to answer; what torch raises where it does not becomes a PeerError."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        raise beyond_telling(
            PeerError(
                f"the process group's store, which rank 0 or its launcher serves, does not answer at {call}: "
                f"{error}. {_AGAIN}"
            )
        ) from error


def in_words(ranks: Sequence[int], names: Callable[[int], str] = str) -> str:
    """``rank 3`` or ``ranks 3, 5 and 8``, with how many more where they are many."""
    shown = [names(rank) for rank in ranks[:8]]
    if len(ranks) > len(shown):
        shown.append(f"{len(ranks) - len(shown)} more")
    listed = " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


class Store(Protocol):
    """What is used of torch's store of a process group; all ranks see the same keys."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0, in one step; gives the sum."""
        ...

    def set(self, key: str, value: str) -> None:
        """Write a value, which those that wait for it then have."""
        ...

    def get(self, key: str) -> bytes:
        """The value, as soon as it is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there now."""
        ...

    def wait(self, keys: list[str]) -> None:
        """Return when all keys are there."""
        ...


class RollCall:
    """Calls of one process group, each at a ``place`` of its own, which all ranks name alike.

    Args:
        store: where the ranks write; with ``add``, ``set``, ``get`` and ``check``.
        timeout: how long a rank waits for the others: the process group's own.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.timeout = timeout.total_seconds()
        self._collectives = 0
        self._silent_store = False
        # A group that is made anew often has the store of the one before it, with all that was written there.
        self._series = f"series {store.add(f'series/{rank}', 1)}"
        # For messages alone: `named` finds the machine of a rank that can no longer be asked.
        store.set(f"host/{rank}", platform.node())

    def come(self, place: str, times: int = 1) -> None:
        """Write down that this rank has come to ``place``; with ``times=-1``, that it has left."""
        # First who, then how many: whoever reads a full count finds all ranks among those that have come.
        # Each rank adds a power of two of its own, which is an "or" as long as none comes twice.
        self.store.add(f"{place}/ranks/{self.rank // _BITS}", times << self.rank % _BITS)
        self.store.add(f"{place}/count", times)

    def all_here(self, place: str) -> bool:
        """Whether every rank has come."""
        return int(self.store.add(f"{place}/count", 0)) >= self.size

    def absent(self, place: str) -> list[int]:
        """The ranks that have not come, ascending."""
        # Adding 0 reads a number, and makes it where nobody has written yet: `get` would wait for the key.
        parts = [self.store.add(f"{place}/ranks/{part}", 0) for part in range(-(-self.size // _BITS))]
        return [rank for rank in range(self.size) if not parts[rank // _BITS] >> rank % _BITS & 1]

    def named(self, ranks: Sequence[int]) -> str:
        """The ranks in words, each with its host where it has told that."""

        def name(rank: int) -> str:
            key = f"host/{rank}"
            known = self.store.check([key])
            return f"{rank} (on {printable(self.store.get(key).decode())})" if known else str(rank)

        return in_words(ranks, name)

    def await_ranks(
        self,
        absent: Callable[[], Sequence[int]],
        call: str,
        hint: str,
        all_here: Callable[[], bool] | None = None,
        elsewhere: Callable[[], bool] = lambda: False,
    ) -> Sequence[int]:
        """Wait, by the store alone, until nobody is absent from ``call``; gives who is, if one gives up.

        That is at the time-out, or where the others are ``elsewhere``. ``all_here`` is a cheaper question
        than ``absent``. After ``SILENCE`` seconds a warning says who is awaited, with the ``hint``. Raises
        PeerError if the store is gone.
        """
        with _store_needed(call):
            return self._await(absent, call, hint, all_here, elsewhere)

    def _await(
        self,
        absent: Callable[[], Sequence[int]],
        call: str,
        hint: str,
        all_here: Callable[[], bool] | None,
        elsewhere: Callable[[], bool],
    ) -> Sequence[int]:
        begun, pause, silent = time.monotonic(), 0.001, True
        is_full = all_here or (lambda: not absent())
        # One round trip a look, and looks soon get rarer: with a thousand ranks rank 0's store answers them
        # all.
        while not self._ask(is_full):
            seconds = time.monotonic() - begun
            # All may have been here in the meantime, before one went there.
            if (seconds > self.timeout or self._ask(elsewhere)) and (missing := self._ask(absent)):
                return missing
            if silent and seconds > SILENCE:
                silent = False
                self._warn(self._ask(absent), call, seconds, hint)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE)
        return []

    def gather(self, call: str, group: str, doubt: Callable[[], str]) -> str:
        """Return when all ranks are here, by the store alone. Raises PeerError, naming those that are not.

        If not all tell the same ``group``, each is asked for its ``doubt``: the answer is the first one of
        any rank, on all.
        """
        place = self._next()
        with _store_needed(call):
            # Before this rank comes: when all are here, all have told their group, so that every rank reads
            # the same number below and takes the same branch.
            self.store.add(f"{place}/{group}", 1)
            self._gather(place, call)
            if self.store.add(f"{place}/{group}", 0) == self.size:
                return ""
            own, key = doubt(), f"{place}/doubt"
            if own and self.store.add(f"{key}s", 1) == 1:
                self.store.set(key, f"rank {self.rank}: {own}")
            # A second roll call: nobody may look for a doubt before all have had the time to write theirs.
            place = self._next()
            self._gather(place, call)
            if not self.store.add(f"{key}s", 0):
                return ""
            # It is counted before it is written: the rank that counted may still be writing.
            self._ask(lambda: self.store.wait([key]))
            text = str(self.store.get(key).decode())
        # All raise it, and end: who has not read it yet would find no store.
        self.leave(place)
        return text

    def _gather(self, place: str, call: str) -> None:
        self.come(place)
        missing = self.await_ranks(
            lambda: self.absent(place),
            call,
            "",
            all_here=lambda: self.all_here(place),
            elsewhere=lambda: self.store.check([f"{place}/verdict"]),
        )
        if missing:
            text = self._settled(place, lambda: self._overdue(missing, call), lambda: "")
            self.leave(place)
            raise beyond_telling(PeerError(text or self._overdue(missing, call)))

    def finish(self, work: dist.Work, call: str, lost: Callable[[str], str]) -> None:
        """Wait for a collective; says meanwhile who has not come to it.

        Raises PeerError with what ``lost`` makes of who is not there, the same on all ranks that wait: the
        first to notice that the collective is broken writes it down, and the others leave it.
        """
        place, begun, silent, here = self._next(), time.monotonic(), True, False
        gone_for = 0  # looks in which the store was no more
        while True:
            # Asked before the wait: a RuntimeError of `wait` is its time-out (LOOK) if the collective goes
            # on, and the collective's own failure if it had ended by then.
            ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=LOOK))
                return
            except RuntimeError as error:
                failure, seconds = error, time.monotonic() - begun
            # Only ranks that have waited for LOOK write to the store: a collective that goes well costs it
            # nothing.
            new, here = not here, True
            reason = failure if ended else None
            try:
                text = self._ask(functools.partial(self._look, place, call, seconds, reason, new, lost))
            except RuntimeError as gone:
                # The store is slow, and the collective may still come to an end; for some looks without its
                # connection, too: rank 0 may have come to its own end of this call, and have ended.
                gone_for += isinstance(gone, dist.DistNetworkError)
                if not ended and gone_for < _LAST:
                    continue
                text = lost("nor is the process group's store there, which rank 0 or its launcher serves")
            if text:
                self.leave(place)
                raise beyond_telling(PeerError(text)) from failure
            if silent and seconds > SILENCE:
                silent = False
                with contextlib.suppress(RuntimeError):  # the store has gone meanwhile
                    self._warn(self._ask(lambda: self.absent(place)), call, seconds)

    def _look(
        self,
        place: str,
        call: str,
        seconds: float,
        failure: RuntimeError | None,
        new: bool,
        lost: Callable[[str], str],
    ) -> str:
        """Why to wait no longer for a collective: it has ended in a ``failure``, or others have left it."""
        if new:
            self.come(place)
        if failure is not None:
            return self._verdict(place, call, seconds, failure, lost)
        verdict = f"{place}/verdict"
        return str(self.store.get(verdict).decode()) if self.store.check([verdict]) else ""

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the store; raises RuntimeError if it has none for long: its host may be cut off."""
        answers: list[T] = []
        failures: list[RuntimeError] = []
        if self._silent_store:
            failures.append(dist.DistStoreError("the store has not answered"))
            raise failures[0]

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                failures.append(error)

        # A call of the store cannot be interrupted, and waits for minutes if its host is cut off: so it waits
        # in a thread of its own, which is left behind (`daemon`: it does not keep the process from ending).
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(10 * LOOK)
        if not answers and not failures:
            self._silent_store = True
            failures.append(dist.DistStoreError("the store has not answered"))
        if failures:
            raise failures[0]
        return answers[0]

    def _next(self) -> str:
        self._collectives += 1
        return f"{self._series}/{self._collectives}"

    def _verdict(
        self, place: str, call: str, seconds: float, failure: RuntimeError, lost: Callable[[str], str]
    ) -> str:
        """What is the matter, in the words of the first rank that has noticed it."""

        def text() -> str:
            if seconds < self.timeout:
                time.sleep(1.5 * LOOK)  # whoever waits in it has written that down by then
            missing = self.absent(place)
            # At the time-out torch breaks the collective itself, on each rank a little earlier or later;
            # sooner than that it can only have been a rank that has gone.
            if missing and seconds > 0.9 * self.timeout:
                return self._overdue(missing, call)
            return lost(f"not there: {self.named(missing)}" if missing else "") + explained(failure)

        return self._settled(place, text, lambda: lost(""))

    def _settled(self, place: str, text: Callable[[], str], otherwise: Callable[[], str]) -> str:
        """What the first rank to ask says of ``place``, on all that ask."""
        key = f"{place}/verdict"
        # The first to add is the one that writes; the others take it over, so that all ranks raise the same
        # text. If the first dies meanwhile, each says what it knows by itself.
        if self.store.add(f"{place}/noticed", 1) == 1:
            self.store.set(key, made := text())
            return made
        begun = time.monotonic()
        while not self.store.check([key]) and time.monotonic() - begun < 5 * LOOK:
            time.sleep(LOOK / 10)
        return str(self.store.get(key).decode()) if self.store.check([key]) else otherwise()

    def leave(self, place: str) -> None:
        """Note that this rank knows with what error all end at ``place``.

        Rank 0, with which the store may go, leaves last, so that the others still find there what they raise.
        """

        def leave() -> None:
            left, begun = f"{place}/left", time.monotonic()
            self.store.add(left, 1)
            # Who never came (`count`) is not waited for, nor for long who has died since.
            while self.rank == 0 and time.monotonic() - begun < _LAST * LOOK:
                if self.store.add(left, 0) >= self.store.add(f"{place}/count", 0):
                    return
                time.sleep(LOOK / 10)

        # The error is known already, and matters more than whether the others have heard of it.
        with contextlib.suppress(RuntimeError):  # the store has gone meanwhile
            self._ask(leave)

    def _overdue(self, missing: Sequence[int], call: str) -> str:
        has = "has" if len(missing) == 1 else "have"
        return (
            f"{self.named(missing)} {has} not come to {call} within {self.timeout:.0f} s, the time-out of "
            "the process group. Every rank has to make this call: look at that rank's own output, and for a "
            "call that only some ranks make (`if rank == 0:`); a rank that was merely slow needs a longer "
            f"init_process_group(timeout=...). {_AGAIN}"
        )

    def _warn(self, missing: Sequence[int], call: str, seconds: float, hint: str = "") -> None:
        if missing:
            logger.warning(
                "rank %d is at %s and has waited %.0f s for %s: %s",
                self.rank,
                call,
                seconds,
                self.named(missing),
                hint or f"it goes on waiting until the time-out of the process group ({self.timeout:.0f} s)",
            )
