"""Bytes that several ranks want: who reads which of them.

Ranks that hold the same share of a parameter are its replica group. Each of the R ranks of a group reads 1/R
of the bytes, and the group passes them round. All ranks work out the same groups and batches, so that no
message needs an announcement.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zerostart.transfer.planning.plan import Read

#: Ranks, ascending.
Group = tuple[int, ...]


def find_groups(keys: Sequence[Iterable[Hashable]]) -> dict[Hashable, Group]:
    """Find the ranks that have each key; ``keys`` has those of every rank."""
    found: dict[Hashable, list[int]] = {}
    for rank, own in enumerate(keys):
        for key in own:
            found.setdefault(key, []).append(rank)
    return {key: tuple(ranks) for key, ranks in found.items()}


def find_levels(groups: Iterable[Group]) -> dict[Group, int]:
    """Number the groups of several ranks so that those of one level have no rank in common."""
    next_level: dict[int, int] = {}
    levels = {}
    for group in sorted({group for group in groups if len(group) > 1}):
        levels[group] = max(next_level.get(rank, 0) for rank in group)
        next_level.update(dict.fromkeys(group, levels[group] + 1))
    return levels


@dataclass(frozen=True, slots=True)
class Batch:
    """Reads that one rank makes for its group, and that travel in one message of ``nbytes``."""

    reads: tuple[Read, ...]
    nbytes: int


def make_rounds(reads: Sequence[Read], limit: int, ranks: int) -> list[list[Batch]]:
    """Share ``reads`` out to ``ranks``: in each round one batch for each of them, while there are any.

    A batch has at most ``limit`` bytes, or one read.
    """
    # Small batches where there is little to read: every rank is to read its share of it.
    share = sum(read.nbytes for read in reads) // ranks
    every = [Batch(tuple(some), sum(r.nbytes for r in some)) for some in batches(reads, min(limit, share))]
    return [every[first : first + ranks] for first in range(0, len(every), ranks)]


def batches(reads: Iterable[Read], limit: int) -> Iterator[list[Read]]:
    """Consecutive reads of at most ``limit`` bytes together, or one read that is longer."""
    batch: list[Read] = []
    total = 0
    for read in reads:
        if batch and total + read.nbytes > limit:
            yield batch
            batch, total = [], 0
        batch.append(read)
        total += read.nbytes
    if batch:
        yield batch


def read_by_place(reads: Sequence[Read], limit: int, ranks: int) -> list[list[Read]]:
    """The reads that the rank at each place of a group of so many ``ranks`` makes."""
    of_place: list[list[Read]] = [[] for _ in range(ranks)]
    for batch_round in make_rounds(reads, limit, ranks):
        for place, batch in enumerate(batch_round):
            of_place[place] += batch.reads
    return of_place
