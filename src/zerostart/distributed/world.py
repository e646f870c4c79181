"""The ranks of a load, and their agreement on success.

Wherever ranks meet, each first says whether it has failed. A rank that fails inside a ``phase`` tells its
error at the end of it; the others learn of it in the collective that they are in by then, and all raise it.
Collectives of other libraries know nothing of this: they are made inside ``collectives``, before which the
ranks meet, and with nothing in it that one rank could fail at by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from zerostart.distributed.failures import (
    Attendance,
    DeferredSignals,
    agreed_since,
    beyond_telling,
    explain,
    mark_agreed,
    now,
    report_of,
    restored,
)
from zerostart.errors import ConfigError, PeerError
from zerostart.upstream.torch.process_group import (
    made_groups,
    messages_group,
    patience,
    same_patience,
    store_of,
)

T = TypeVar("T")


def default_device() -> torch.device:
    """This rank's accelerator, else the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None, "an available accelerator has a type"
        return torch.device(kind.type, _own_index(kind))
    return torch.device("cpu")


def _own_index(kind: torch.device) -> int:
    # Asking for the current device initialises the accelerator: ask only where that has happened.
    begun = getattr(torch.get_device_module(kind), "is_initialized", None)
    current = torch.accelerator.current_device_index() if begun is None or begun() else 0
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    bound = getattr(group, "bound_device_id", None)  # init_process_group(device_id=...)
    if not current and bound is not None and bound.type == kind.type and bound.index is not None:
        return int(bound.index)
    rank = os.environ.get("LOCAL_RANK")
    if current or not rank:
        return current
    # As accelerate numbers them: a launcher may show each rank one device alone.
    return int(rank) % max(1, torch.accelerator.device_count())


def make_device_current(device: torch.device | None = None) -> None:
    """Make ``device``, or this rank's default one, the current accelerator; nothing for the host."""
    device = device or default_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend_of(device: torch.device) -> str:
    """Return the backend for ``init_process_group``: gloo for the host and torch's own for ``device``."""
    if device.type == "cpu":
        return "gloo"
    try:
        own = dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise ConfigError(
            f"torch knows no backend of torch.distributed for {device.type}; import the package that brings "
            "one, or call torch.distributed.init_process_group(backend=...) before zerostart"
        ) from error
    return f"cpu:gloo,{device.type}:{own}"


def current_world() -> World:
    """The initialised process group's world; a group of one where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return World(0, 1, None)
    return World(dist.get_rank(), dist.get_world_size(), _control_group())


def joined_world(device: torch.device | None = None) -> World:
    """Make this rank's ``device`` current and return the world; a process alone gets a group of one."""
    make_device_current(device)
    if not dist.is_initialized():
        launched = int(os.environ.get("WORLD_SIZE", "1") or 1)
        if launched > 1:
            raise ConfigError(
                f"the launcher started {launched} ranks, but torch.distributed has no process group: call "
                "torch.distributed.init_process_group() before zerostart.load"
            )
        backend = backend_of(device or default_device())
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return current_world()


#: By default process group that is not gloo's: the group over which the ranks' messages go.
_control: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()
#: By group over which messages go: who has come to a call.
_attendances: weakref.WeakKeyDictionary[object, Attendance | None] = weakref.WeakKeyDictionary()


def _control_group() -> object:
    default = dist.group.WORLD
    if "gloo" in str(dist.get_backend(default)):
        # Made when a rank first asks, without meeting the others.
        if default not in _attendances:
            _attendances[default] = _make_attendance("calls")
        return default
    if default not in _control:
        _control[default] = group_beside()
    return _control[default]


def group_beside() -> object:
    """Make another group of all ranks for messages; collective."""
    attendance = _make_attendance("beside")
    if attendance is not None:
        attendance.gather(_call("making a process group"))
    try:
        group = messages_group()
    except RuntimeError as error:
        raise ConfigError(f"torch cannot make a group over gloo: {error}.{explain(error)}") from error
    _attendances[group] = attendance
    return group


