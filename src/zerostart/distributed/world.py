"""Give all ranks of a process group the same error.

Each message between ranks begins with their failures. A rank that fails inside a ``phase`` sends its error at
the end of the phase. The other ranks receive it in their next collective, and all raise it. Collectives of
other libraries do not send errors: call them inside ``collectives``, with nothing that may fail on one rank.
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
    explain,
    find_agreed,
    mark_agreed,
    mark_lost,
    now,
    pickle_error,
    restore_error,
)
from zerostart.errors import ConfigError, PeerError
from zerostart.upstream.torch.process_group import (
    group_timeout,
    list_groups,
    messages_group,
    share_timeout,
    store_of,
)

T = TypeVar("T")


def default_device() -> torch.device:
    """Return this rank's accelerator, or the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None, "an available accelerator has a type"
        return torch.device(kind.type, _own_index(kind))
    return torch.device("cpu")


def _own_index(kind: torch.device) -> int:
    # Asking for the current device initialises the accelerator: ask only where that has happened.
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    current = torch.accelerator.current_device_index() if is_initialized is None or is_initialized() else 0
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    bound = getattr(group, "bound_device_id", None)  # init_process_group(device_id=...)
    if not current and bound is not None and bound.type == kind.type and bound.index is not None:
        return int(bound.index)
    rank = os.environ.get("LOCAL_RANK")
    if current or not rank:
        return current
    # A launcher may show each rank only one device; accelerate numbers devices in the same way.
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
    """Return the world of the process group; a world of one without a group."""
    if not dist.is_available() or not dist.is_initialized():
        return World(0, 1, None)
    return World(dist.get_rank(), dist.get_world_size(), _control_group())


def joined_world(device: torch.device | None = None) -> World:
    """Make ``device`` current and return the world; create a missing group of one."""
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


#: Default process groups that do not use gloo, each with its gloo group for messages.
_control: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()
#: Arrival records of the groups for messages.
_attendances: weakref.WeakKeyDictionary[object, Attendance | None] = weakref.WeakKeyDictionary()


def _control_group() -> object:
    default = dist.group.WORLD
    if "gloo" in str(dist.get_backend(default)):
        if default not in _attendances:
            _attendances[default] = _make_attendance("calls")
        return default
    if default not in _control:
        _control[default] = make_message_group()
    return _control[default]


def make_message_group() -> object:
    """Create another group of all ranks for messages; collective."""
    attendance = _make_attendance("messages")
    if attendance is not None:
        attendance.gather(_call("making a process group"))
    try:
        group = messages_group()
    except RuntimeError as error:
        raise ConfigError(f"torch cannot make a group over gloo: {error}.{explain(error)}") from error
    _attendances[group] = attendance
    return group


def _make_attendance(name: str) -> Attendance | None:
    # None for one rank, and for a fake group, whose store cannot count.
    size = dist.get_world_size()
    if size == 1:
        return None
    try:
        return Attendance(store_of("zerostart"), name, dist.get_rank(), size, group_timeout().total_seconds())
    except RuntimeError:
        return None


#: Names of this thread's open phases, outermost first.
_phases: ContextVar[tuple[str, ...]] = ContextVar("_phases", default=())


def _call(during: str) -> str:
    outer = _phases.get()[:1]
    return f"'{during}' ({outer[0]})" if outer and outer[0] != during else f"'{during}'"


#: Interval between two messages while ranks wait for slow work of rank 0, in seconds.
_MEETING_SECONDS = 0.5


