"""The ranks of a load: who they are, and agreeing on success.

One rule: wherever ranks meet, each first says whether it has failed. A rank that fails inside a ``phase``
goes to the end of it, and tells its error there; the others learn of it in the collective that they are in by
then, whichever that is, and all raise it. So phases may be nested, and code between collectives may fail
anywhere inside one. What other libraries exchange by themselves knows nothing of this: such calls are made
inside ``collectives``, before which the ranks meet, and with nothing in it that one rank could fail at by
itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from zerostart.distributed.interrupts import HeldSignals
from zerostart.distributed.reports import agreed_since, mark_agreed, now, report_of, restored
from zerostart.errors import ConfigError, PeerError

__all__ = ["World", "backend_of", "current_world", "default_device", "joined_world"]

T = TypeVar("T")


def default_device() -> torch.device:
    """This rank's accelerator, else the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None, "an available accelerator has a type"
        # As accelerate numbers them: a launcher may show each rank one device alone.
        rank = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
        return torch.device(kind.type, rank % max(1, torch.accelerator.device_count()))
    return torch.device("cpu")


def backend_of(device: torch.device) -> str:
    """What ``init_process_group`` is told: gloo for tensors on the host, beside the backend of ``device``.

    Raises ConfigError for an accelerator that no backend of torch's serves.
    """
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


def joined_world() -> World:
    """The process group's world; a group of one is made for a process that is alone.

    Raises ConfigError in one of several ranks that a launcher has started, where there is no group.
    """
    if not dist.is_initialized():
        launched = int(os.environ.get("WORLD_SIZE", "1") or 1)
        if launched > 1:
            raise ConfigError(
                f"the launcher started {launched} ranks, but there is no process group: call "
                "torch.distributed.init_process_group() before zerostart.load"
            )
        backend = backend_of(default_device())
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return current_world()


_control: dict[int, Any] = {}


def _control_group() -> Any:
    """A process group for small CPU messages: the default one if it is gloo, else one made once beside it."""
    default = dist.group.WORLD
    if "gloo" in str(dist.get_backend(default)):
        return default
    key = id(default)
    if key not in _control:
        _control.clear()
        _control[key] = dist.new_group(backend="gloo")
    return _control[key]


