"""The ranks of a load: who they are, and agreeing on success.

A load makes no collective call but these: one exchange about the source, one broadcast of the catalog, and
one agreement after each phase (a mapping that only some ranks hold is served to the others besides, see
``serving``). Without the agreement a rank that fails leaves the others waiting in the engine's next
collective.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerostart.errors import ConfigError, PeerError, ZerostartError

__all__ = ["World", "current_world", "default_device", "joined_world"]

T = TypeVar("T")


def default_device() -> torch.device:
    """This rank's accelerator, else the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None, "an available accelerator has a type"
        index = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
        return torch.device(kind.type, index)
    return torch.device("cpu")


def current_world() -> World:
    """The initialised process group's world; a group of one where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return World(0, 1, None)
    return World(dist.get_rank(), dist.get_world_size(), _control_group())


def joined_world() -> World:
    """The process group's world; a group of one is made for a process that is alone."""
    if not dist.is_initialized():
        launched = int(os.environ.get("WORLD_SIZE", "1") or 1)
        if launched > 1:
            raise ConfigError(
                f"the launcher started {launched} ranks, but there is no process group: call "
                "torch.distributed.init_process_group() before zerostart.load"
            )
        device = default_device().type
        backend = (
            "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
        )
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

        Raises PeerError if a rank has died or does not answer.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except (RuntimeError, dist.DistBackendError) as error:
            raise PeerError(
                f"a rank died or stopped answering during '{during}' (noticed by the process group of "
                f"{self.size} ranks); its own output, or the system log where memory ran out, tells why. "
                "Nothing was loaded: start all ranks again"
            ) from error
        return values

    def broadcast_object(self, make: Callable[[], T], during: str, source: int = 0) -> T:
        """What ``make`` gives on rank ``source``, or its error, on every rank."""
        if self.size == 1:
            return make()
        made: list[Any] = [None]
        failure: BaseException | None = None
        if self.rank == source:
            try:
                made = [make()]
            except Exception as error:
                failure = error
        self.raise_together(failure, during)
        try:
            dist.broadcast_object_list(made, src=source, group=self.group)
        except (RuntimeError, dist.DistBackendError) as error:
            raise PeerError(f"rank {source} died during '{during}'; start all ranks again") from error
        value: T = made[0]
        return value

    def raise_together(self, failure: BaseException | None, during: str) -> None:
        """Raise the first failing rank's error on every rank, with the same type and text."""
        reports = self.all_gather_object(_report(failure), during)
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if not failed:
            return
        rank, report = failed[0]
        error = _restore(report, rank if self.size > 1 and len(failed) < self.size else None)
        raise error from failure

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a body on every rank; if it fails on one, the same error is raised on all."""
        failure: Exception | None = None
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            failure = error
        self.raise_together(failure, name)


def _report(failure: BaseException | None) -> tuple[bytes | None, str] | None:
    """An error in a form that travels: pickled where it is ours, and its text in any case."""
    if failure is None:
        return None
    text = str(failure) if isinstance(failure, ZerostartError) else f"{type(failure).__name__}: {failure}"
    if isinstance(failure, ZerostartError):
        return pickle.dumps(failure), text
    return None, text


def _restore(report: tuple[bytes | None, str], rank: int | None) -> ZerostartError:
    """The error to raise; names the rank where not all ranks failed."""
    data, text = report
    error: ZerostartError = pickle.loads(data) if data is not None else ZerostartError(text)
    if rank is not None:
        error.args = (f"rank {rank}: {text}", *error.args[1:])
    return error
