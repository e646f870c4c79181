"""What planning takes grows with the number of pieces, and not with its square."""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch

from tests.recipe.shards import recipe_of
from zerostart.checkpoint.memory import memory_catalog
from zerostart.geometry.layout import flat_partition
from zerostart.recipe import SymbolicTensor
from zerostart.recipe.recording import recorded
from zerostart.recipe.symbolic import settled
from zerostart.transfer.planning import Destination, PlanOptions, join

Change = Callable[[torch.Tensor], torch.Tensor]
CHANGES: dict[str, Change] = {
    "a diagonal": lambda w: (w.diagonal().mul_(2), w)[1],
    "rows in another order": lambda w: w.flip(0).add_(1),
    "every other row": lambda w: torch.stack([w[::2], w[1::2].flip(0)], 1).reshape(w.shape).div_(3),
}


def calls(change: Change, size: int) -> int:
    """How many functions of Python planning ``change`` of a square matrix calls."""
    source = {"w": torch.zeros(size, size)}
    symbol = SymbolicTensor.of("w", (size, size), torch.float32)
    recipe = recipe_of("w", recorded("the converter", lambda: settled(change(symbol))))
    layout = flat_partition((size, size), 0, 1)
    destination = Destination("w", layout.numel, layout.owned, torch.float32, direct=True)
    profile = cProfile.Profile()
    profile.enable()
    join(memory_catalog(source, (0,)), [(recipe, layout, destination)], PlanOptions())
    profile.disable()
    counted: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]  # not in the stubs
    return counted


@pytest.mark.parametrize("name", CHANGES)
def test_planning_what_is_computed_of_many_pieces_takes_time_in_proportion(name: str) -> None:
    calls(CHANGES[name], 16)  # what is done once
    assert calls(CHANGES[name], 256) < 6 * calls(CHANGES[name], 64)
