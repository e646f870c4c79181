"""The loss on held-out examples: the same batches every time, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zerostart.errors import ConfigError
from zerostart.training.session import Session
from zerostart.training.tasks.base import Batch, Items, Task

__all__ = ["HELD_OUT", "HeldOut", "held_out_batches"]

#: The epoch for which a task draws what held-out examples need: none that a run comes to.
HELD_OUT = -1

Weighed = tuple[Batch, int]


def held_out_batches(task: Task, items: Items, batch_size: int) -> list[Weighed]:
    """Batches of ``batch_size`` examples in their order, with the weight of each.

    A batch has fewer where the next example does not go with it. Raises :class:`ConfigError` if the weight
    of all of them is 0.
    """
    # The same seed on every rank and in every run, so that the same tokens are hidden.
    collator = task.collator(task.config.train.seed)
    batches = []
    for chosen in _chosen(items, batch_size):
        batch = task.drawn(collator([items[index] for index in chosen]), HELD_OUT)
        batches.append(task.weighed(batch))
    if not any(weight for _, weight in batches):
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
    """One rank's share of the held-out batches, collated once: a masked task hides the same tokens each time.

    Of ``count`` batches at a time a rank has that at ``place``; where ranks share sequences, a part of it.
    All ranks have the same number, for a sharded forward is a collective; where they do not divide evenly a
    batch is repeated with weight 0.
    """

    def __init__(self, batches: Sequence[Weighed], place: int, count: int) -> None:
        rounds = -(-len(batches) // count)
        padded = [*batches, *[(batches[0][0], 0)] * (rounds * count - len(batches))]
        self._batches = padded[place::count]

    def loss(self, session: Session) -> float:
        """Mean loss by weight over all ranks; collective."""
        from accelerate.utils import send_to_device

        session.model.eval()
        total = weight = 0.0
        with torch.no_grad():
            for whole, of_whole in self._batches:
                batch, counted = session.part(whole, of_whole)
                total += float(session.forward(send_to_device(batch, session.device))) * counted
                weight += counted
        session.model.train()
        total, weight = session.sum_over_ranks(total, weight)
        return total / weight
