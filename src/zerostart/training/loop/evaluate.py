"""Compute the loss on held-out examples, independent of the number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from zerostart.training.loop.failures import Failures
from zerostart.training.loop.session import Session
from zerostart.training.loop.task import Items, Task

#: The epoch for random draws of held-out examples, which no training epoch has.
HELD_OUT = -1


class HeldOut:
    """One rank's share of the held-out batches: every ``count``-th one from ``place`` on.

    All ranks have the same number, for a sharded forward is a collective: if the batches do not divide
    evenly, the first is repeated with weight 0.
    """

    def __init__(
        self, task: Task, items: Items, batch_size: int, seed: int, place: int = 0, count: int = 1
    ) -> None:
        self._task = task
        self._items = items
        self._collator = task.collator(seed)
        self._batches = list(_divide(items, batch_size))
        # Rounded up to whole rounds: numbers beyond the last batch are repeated ones.
        self._numbers = range(place, -(-len(self._batches) // count) * count, count)

    def loss(self, session: Session, failures: Failures) -> float:
        """Return the mean loss over all examples of all ranks; collective.

        Raises a rank's error on all.
        """
        from accelerate.utils import send_to_device

        # Two evaluations differ only by the weights: draws follow from the examples' numbers.
        session.model.eval()
        total = weight = 0.0
        with torch.no_grad():
            for number in self._numbers:
                repeated = number >= len(self._batches)
                indices = self._batches[0 if repeated else number]
                with failures.deferred():
                    examples = [self._items[index] for index in indices]
                    batch = self._task.drawn(self._collator(examples), HELD_OUT)
                failures.sum_over_ranks()  # before the forward, a collective
                counted = 0 if repeated else len(indices)
                total += float(session.forward(send_to_device(batch, session.device))) * counted
                weight += counted
        session.model.train()
        # One division of sums: the mean does not depend on the division among ranks.
        total, weight = session.sum_over_ranks(total, weight)
        return total / weight


def _divide(items: Items, batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of up to ``batch_size`` consecutive examples of equal shapes."""
    shapes = items.shapes()
    for _, numbers in itertools.groupby(range(len(items)), key=shapes.__getitem__):
        alike = list(numbers)
        yield from (alike[start : start + batch_size] for start in range(0, len(alike), batch_size))
