"""What fails inside a call that ranks make together, where the others wait in another one."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import rank_outcomes
from zerostart.distributed.world import current_world


def encode() -> None:
    """As one rank whose memory runs out between two collectives of a sharded forward."""
    world = current_world()
    with world.phase("preparing the data"), world.collectives("encoding an item"):
        for layer in range(3):
            if (world.rank, layer) == (1, 1):
                raise torch.OutOfMemoryError("out of memory")
            dist.all_reduce(torch.zeros(1 << 10))


@pytest.mark.slow
def test_it_is_raised_at_once_and_the_others_learn_of_it() -> None:
    """Not in the meeting at the end of a phase, which would answer to another call of the others."""
    first, second = rank_outcomes(encode, 2, grace=30.0)
    assert second.error == "zerostart.errors.ZerostartError"
    assert second.message == "OutOfMemoryError: out of memory"
    assert first.error == "zerostart.errors.PeerError"
    assert "during 'encoding an item'" in first.message
    assert first.seconds < 30.0
