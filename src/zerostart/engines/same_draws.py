"""Ranks that share tensors draw the same numbers: dropout on what all of them see is one dropout.

With a seed for each rank, as accelerate's ``set_seed(device_specific=True)`` gives, their activations, and so
what they all have whole (norms, biases, embeddings), would drift apart. The heads that a rank has are dropped
out as those of its neighbours then.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import default_device


def share_draws(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have each forward of ``model`` in training begin, on all ranks of ``group``, as on its first.

    A forward needs all these ranks anyway, for what they share; one in evaluation draws nothing, and waits
    for nobody here.
    """

    # A function, and no partial: a copy of the model copies what that has, and no group can be copied.
    def begin(module: nn.Module, _: object) -> None:
        if module.training:
            _draw_alike(group)

    model.register_forward_pre_hook(begin)


def _draw_alike(group: dist.ProcessGroup) -> None:
    device = default_device()
    backend: ModuleType = torch if device.type == "cpu" else torch.get_device_module(device)
    arguments = () if device.type == "cpu" else (device,)
    state = backend.get_rng_state(*arguments).to(device)
    dist.broadcast(state, group=group, group_src=0)
    backend.set_rng_state(state.cpu(), *arguments)
