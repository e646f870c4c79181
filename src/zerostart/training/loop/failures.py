"""What one rank of a run fails with by itself: told to the others where all of them meet anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zerostart.distributed.failures import agreed_since, mark_agreed, now
from zerostart.distributed.world import World
from zerostart.errors import PeerError


class Failures:
    """Keeps what this rank has failed with until the ranks meet, for the others are on their way there.

    Between two collectives of the engine no message can be sent: what fails there is kept while the rank goes
    on, and every sum over the ranks has one number more, by which all learn of it.
    """

    def __init__(self, world: World, summing: Callable[..., list[float]]) -> None:
        self._world = world
        self._summing = summing
        self._first: BaseException | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside is what no collective is in; afterwards the rank goes on to the next sum or meeting."""
        begun = now()
        try:
            yield
        except BaseException as error:
            if isinstance(error, PeerError) or agreed_since(error, begun) is not None:
                raise  # as the others do
            self._first = self._first or error

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Each value added up over all ranks; raises the first rank's failure on all if any has failed."""
        *sums, failed = self._summing(*values, float(self._first is not None))
        if failed:
            self.tell()
        return sums

    def tell(self) -> None:
        """Meet, and raise the first rank's failure on all if any has failed; collective."""
        self._world.raise_together(self._first, "training")


@contextmanager
def untold() -> Iterator[None]:
    """Inside are collectives of the engine, in which the others wait: there is no telling them of an error.

    They learn of it when this process ends, and are told what that is by `PeerError`.
    """
    try:
        yield
    except BaseException as error:
        mark_agreed(error)
        raise
