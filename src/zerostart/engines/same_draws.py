"""Ranks that share tensors draw the same numbers: dropout on what all of them see is one dropout.

With a seed for each rank, as accelerate's ``set_seed(device_specific=True)`` gives, their activations, and so
what they all have whole (norms, biases, embeddings), would drift apart. The heads that a rank has are dropped
out as those of its neighbours then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import default_device

__all__ = ["share_draws"]


def share_draws(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have each forward of ``model`` in training begin, on all ranks of ``group``, as on its first."""
    model.register_forward_pre_hook(functools.partial(_begin, group))


def _begin(group: dist.ProcessGroup, model: nn.Module, _: Any) -> None:
    if not model.training:
        return
    device = default_device()
    backend: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    arguments = () if device.type == "cpu" else (device,)
    state = backend.get_rng_state(*arguments).to(device)
    dist.broadcast(state, group=group, group_src=0)
    backend.set_rng_state(state.cpu(), *arguments)
