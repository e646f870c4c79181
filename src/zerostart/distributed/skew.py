"""How much longer one rank took than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Skew:
    """The ranks that had read for the shortest and for the longest time, and the seconds of each."""

    fastest: int
    fastest_seconds: float
    slowest: int
    slowest_seconds: float

    @classmethod
    def of(cls, milliseconds: Sequence[int]) -> Skew:
        """That of ranks that had read for so long; of equal ones the lowest rank."""
        order = sorted((of_rank, rank) for rank, of_rank in enumerate(milliseconds))
        (first, fastest), last = order[0], order[-1][0]
        return cls(fastest, first / 1000, milliseconds.index(last), last / 1000)

    def __str__(self) -> str:
        return (
            f"ranks read for {self.fastest_seconds:.2f} s (rank {self.fastest}) to "
            f"{self.slowest_seconds:.2f} s (rank {self.slowest}, the last)"
        )
