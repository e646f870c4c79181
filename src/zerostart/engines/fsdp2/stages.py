"""ZeRO stages in FSDP2's terms.

Parameters are sharded at rest at every stage from 1 on; what differs is how long they, and the gradients, are
whole. Stage 3 gathers a unit for its forward and again for its backward. At stage 2 it stays gathered in
between. At stage 1 gradients are, besides, summed up whole on each rank, and parameters stay gathered, until
the last of the batches that are accumulated.
"""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule


def begin_batch(model: FSDPModule, zero_stage: int, last: bool) -> None:
    """Call before the forward of each of the batches whose gradients are accumulated for one step.

    ``last`` is true for the one before the optimizer's step: for each, where nothing is accumulated.
    """
    # Stage 2 reduces the gradients of every batch, and holds its share of the sum.
    reduces = last or zero_stage == 2
    model.set_requires_gradient_sync(reduces)
    if zero_stage == 1:
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
