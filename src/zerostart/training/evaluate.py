"""The loss on held-out text: the same batches every time, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerostart.training.config import TaskConfig
from zerostart.training.data import Sequences
from zerostart.training.session import Session
from zerostart.training.tasks import Collator, predicted_tokens

__all__ = ["HeldOut"]


class HeldOut:
    """Held-out batches of ``batch_size`` sequences, collated once: a masked task hides the same tokens.

    Rank ``rank`` of ``world_size`` evaluates every ``world_size``-th batch. All ranks have the same number,
    for a sharded forward is a collective; where they do not divide evenly a batch is repeated with weight 0.
    """

    def __init__(
        self,
        sequences: Sequences,
        collator: Collator,
        task: TaskConfig,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        starts = range(0, len(sequences), batch_size)
        batches = [
            collator([sequences[index] for index in range(start, min(start + batch_size, len(sequences)))])
            for start in starts
        ]
        own: Sequence[int] = range(rank, -(-len(batches) // world_size) * world_size, world_size)
        self._batches = [
            (batches[index], predicted_tokens(task, batches[index]["labels"]))
            if index < len(batches)
            else (batches[0], 0)
            for index in own
        ]

    def loss(self, session: Session) -> float:
        """Mean loss a predicted token over all ranks; collective."""
        session.model.eval()
        total = weight = 0.0
        with torch.no_grad():
            for batch, predicted in self._batches:
                loss = session.forward({key: value.to(session.device) for key, value in batch.items()})
                if predicted:  # without any the mean is not a number
                    total += float(loss) * predicted
                    weight += predicted
        session.model.train()
        total, weight = session.sum_over_ranks(total, weight)
        return total / max(weight, 1.0)
