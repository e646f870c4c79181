"""What weights can be pushed to, and how it is told apart: by what registered functions make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from zerostart.checkpoint.strict_json import JsonMapping
from zerostart.errors import ConfigError

if TYPE_CHECKING:
    from zerostart.distributed.world import World  # torch, which ``import zerostart`` does without


@runtime_checkable
class Driver(Protocol):
    """An engine whose workers have to be told when to connect, and when a push begins.

    Rank 0 of the trainer tells it. With an attribute ``in_process`` that is true, it lives in the rank that
    it was given to; where every rank was given one, each rank tells its own. One with a method
    ``served(version)`` is told when all workers have a version. One whose method ``worker()`` gives a
    ``Receiver``, of the one worker, which is in the rank's very process, is told of nothing else: the ranks
    fill that themselves.
    """

    #: How many workers connect.
    workers: int

    def join(self, how: JsonMapping) -> None:
        """Have the workers connect: ``address`` and ``secret`` are for their ``Connection``.

        Called in a thread of its own; returns when they have, and raises what the engine raised.
        """
        ...

    def follow(self, version: int) -> None:
        """Have each worker call ``Connection.follow``; returns when all are through.

        Called in a thread of its own, for each push; raises what the engine raised.
        """
        ...

    def leave(self) -> None:
        """Have the workers close their connections; raises nothing."""
        ...


@dataclass(frozen=True)
class Engines:
    """What has to be told of a refit and of its pushes: one engine by rank 0, or each rank's own by it."""

    #: What this rank tells; None where another rank does.
    driver: Driver | None
    #: Workers of all of them.
    workers: int
    #: Whether each rank has an engine of its own.
    one_each: bool

    @classmethod
    def of(cls, target: object, driver: Driver | None, world: World) -> Engines | None:
        """That of the ``target`` of each rank, whose ``driver`` is None where it is no engine; collective.

        None where no rank has one. Raises ConfigError where ranks have what does not go together.
        """
        inside = bool(getattr(driver, "in_process", False))
        mine = (driver is not None, inside, target is None, 0 if driver is None else driver.workers)
        ranks = world.all_gather_object(mine, "looking at the target")
        if not any(given for given, *_ in ranks):
            return None
        if world.size > 1 and all(inside for _, inside, *_ in ranks):
            return cls(driver, sum(workers for *_, workers in ranks), True)
        alone = ranks[0][0] and all(absent for _, _, absent, _ in ranks[1:])
        alike = all(given and not inside for given, inside, *_ in ranks)
        if not alone and not alike:
            raise ConfigError(
                "target is an engine on some ranks and none, or one of another kind, on others: pass an "
                "engine within each rank on all of them, or the address of a server, or None on ranks other "
                "than rank 0"
            )
        return cls(driver if world.rank == 0 else None, ranks[0][3], False)


_drivers: list[Callable[[object], Driver | None]] = []


def register_target(made: Callable[[object], Driver | None]) -> Callable[[object], Driver | None]:
    """Register a function that makes the driver of a target, or None of what it does not know."""
    _drivers.append(made)
    return made


def driver_of(target: object) -> Driver | None:
    """The driver of ``target``; None for what no registered function knows."""
    if isinstance(target, Driver):
        return target
    return next((driver for made in _drivers if (driver := made(target)) is not None), None)
