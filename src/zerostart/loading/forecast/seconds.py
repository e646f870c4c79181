"""How long reading takes at given rates, rank by rank.

The model of ``transfer/planning/strategy.py``, for one machine at a time: its ranks share the rate at which
storage gives bytes to it, and find each other's bytes in its page cache; each byte is copied out of that, or
off an exchange, by processors that they share as well. A rank has its part of both rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerostart.engines.placements import RANKS_OF_A_MACHINE
from zerostart.errors import ConfigError
from zerostart.loading.forecast.result import RankForecast
from zerostart.transfer.planning import Rates


def rates_of(assumed: Rates, storage: float | None, interconnect: float | None) -> Rates:
    """``assumed`` rates, with those that are given, in bytes a second, in their place.

    ``storage`` is what one machine gets, of its disk or over its link. Raises ConfigError for what is no
    rate.
    """
    for name, value in (("storage_rate", storage), ("interconnect_rate", interconnect)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r} must be a number of bytes a second")
    if storage is not None:
        assumed = replace(assumed, link=float(storage))
    if interconnect is not None:
        assumed = replace(assumed, interconnect=float(interconnect))
    return assumed


@dataclass(frozen=True)
class _Machine:
    """What its ranks share: seconds for each byte that one of them reads."""

    rates: Rates
    ranks: int
    #: Bytes that come from storage for each byte that is read: fewer where ranks read the same.
    differ: float

    def seconds(self, read: int, received: int) -> float:
        storage = read * self.ranks * self.differ / self.rates.link
        copied = read * self.ranks / self.rates.copy
        return max(storage, copied, 2 * received / self.rates.interconnect)


def timed(
    ranks: Sequence[RankForecast],
    received: Sequence[int],
    world_size: int,
    stored: int,
    rates: Rates,
) -> tuple[RankForecast, ...]:
    """``ranks`` with the seconds that each reads; ``stored``: bytes of the files."""
    local = min(world_size, RANKS_OF_A_MACHINE)
    wanted = sum(rank.read_bytes for rank in ranks) * local / max(1, len(ranks))
    machine = _Machine(rates, local, min(1.0, stored / wanted) if wanted else 1.0)
    got = received or [0] * len(ranks)
    return tuple(
        replace(rank, read_seconds=machine.seconds(rank.read_bytes, more))
        for rank, more in zip(ranks, got, strict=True)
    )
