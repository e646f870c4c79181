"""Own slice or read once: what either takes, by a model of storage and interconnect.

Where several ranks want the same bytes (replicas, buffers, columns of the same rows), each can read what it
wants, or each byte can be read by one rank that sends it to the others. With W the bytes wanted by all ranks,
F those that storage gives for them if each rank asks on its own (whole rows for narrow columns), U those of
them that differ, M machines, S the rate of storage shared by all machines, N that of one machine's link to
it (or of its disk), C the rate at which a machine copies out of its page cache, X a rank's interconnect, B
that of one machine to the others and w the most that one rank wants:

    own slice:  max(M V / S, V / N, W / (M C)),  V = min(U, F / M): a machine's page cache serves its ranks,
                                                 but V = F / M where storage is a store without one
    read once:  max(U / S, U / (M N), 2 e / X, 2 e n / C, b / B) + one chunk's time,  e = w (1 - 1 / ranks),
                b = min(U, W / M) (1 - 1 / M)

with n ranks on a machine, whose messages are copied in and out, and a rank sending and receiving in turns. A
machine gets what its ranks want once, but for what they read; it sends as much, at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

GB = 1e9
#: Reading once has to be this much faster: it is the more delicate way.
MARGIN = 0.9


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second."""

    #: Of storage, shared by all machines.
    shared: float = math.inf
    #: Of one machine's link to it, or of its disk.
    link: float = 2 * GB
    #: Of a machine's copies, out of its page cache for one.
    copy: float = 8 * GB
    #: Of one rank.
    interconnect: float = 1 * GB
    #: Of one machine to the others, in each direction.
    network: float = 3.125 * GB

    @classmethod
    def slowest(cls, rates: Sequence[Rates]) -> Rates:
        """The lowest of each: the last rank counts."""
        return cls(*(min(getattr(r, f.name) for r in rates) for f in fields(cls)))


@dataclass(frozen=True, slots=True)
class Traffic:
    """What ranks want of the files."""

    #: Bytes that all ranks together want.
    wanted: int
    #: How many of them differ.
    differ: int
    #: Bytes that one rank wants, at most.
    most: int
    ranks: int
    machines: int = 1
    #: Most bytes of a request in an exchange.
    chunk: int = 0
    #: Bytes that storage gives if each rank reads what it wants; never fewer than ``wanted``.
    fetched: int = 0
    #: Whether a machine's page cache serves its ranks; else V is F / M.
    cached: bool = True


@dataclass(frozen=True, slots=True)
class ReadStrategy:
    """Whether bytes are read once or by each rank, with the estimated seconds of either way."""

    once: bool
    own_seconds: float
    once_seconds: float
    #: Whether an argument says so, and not the estimate.
    forced: bool = False
    #: Read once, most bytes of a request.
    chunk_size: int = 0
    #: Read once, in how many rounds, file after file: what ranks tell each other has to stay small.
    rounds: int = 1

    def __str__(self) -> str:
        ways = "each byte read once and exchanged", "own slices"
        taken, other = ways if self.once else ways[::-1]
        first, second = (self.once_seconds, self.own_seconds)[:: 1 if self.once else -1]
        why = " as asked" if self.forced else ""
        return f"{taken}{why} (estimated {first:.2g} s; {other}: {second:.2g} s)"


def choose(traffic: Traffic, rates: Rates, exchange: bool | None = None) -> ReadStrategy:
    """The cheaper way, or the one that is asked for: to ``exchange`` what is read, or not."""
    machines, ranks = max(1, traffic.machines), max(1, traffic.ranks)
    fetched = max(traffic.wanted, traffic.fetched)
    of_machine = min(traffic.differ, fetched / machines) if traffic.cached else fetched / machines
    own = max(
        machines * of_machine / rates.shared,
        of_machine / rates.link,
        traffic.wanted / machines / rates.copy,
    )
    received = traffic.most * (1 - 1 / ranks) if fetched > traffic.differ else 0.0
    crossing = min(traffic.differ, traffic.wanted / machines) * (1 - 1 / machines) if received else 0.0
    once = max(
        traffic.differ / rates.shared,
        traffic.differ / machines / rates.link,
        traffic.differ / machines / rates.copy,
        2 * received / rates.interconnect,
        2 * received * ranks / machines / rates.copy,
        crossing / rates.network,
    )
    once += traffic.chunk / rates.link
    chosen = exchange if exchange is not None else once < MARGIN * own
    return ReadStrategy(chosen, own, once, exchange is not None, traffic.chunk if chosen else 0)
