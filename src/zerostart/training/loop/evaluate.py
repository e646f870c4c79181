"""The loss on held-out examples: the same batches every time, whatever the number of ranks.

No rank holds them: latents and embeddings of as many as are held out would fill the memory of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zerostart.training.loop.failures import Failures
from zerostart.training.loop.session import Session
from zerostart.training.loop.task import Batch, Items, Task

#: The epoch for which a task draws what held-out examples need: none that a run comes to.
HELD_OUT = -1


class HeldOut:
    """One rank's share of the held-out batches.

    Of ``count`` batches at a time a rank has that at ``place``. All ranks have the same number, for a sharded
    forward is a collective; where they do not divide evenly the first batch is repeated with weight 0.
    """

    def __init__(
        self, task: Task, items: Items, batch_size: int, seed: int, place: int = 0, count: int = 1
    ) -> None:
        self._task = task
        self._items = items
        self._collator = task.collator(seed)
        self._chosen = list(_chosen(items, batch_size))
        # Up to the number of batches rounded up to whole rounds: numbers beyond the last are the repeated
        # ones.
        self._numbers = range(place, -(-len(self._chosen) // count) * count, count)

    def loss(self, session: Session, failures: Failures) -> float:
        """Mean loss over all examples of all ranks; collective. Raises what a rank fails to read, on all."""
        from accelerate.utils import send_to_device

        # Without dropout; what is drawn for an example follows from its number, so that two evaluations
        # differ by the weights alone.
        session.model.eval()
        total = weight = 0.0
        with torch.no_grad():
            for number in self._numbers:
                repeated = number >= len(self._chosen)
                indices = self._chosen[0 if repeated else number]
                with failures.deferred():
                    batch = self._batch(indices)
                failures.sum_over_ranks()  # before the forward, in which ranks wait for each other
                counted = 0 if repeated else len(indices)
                total += float(session.forward(send_to_device(batch, session.device))) * counted
                weight += counted
        session.model.train()
        # Sums of products and of weights, and one division: the mean is the same however batches fell to
        # ranks.
        total, weight = session.sum_over_ranks(total, weight)
        return total / weight

    def _batch(self, indices: list[int]) -> Batch:
        # Made when it is asked for, with the draws of an epoch that no run comes to.
        return self._task.drawn(self._collator([self._items[index] for index in indices]), HELD_OUT)


def _chosen(items: Items, batch_size: int) -> Iterator[list[int]]:
    """The numbers of the examples of each batch: fewer where the next example does not go with it."""
    chosen: list[int] = []
    shapes = items.shapes()
    for index in range(len(items)):
        if chosen and (len(chosen) == batch_size or shapes[index] != shapes[chosen[0]]):
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen
