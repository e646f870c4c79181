"""The loss on held-out examples: the same batches every time, whatever the number of ranks.

No rank holds them: latents and embeddings of as many as are held out would fill the memory of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerostart.errors import ConfigError
from zerostart.training.loop.failures import Failures
from zerostart.training.loop.session import Session
from zerostart.training.loop.task import Batch, Collator, Items, TaskBatches

#: The epoch for which a task draws what held-out examples need: none that a run comes to.
HELD_OUT = -1

Weighed = tuple[Batch, int]


class _Made(Sequence[Weighed]):
    """Batches of the examples with the numbers ``chosen``, each made whenever it is asked for."""

    def __init__(self, task: TaskBatches, items: Items, collator: Collator, chosen: list[list[int]]) -> None:
        self._task = task
        self._items = items
        self._collator = collator
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: Any) -> Any:
        batch = self._collator([self._items[index] for index in self._chosen[number]])
        return self._task.weighed(self._task.drawn(batch, HELD_OUT))


def held_out_batches(task: TaskBatches, items: Items, batch_size: int, seed: int) -> Sequence[Weighed]:
    """Batches of ``batch_size`` examples in their order, with the weight of each.

    A batch has fewer where the next example does not go with it. It is made when it is asked for, unless the
    collator draws: then once, for the same draws each time. Raises :class:`ConfigError` if the weight of all
    of them is 0.
    """
    # The same seed on every rank and in every run, so that the same tokens are hidden.
    collator = task.collator(seed)
    batches: Sequence[Weighed] = _Made(task, items, collator, list(_chosen(items, batch_size)))
    # By their numbers: an IndexError of an example is no end of them.
    if getattr(collator, "generator", None) is not None:
        batches = [batches[number] for number in range(len(batches))]
    if not any(batches[number][1] for number in range(len(batches))):
        raise ConfigError(task.weightless)
    return batches


def _chosen(items: Items, batch_size: int) -> Iterator[list[int]]:
    """The numbers of the examples of each batch."""
    chosen: list[int] = []
    shapes = items.shapes()
    for index in range(len(items)):
        if chosen and (len(chosen) == batch_size or shapes[index] != shapes[chosen[0]]):
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen


class HeldOut:
    """One rank's share of the held-out batches.

    Of ``count`` batches at a time a rank has that at ``place``. All ranks have the same number, for a sharded
    forward is a collective; where they do not divide evenly the first batch is repeated with weight 0.
    """

    def __init__(self, batches: Sequence[Weighed], place: int, count: int) -> None:
        self._batches = batches
        # Up to the number of batches rounded up to whole rounds: numbers beyond the last are the repeated
        # ones.
        self._numbers = range(place, -(-len(batches) // count) * count, count)

    def loss(self, session: Session, failures: Failures) -> float:
        """Mean loss by weight over all ranks; collective. Raises what a rank fails to read, on all."""
        from accelerate.utils import send_to_device

        # Without dropout; what is drawn for an example follows from its number, so that two evaluations
        # differ by the weights alone.
        session.model.eval()
        total = weight = 0.0
        with torch.no_grad():
            for number in self._numbers:
                with failures.deferred():
                    batch, counted = self._batch(number)
                failures.sum_over_ranks()  # before the forward, in which ranks wait for each other
                total += float(session.forward(send_to_device(batch, session.device))) * counted
                weight += counted
        session.model.train()
        # Sums of products and of weights, and one division: the mean is the same however batches fell to
        # ranks.
        total, weight = session.sum_over_ranks(total, weight)
        return total / weight

    def _batch(self, number: int) -> Weighed:
        return self._batches[number] if number < len(self._batches) else (self._batches[0][0], 0)
