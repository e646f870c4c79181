"""Parameters that are added to a loaded model, such as adapters: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import current_world


def with_first_values(make: Callable[[], Sequence[nn.Parameter]]) -> Sequence[nn.Parameter]:
    """What ``make`` gives, which may be collective, with the values that it has on rank 0; collective."""
    world = current_world()
    with world.collectives("sharing what was added"):
        made = make()
        for parameter in made if dist.is_initialized() else ():
            if not parameter.is_meta:
                # The group of the ranks' messages carries what lies on the host, whatever theirs is for.
                group = world.group if parameter.device.type == "cpu" else None
                dist.broadcast(parameter.detach(), src=0, group=group)
    return made