@dataclass(frozen=True)
class World:
    """Rank, size, and the process group for messages; None for a single process."""

    rank: int
    size: int
    group: Any

    # All methods are collective: all ranks call them in one order, with the same `during`.
    def all_gather_object(self, value: T, during: str) -> list[T]:
        """Return ``value`` of every rank, in rank order.

        All methods raise PeerError if a rank has died or does not answer, ConfigError if the ranks make
        different calls, and the error of a rank that has failed.
        """
        if self.size == 1:
            return [value]
        data, failure = _pickle(value)
        # No bodies: all ranks have the same bytes.
        gathered = self._meet(during, failure, data, gather=True).bodies or [data] * self.size
        # Return the own value itself, not a copy.
        return [value if rank == self.rank else pickle.loads(d) for rank, d in enumerate(gathered)]

    def broadcast_object(self, make: Callable[[], T], during: str, source: int = 0) -> T:
        """Return the result of ``make()`` on rank ``source``, or raise its error."""
        result, data = None, b""
        failure: BaseException | None = None
        if self.rank == source:
            try:
                result = make()
                data, failure = _pickle(result) if self.size > 1 else (b"", None)
            except BaseException as error:
                failure = error
        with DeferredSignals() as signals:
            head = self._meet(during, failure, data)
            if self.size > 1:
                # Only the source has data: the longest data is its own.
                buffer = _make_buffer(head.longest, data)
                self._transfer(during, dist.broadcast, buffer, src=source)
                result = result if self.rank == source else pickle.loads(buffer.numpy().data)
        signals.deliver()
        value: T = result  # type: ignore[assignment]  # every rank has it now
        return value

    def broadcast_slow(self, make: Callable[[], T], during: str) -> T:
        """Broadcast a result of rank 0 that may take longer than the timeout."""
        if self.size == 1:
            return self.broadcast_object(make, during)
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(make())
            except BaseException as error:
                result.set_exception(error)

        if self.rank == 0:
            threading.Thread(target=work, daemon=True).start()
        while self.broadcast_object(lambda: bool(wait([result], _MEETING_SECONDS).not_done), during):
            continue
        return self.broadcast_object(result.result, during)

    def all_reduce_sum(self, values: torch.Tensor, during: str) -> torch.Tensor:
        """Sum a 1-D CPU tensor of integers over all ranks."""
        total = values.clone()
        with DeferredSignals() as signals:
            # Tensors of different lengths would give wrong sums, or hang.
            if lengths := self._meet(during, None, b"%d" % values.numel(), gather=True).bodies:
                raise _divergence([f"{length.decode()} numbers of '{during}'" for length in lengths])
            if self.size > 1 and total.numel():
                self._transfer(during, dist.all_reduce, total)
        signals.deliver()
        return total

    def exchange(self, messages: Sequence[torch.Tensor], during: str) -> list[torch.Tensor]:
        """Send each rank its 1-D CPU tensor of bytes; return the received ones."""
        if self.size == 1:
            self._meet(during, None)
            return list(messages)
        with DeferredSignals() as signals:
            self._meet(during, None)
            sizes = torch.tensor([message.numel() for message in messages], device="cpu")
            theirs = torch.empty_like(sizes)
            self._transfer(during, dist.all_to_all_single, theirs, sizes)
            incoming, outgoing = theirs.tolist(), sizes.tolist()
            outbox = torch.cat(list(messages))
            inbox = torch.empty(sum(incoming), dtype=torch.uint8, device="cpu")
            self._transfer(during, dist.all_to_all_single, inbox, outbox, incoming, outgoing)
        signals.deliver()
        return list(torch.split(inbox, incoming))

    def raise_together(self, failure: BaseException | None, during: str) -> None:
        """Raise the error of the first failed rank on every rank."""
        self._meet(during, failure)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a body on every rank, and raise the error of one rank on all.

        Phases may be nested. An interrupt is a PeerError on the other ranks.
        """
        # Do not send an error again that every rank has raised since this phase began.
        start = now()
        failure: BaseException | None = None
        outer = _phases.get()
        _phases.set((*outer, name))
        try:
            yield
        # A generator is closed at another time on each rank.
        except GeneratorExit:
            raise
        except BaseException as error:
            agreed = find_agreed(error, start)
            if agreed is error:
                raise
            if agreed is not None:  # The rank that failed does not know the wrapper.
                raise agreed from None
            failure = error
        finally:
            _phases.set(outer)
        self.raise_together(failure, name)

    @contextlib.contextmanager
    def collectives(self, during: str, prepare: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """Call collectives of other libraries inside, and nothing else that may fail.

        Do what may fail in ``prepare``; its result is yielded. An error inside is raised at once, and the
        other ranks raise PeerError when this process ends.
        """
        prepared = None
        failure: BaseException | None = None
        try:
            prepared = prepare()
        except BaseException as error:
            failure = error
        with DeferredSignals() as signals:
            self.raise_together(failure, during)
            start, groups = now(), list_groups()
            try:
                yield prepared
            except BaseException as error:
                if isinstance(error, RuntimeError) and is_lost(error):
                    raise self._lose_rank(during) from error
                if self.size > 1 and find_agreed(error, start) is None:
                    # Mark it as agreed: the other ranks wait in the library's call, not for a phase.
                    self._raise(error, pickle_error(error), None)
                raise
            # torch gives new groups another timeout than the default group's.
            share_timeout(groups)
        signals.deliver()

    def _meet(
        self, during: str, failure: BaseException | None, data: bytes = b"", gather: bool = False
    ) -> _Head:
        """Compare all ranks in one short message; raise the error of a failed rank.

        With ``gather``, the result has the data of all ranks if they differ.
        """
        if self.size == 1:
            if failure is not None:
                self._raise(failure, pickle_error(failure), None)
            return _Head(len(data), [])
        report, place = b"" if failure is None else pickle_error(failure), during.encode()
        with DeferredSignals() as signals:
            # One MAX gives the buffer lengths. The maxima of a hash and its negative cancel only if all
            # hashes are equal.
            values = [len(data), len(place), len(report), *_signed_hashes(place), *_signed_hashes(data)]
            # The largest negative rank is the first failed rank; -size means "has not failed".
            values += [-self.size, 1] if failure is None else [-self.rank, 0]
            maxima = torch.tensor(values, device="cpu")
            self._transfer(during, dist.all_reduce, maxima, dist.ReduceOp.MAX)
            longest, place_length, length, *numbers, first, has_others = maxima.tolist()
            astray, unlike = numbers[0] != -numbers[1], numbers[2] != -numbers[3]
            failed, bodies = first > -self.size, []
            if failed:
                # All ranks have the same maxima and take the same branch. `length` is the longest report of
                # any rank; pickle ignores the zeros after a shorter one.
                buffer = _make_buffer(length, report if self.rank == -first else b"")
                self._transfer(during, dist.broadcast, buffer, src=-first)
            elif astray:
                bodies = self._gather_bodies(during, place, place_length)
            elif gather and unlike:
                bodies = self._gather_bodies(during, data, longest)
        try:
            signals.deliver()
        except BaseException as interrupt:
            if failed or astray:  # the other ranks raise too
                mark_agreed(interrupt)
            raise
        if failed:
            self._raise(failure, buffer.numpy().tobytes(), -first if has_others else None)
        if astray:
            raise _divergence([f"'{body.decode()}'" for body in bodies])
        return _Head(longest, bodies)

    def _raise(self, failure: BaseException | None, report: bytes, rank: int | None) -> NoReturn:
        if failure is not None and not isinstance(failure, Exception):
            mark_agreed(failure)
            raise failure
        error = restore_error(report, rank)
        mark_agreed(error)
        # The cause is for this rank's log.
        raise error from failure

    def _gather_bodies(self, during: str, message: bytes, longest: int) -> list[bytes]:
        # all_gather needs rows of one length: each begins with the length of its message.
        sized = len(message).to_bytes(8, "little") + message
        own = _make_buffer(8 + longest, sized)
        rows = own.new_empty(self.size, own.numel())
        self._transfer(during, dist.all_gather, list(rows), own)
        return [row[8:][: int.from_bytes(row[:8].tobytes(), "little")].tobytes() for row in rows.numpy()]

    def _transfer(
        self, during: str, collective: Callable[..., Any], *arguments: object, **options: object
    ) -> None:
        at = _call(during)
        try:
            work = collective(*arguments, group=self.group, async_op=True, **options)
            attendance = _attendances.get(self.group)
            if attendance is None:
                work.wait()
            else:
                attendance.wait(work, at, lambda names: str(self._dead_rank_error(at, names)))
        except PeerError:
            raise
        except RuntimeError as error:
            raise self._lose_rank(during) from error

    def _lose_rank(self, during: str) -> PeerError:
        return mark_lost(self._dead_rank_error(_call(during), ""))

    def _dead_rank_error(self, call: str, names: str) -> PeerError:
        return PeerError(
            f"a rank died or stopped answering during {call}{(f' ({names})' if names else '')} in the "
            f"process group of {self.size} ranks; that rank's own output, or the system log if memory "
            "ran out, says why. The operation in progress is incomplete: start all ranks again"
        )


class _Head(NamedTuple):
    #: Size of the longest data, in bytes.
    longest: int
    #: Data of every rank; empty if all are equal or nothing was gathered.
    bodies: list[bytes]


def _signed_hashes(data: bytes) -> tuple[int, int]:
    number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
    return number, -number


def is_lost(error: RuntimeError) -> bool:
    """Return True for the error of a collective that lost a rank."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _make_buffer(length: int, data: bytes) -> torch.Tensor:
    buffer = torch.zeros(length, dtype=torch.uint8, device="cpu")
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return buffer


def _pickle(value: object) -> tuple[bytes, Exception | None]:
    try:
        return pickle.dumps(value), None
    except Exception as error:
        return b"", error


def _divergence(places: Sequence[str]) -> ConfigError:
    first = next(rank for rank, place in enumerate(places) if place != places[0])
    error = ConfigError(
        f"the ranks do not do the same: rank 0 is at {places[0]} and rank {first} at {places[first]}; call "
        "the same functions of zerostart, with the same arguments, on every rank"
    )
    mark_agreed(error)
    return error


# gloo's thread releases a message shortly after the wait for it. If Python ends before, the process aborts:
# one of six scripts that end with a collective, with torch 2.13.
atexit.register(time.sleep, 0.05)