def _make_attendance(name: str) -> Attendance | None:
    """None for one rank, and for a pretended group, whose store cannot count: nobody is named there."""
    size = dist.get_world_size()
    if size == 1:
        return None
    try:
        return Attendance(store_of("zerostart"), name, dist.get_rank(), size, patience().total_seconds())
    except RuntimeError:
        return None


#: The names of the phases that this thread is in, outermost first.
_phases: ContextVar[tuple[str, ...]] = ContextVar("_phases", default=())


def _call(during: str) -> str:
    outer = _phases.get()[:1]
    return f"'{during}' ({outer[0]})" if outer and outer[0] != during else f"'{during}'"


#: Seconds between two meetings of ranks that wait for long work of one.
_MEETING_SECONDS = 0.5


@dataclass(frozen=True)
class World:
    """Rank, size, and the group over which small messages go (None for a single process)."""

    rank: int
    size: int
    group: Any

    # Every method below is collective: all ranks of the group call it, in the same order, with the same
    # `during`.
    def all_gather_object(self, value: T, during: str) -> list[T]:
        """Return ``value`` of every rank, in rank order.

        This and the other methods raise PeerError if a rank has died or does not answer, ConfigError if the
        ranks do not do the same, and what another rank has failed with.
        """
        if self.size == 1:
            return [value]
        data, failure = _pickled(value)
        # No bodies: all ranks have the same bytes, as the first message has told each.
        gathered = self._meet(during, failure, data, gather=True).bodies or [data] * self.size
        # The own value is handed back itself: a copy of it would be another object than the caller's.
        return [value if rank == self.rank else pickle.loads(d) for rank, d in enumerate(gathered)]

    def broadcast_object(self, make: Callable[[], T], during: str, source: int = 0) -> T:
        """Return what ``make`` gives on rank ``source``, or raise its error, on every rank."""
        made, data = None, b""
        failure: BaseException | None = None
        if self.rank == source:
            try:
                made = make()
                data, failure = _pickled(made) if self.size > 1 else (b"", None)
            except BaseException as error:
                failure = error
        with DeferredSignals() as signals:
            head = self._meet(during, failure, data)
            if self.size > 1:
                # Only the source has data, so that the longest of all is the length of its.
                sent = _room(head.longest, data)
                self._transfer(during, dist.broadcast, sent, src=source)
                made = made if self.rank == source else pickle.loads(sent.numpy().data)
        signals.deliver()
        value: T = made  # type: ignore[assignment]  # every rank has it now
        return value

    def broadcast_slow(self, make: Callable[[], T], during: str) -> T:
        """As ``broadcast_object`` from rank 0, for what takes longer than the timeout, in a thread."""
        if self.size == 1:
            return self.broadcast_object(make, during)
        made: Future[T] = Future()

        def work() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        if self.rank == 0:
            threading.Thread(target=work, daemon=True).start()  # one that keeps no process from ending
        while self.broadcast_object(lambda: bool(wait([made], _MEETING_SECONDS).not_done), during):
            continue
        return self.broadcast_object(made.result, during)

    def all_reduce_sum(self, values: torch.Tensor, during: str) -> torch.Tensor:
        """Return the sum over all ranks of a 1-D CPU tensor of integers, of one length on all."""
        total = values.clone()
        with DeferredSignals() as signals:
            # Tensors of unlike lengths would be added up wrongly, or wait for ever.
            if lengths := self._meet(during, None, b"%d" % values.numel(), gather=True).bodies:
                raise _diverged([f"{length.decode()} numbers of '{during}'" for length in lengths])
            if self.size > 1 and total.numel():
                self._transfer(during, dist.all_reduce, total)
        signals.deliver()
        return total

    def exchange(self, messages: Sequence[torch.Tensor], during: str) -> list[torch.Tensor]:
        """Send each rank its own 1-D CPU tensor of bytes; return those of every rank for this one."""
        if self.size == 1:
            self._meet(during, None)
            return list(messages)
        with DeferredSignals() as signals:
            self._meet(during, None)
            sizes = torch.tensor([message.numel() for message in messages], device="cpu")
            theirs = torch.empty_like(sizes)
            self._transfer(during, dist.all_to_all_single, theirs, sizes)
            incoming, outgoing = theirs.tolist(), sizes.tolist()
            sent = torch.cat(list(messages))
            received = torch.empty(sum(incoming), dtype=torch.uint8, device="cpu")
            self._transfer(during, dist.all_to_all_single, received, sent, incoming, outgoing)
        signals.deliver()
        return list(torch.split(received, incoming))

    def raise_together(self, failure: BaseException | None, during: str) -> None:
        """Raise the first failing rank's error on every rank, with the same type and text."""
        self._meet(during, failure)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a body on every rank; if it fails on one, the same error is raised on all, soon.

        Phases may be nested. An interrupt stays what it is on its own rank, and is a PeerError on the others.
        """
        # An error that all ranks agreed on since this phase began has been raised on every rank, and is not
        # told a second time: nobody would listen.
        begun = now()
        failure: BaseException | None = None
        outer = _phases.get()
        _phases.set((*outer, name))
        try:
            yield
        # It comes when a generator is closed, at a moment that the other ranks do not share.
        except GeneratorExit:
            raise
        except BaseException as error:
            agreed = agreed_since(error, begun)
            if agreed is error:
                raise
            if agreed is not None:  # wrapped on the way, which the rank that failed knows nothing of
                raise agreed from None
            failure = error
        finally:
            _phases.set(outer)
        # Outside of `finally`, and after the phase is left: the meeting's own place is the one around it.
        self.raise_together(failure, name)

    @contextlib.contextmanager
    def collectives(self, during: str, prepare: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """Make collective calls of other libraries inside, and nothing else that may fail.

        What may fail is in ``prepare``, whose result is given. What fails inside all the same (memory that
        runs out) is raised at once; the others raise PeerError when this process ends.
        """
        prepared = None
        failure: BaseException | None = None
        try:
            prepared = prepare()
        except BaseException as error:
            failure = error
        with DeferredSignals() as signals:
            # The ranks meet with the result of `prepare` in hand: from here on nothing may fail on one rank
            # alone.
            self.raise_together(failure, during)
            begun, groups = now(), made_groups()
            try:
                yield prepared
            except BaseException as error:
                if isinstance(error, RuntimeError) and is_lost(error):
                    raise self._lost(during) from error
                if self.size > 1 and agreed_since(error, begun) is None:
                    # Marked as agreed, for a phase around it would wait for ranks that wait in the library's
                    # own call.
                    self._raise(error, report_of(error), None)  # by itself: nobody can be met
                raise
            # Groups that the library has made inside wait as long as the default group does: torch gives them
            # a time-out of its own.
            same_patience(groups)
        signals.deliver()

    def _meet(
        self, during: str, failure: BaseException | None, data: bytes = b"", gather: bool = False
    ) -> _Head:
        """Send one short message: whether any rank has failed, is elsewhere, or has other ``data``.

        With ``gather`` a second one has the data of all ranks where they differ.
        """
        if self.size == 1:
            if failure is not None:
                self._raise(failure, report_of(failure), None)
            return _Head(len(data), [])
        report, place = b"" if failure is None else report_of(failure), during.encode()
        with DeferredSignals() as signals:
            # All is asked by one MAX: the lengths for the buffers of what follows; a hash and its negative,
            # whose maxima cancel if and only if all hashes are equal.
            own = [len(data), len(place), len(report), *_both_ways(place), *_both_ways(data)]
            # Of the ranks that have failed the first, and whether any has not.
            # Of negative ranks the largest is that of the lowest rank; -size stands for "has not failed".
            own += [-self.size, 1] if failure is None else [-self.rank, 0]
            most = torch.tensor(own, device="cpu")
            self._transfer(during, dist.all_reduce, most, dist.ReduceOp.MAX)
            longest, place_length, length, *numbers, first, others = most.tolist()
            astray, unlike = numbers[0] != -numbers[1], numbers[2] != -numbers[3]
            failed, bodies = first > -self.size, []
            if failed:
                # All ranks take the same branch, since all have the same maxima: each is one collective for
                # all of them. `length` is the longest report of any rank, and the bytes after a shorter one
                # are zeros, which pickle leaves alone.
                told = _room(length, report if self.rank == -first else b"")
                self._transfer(during, dist.broadcast, told, src=-first)
            elif astray:
                bodies = self._bodies(during, place, place_length)
            elif gather and unlike:
                bodies = self._bodies(during, data, longest)
        try:
            signals.deliver()
        except BaseException as interrupt:
            if failed or astray:  # the others raise, and wait for nothing more
                mark_agreed(interrupt)
            raise
        if failed:
            self._raise(failure, told.numpy().tobytes(), -first if others else None)
        if astray:
            raise _diverged([f"'{body.decode()}'" for body in bodies])
        return _Head(longest, bodies)

    def _raise(self, failure: BaseException | None, report: bytes, rank: int | None) -> NoReturn:
        if failure is not None and not isinstance(failure, Exception):
            mark_agreed(failure)
            raise failure
        error = restored(report, rank)
        mark_agreed(error)
        # The own failure stays the cause, for this rank's log; the error itself is the same on all ranks.
        raise error from failure

    def _bodies(self, during: str, message: bytes, longest: int) -> list[bytes]:
        # all_gather wants rows of one length: each begins with how much of it is meant.
        sized = len(message).to_bytes(8, "little") + message
        own = _room(8 + longest, sized)
        rows = own.new_empty(self.size, own.numel())
        self._transfer(during, dist.all_gather, list(rows), own)
        return [row[8:][: int.from_bytes(row[:8].tobytes(), "little")].tobytes() for row in rows.numpy()]

    def _transfer(
        self, during: str, collective: Callable[..., Any], *arguments: object, **options: object
    ) -> None:
        """One collective of torch's, over this world's group."""
        at = _call(during)
        try:
            work = collective(*arguments, group=self.group, async_op=True, **options)
            attendance = _attendances.get(self.group)
            if attendance is None:
                work.wait()
            else:
                attendance.wait(work, at, lambda who: str(self._lost_at(at, who)))
        except PeerError:
            raise
        except RuntimeError as error:
            raise self._lost(during) from error

    def _lost(self, during: str) -> PeerError:
        return beyond_telling(self._lost_at(_call(during), ""))

    def _lost_at(self, call: str, who: str) -> PeerError:
        return PeerError(
            f"a rank died or stopped answering during {call}{(f' ({who})' if who else '')} in the "
            f"process group of {self.size} ranks; that rank's own output, or the system log if memory "
            "ran out, says why. The operation in progress is incomplete: start all ranks again"
        )


class _Head(NamedTuple):
    #: Bytes of the longest data.
    longest: int
    #: Data of every rank; empty if all are equal or nothing was gathered.
    bodies: list[bytes]


def _both_ways(data: bytes) -> tuple[int, int]:
    number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
    return number, -number


def is_lost(error: RuntimeError) -> bool:
    """Whether a collective raises it where another rank has gone; gloo has no exception of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _room(length: int, data: bytes) -> torch.Tensor:
    room = torch.zeros(length, dtype=torch.uint8, device="cpu")
    if data:
        room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return room


def _pickled(value: object) -> tuple[bytes, Exception | None]:
    """``value`` as bytes, or why it has none."""
    try:
        return pickle.dumps(value), None
    except Exception as error:
        return b"", error


def _diverged(places: Sequence[str]) -> ConfigError:
    first = next(rank for rank, place in enumerate(places) if place != places[0])
    error = ConfigError(
        f"the ranks do not do the same: rank 0 is at {places[0]} and rank {first} at {places[first]}; call "
        "the same functions of zerostart, with the same arguments, on every rank"
    )
    mark_agreed(error)
    return error


# A thread of gloo's releases a message a moment after the wait for it has ended. If Python ends then, the
# thread takes the process along (SIGABRT): one of six scripts that end with a collective, with torch 2.13.
atexit.register(time.sleep, 0.05)
