"""The loss on held-out text: the same batches every time, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerostart.errors import ConfigError
from zerostart.training.config import TaskConfig
from zerostart.training.data import Sequences
from zerostart.training.session import Session
from zerostart.training.tasks import Collator, weighed

__all__ = ["HeldOut", "held_out_batches"]


Batch = tuple[dict[str, torch.Tensor], int]


def held_out_batches(
    sequences: Sequences, collator: Collator, task: TaskConfig, batch_size: int
) -> list[Batch]:
    """Batches of ``batch_size`` sequences in their order, each with the number of tokens it predicts.

    Raises :class:`ConfigError` if that is none in all of them.
    """
    batches = []
    for start in range(0, len(sequences), batch_size):
        batch = collator([sequences[i] for i in range(start, min(start + batch_size, len(sequences)))])
        batches.append(weighed(task, batch))
    if not any(predicted for _, predicted in batches):
        raise ConfigError(
            "the held-out sequences give no token to predict, so they have no loss; raise data.held_out or "
            "name more text"
        )
    return batches


class HeldOut:
    """One rank's share of the held-out batches, collated once: a masked task hides the same tokens each time.

    Of ``count`` batches at a time a rank has that at ``place``; where ranks share sequences, a part of it.
    All ranks have the same number, for a sharded forward is a collective; where they do not divide evenly a
    batch is repeated with weight 0.
    """

    def __init__(self, batches: Sequence[Batch], place: int, count: int) -> None:
        rounds = -(-len(batches) // count)
        padded = [*batches, *[(batches[0][0], 0)] * (rounds * count - len(batches))]
        self._batches = padded[place::count]

    def loss(self, session: Session) -> float:
        """Mean loss a predicted token over all ranks; collective."""
        session.model.eval()
        total = weight = 0.0
        with torch.no_grad():
            for whole, of_whole in self._batches:
                batch, predicted = session.part(whole, of_whole)
                loss = session.forward({key: value.to(session.device) for key, value in batch.items()})
                total += float(loss) * predicted
                weight += predicted
        session.model.train()
        total, weight = session.sum_over_ranks(total, weight)
        return total / weight