@dataclass(frozen=True)
class World:
    """Rank, size, and the group over which small messages go (None for a single process)."""

    rank: int
    size: int
    group: Any

    def all_gather_object(self, value: T, during: str) -> list[T]:
        """``value`` of every rank, in rank order.

        Raises PeerError if a rank has died or does not answer, ConfigError if the ranks do not do the same,
        and what another rank failed with meanwhile.
        """
        if self.size == 1:
            return [value]
        data, failure = _pickled(value)
        gathered, _ = self._meet(during, failure, data)
        return [value if rank == self.rank else pickle.loads(d) for rank, d in enumerate(gathered)]

    def broadcast_object(self, make: Callable[[], T], during: str, source: int = 0) -> T:
        """What ``make`` gives on rank ``source``, or its error, on every rank.

        Raises what ``all_gather_object`` raises.
        """
        made, data = None, b""
        failure: BaseException | None = None
        if self.rank == source:
            try:
                made = make()
                data, failure = _pickled(made) if self.size > 1 else (b"", None)
            except BaseException as error:
                failure = error
        with HeldSignals() as signals:
            _, lengths = self._meet(during, failure, announced=len(data))
            if self.size > 1:
                sent = _room(lengths[source], data)
                self._transfer(during, lambda: dist.broadcast(sent, src=source, group=self.group))
                made = made if self.rank == source else pickle.loads(sent.numpy().data)
        signals.deliver()
        value: T = made  # type: ignore[assignment]  # every rank has it now
        return value

    def all_reduce_sum(self, values: torch.Tensor, during: str) -> torch.Tensor:
        """The sum over all ranks of a 1-D CPU tensor of integers, of one length on all, on every rank.

        Raises as ``all_gather_object`` does, and ConfigError where the lengths differ.
        """
        total = values.clone()
        with HeldSignals() as signals:
            _, lengths = self._meet(during, None, announced=values.numel())
            if len(set(lengths)) > 1:
                raise _uneven(lengths, during)
            if self.size > 1 and total.numel():
                self._transfer(during, lambda: dist.all_reduce(total, group=self.group))
        signals.deliver()
        return total

    def raise_together(self, failure: BaseException | None, during: str) -> None:
        """Raise the first failing rank's error on every rank, with the same type and text.

        Raises what ``all_gather_object`` raises.
        """
        self._meet(during, failure)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a body on every rank; if it fails on one, the same error is raised on all, soon.

        Phases may be nested. An interrupt stays what it is on its own rank, and is a PeerError on the others.
        """
        begun = now()
        failure: BaseException | None = None
        try:
            yield
        except (PeerError, GeneratorExit):
            raise
        except BaseException as error:
            agreed = agreed_since(error, begun)
            if agreed is error:
                raise
            if agreed is not None:  # wrapped on the way, which the rank that failed knows nothing of
                raise agreed from None
            failure = error
        self.raise_together(failure, name)

    @contextlib.contextmanager
    def collectives(self, during: str, prepare: Callable[[], Any] = lambda: None) -> Iterator[Any]:
        """Inside, ranks make collective calls that are not of this class, and nothing else that may fail.

        What may is in ``prepare``, whose result is given; a rank that fails there, or has failed before,
        meets the others first. Signals are handled afterwards. What fails inside all the same (memory that
        runs out) is raised at once, here and by whatever phase is around: the others are not to be met, but
        wait in a call, and raise PeerError when this process ends.
        """
        prepared = None
        failure: BaseException | None = None
        try:
            prepared = prepare()
        except BaseException as error:
            failure = error
        with HeldSignals() as signals:
            self.raise_together(failure, during)
            begun = now()
            try:
                yield prepared
            except BaseException as error:
                if isinstance(error, RuntimeError) and _is_lost(error):
                    raise self._lost(during) from error
                if self.size > 1 and agreed_since(error, begun) is None:
                    self._raise(error, report_of(error), None)  # by itself: nobody can be met
                raise
        signals.deliver()

    def _meet(
        self, during: str, failure: BaseException | None, data: bytes = b"", announced: int = 0
    ) -> tuple[Sequence[bytes], list[int]]:
        """``data`` of every rank, and the lengths ``announced``; one small message if all ``data`` are empty.

        Raises, on every rank, the first error if any rank has a ``failure``, and ConfigError if the ranks are
        in different places.
        """
        if self.size == 1:
            if failure is not None:
                self._raise(failure, report_of(failure), None)
            return [data], [announced]
        report, place = b"" if failure is None else report_of(failure), during.encode()
        with HeldSignals() as signals:
            head = [failure is not None, zlib.crc32(place), len(report or data), announced, len(place)]
            heads = self._gathered(during, torch.tensor(head, device="cpu")).tolist()
            failed = [rank for rank, head in enumerate(heads) if head[0]]
            astray = not failed and len({head[1] for head in heads}) > 1
            message, lengths = data, [head[2] for head in heads]
            if failed:  # from here on reports alone are of interest
                message, lengths = report, [head[2] * head[0] for head in heads]
            elif astray:
                message, lengths = place, [head[4] for head in heads]
            bodies = self._bodies(during, message, lengths)
        try:
            signals.deliver()
        except BaseException as interrupt:
            if failed or astray:  # the others raise, and wait for nothing more
                mark_agreed(interrupt)
            raise
        if failed:
            self._raise(failure, bodies[failed[0]], failed[0] if len(failed) < self.size else None)
        if astray:
            raise _astray([body.decode() for body in bodies])
        return bodies, [head[3] for head in heads]

    def _raise(self, failure: BaseException | None, report: bytes, rank: int | None) -> NoReturn:
        if failure is not None and not isinstance(failure, Exception):
            mark_agreed(failure)
            raise failure
        error = restored(report, rank)
        mark_agreed(error)
        raise error from failure

    def _bodies(self, during: str, message: bytes, lengths: Sequence[int]) -> list[bytes]:
        """``message`` of every rank, of the ``lengths`` that are known."""
        if not any(lengths):
            return [b""] * self.size
        rows = self._gathered(during, _room(max(lengths), message))
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _gathered(self, during: str, own: torch.Tensor) -> torch.Tensor:
        """The 1-D tensor ``own`` of every rank, as rows."""
        rows = own.new_empty(self.size, own.numel())
        self._transfer(during, lambda: dist.all_gather(list(rows), own, group=self.group))
        return rows

    def _transfer(self, during: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise self._lost(during) from error

    def _lost(self, during: str) -> PeerError:
        return PeerError(
            f"a rank died or stopped answering during '{during}' (noticed by the process group of "
            f"{self.size} ranks); its own output, or the system log where memory ran out, tells why. "
            "What was under way is not complete: start all ranks again"
        )


def _is_lost(error: RuntimeError) -> bool:
    """Whether a collective raises it where another rank has gone; gloo has no exception of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _room(length: int, data: bytes) -> torch.Tensor:
    """``length`` bytes, the first of which are ``data``."""
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


def _uneven(lengths: Sequence[int], during: str) -> ConfigError:
    first = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
    error = ConfigError(
        f"the ranks do not do the same: during '{during}' rank 0 has {lengths[0]} numbers and rank {first} "
        f"{lengths[first]}; call the same functions of zerostart, with the same arguments, on every rank"
    )
    mark_agreed(error)
    return error


def _astray(places: Sequence[str]) -> ConfigError:
    first = next(rank for rank, place in enumerate(places) if place != places[0])
    error = ConfigError(
        f"the ranks do not do the same: rank 0 is at '{places[0]}' and rank {first} at '{places[first]}'; "
        "call the same functions of zerostart, with the same arguments, on every rank"
    )
    mark_agreed(error)
    return error
