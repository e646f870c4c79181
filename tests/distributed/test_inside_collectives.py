"""Fail on one rank between two collectives while the others wait."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import rank_outcomes
from zerostart.distributed.world import current_world


def encode() -> None:
    """Run out of memory on one rank between two collectives of a sharded forward."""
    world = current_world()
    with world.phase("preparing the data"), world.collectives("encoding an item"):
        for layer in range(3):
            if (world.rank, layer) == (1, 1):
                raise torch.OutOfMemoryError("out of memory")
            dist.all_reduce(torch.zeros(1 << 10))


@pytest.mark.slow
def test_a_failure_between_collectives_is_raised_on_all_ranks_at_once() -> None:
    """Waiting for the phase's end would mix with the other ranks' collectives."""
    first, second = rank_outcomes(encode, 2, grace=30.0)
    assert second.error == "zerostart.errors.ZerostartError"
    assert second.message == "OutOfMemoryError: out of memory"
    assert first.error == "zerostart.errors.PeerError"
    assert "during 'encoding an item'" in first.message
    assert first.seconds < 30.0
