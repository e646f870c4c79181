"""What each rank holds of the parameters, in elements and bytes: sums over ranks that differ, not walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import nn

from zerostart.engines.forecast import Array, Gathers, ParameterBytes, pinned_by_torch
from zerostart.engines.placements import DEVICE, HOST, Placements
from zerostart.geometry.layout import Parallelism
from zerostart.transfer.page_locked import rounds_up


def held_of(
    model: nn.Module,
    placed: Placements,
    parallelism: Parallelism,
    ranks: Sequence[int],
    numels: Mapping[str, Array],
) -> ParameterBytes:
    """Sum up the shares of ``ranks``; ``numels`` are the elements of each of them, by parameter name."""
    zeros = np.zeros(len(ranks), np.int64)
    homes = {DEVICE: zeros.copy(), HOST: zeros.copy()}
    storage, frozen, trained, largest = zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy()
    elements: dict[torch.dtype, int] = {}
    whole: dict[str, int] = {}
    shared: dict[int, int] = {}
    for name, parameter in model.named_parameters():
        numel = numels[name]
        nbytes = numel * parameter.dtype.itemsize
        home = homes.get(placed.homes[name], storage)
        home += nbytes
        np.maximum(largest, numel, out=largest)
        whole[name] = prod(parallelism.section(name, tuple(parameter.shape), 0).shape)
        if parameter.requires_grad:
            trained += numel
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + whole[name]
            sharers = parallelism.owners(name, 0)[1]
            shared[sharers] = shared.get(sharers, 0) + whole[name] * parameter.dtype.itemsize
        else:
            frozen += nbytes
    if placed.pinned and rounds_up():  # in one piece, see ``Arena``; elsewhere it is whole pages
        homes[HOST] = pinned_by_torch(homes[HOST])
    sizes = {name: whole[name] * p.dtype.itemsize for name, p in model.named_parameters()}
    modules: dict[str, int] = {}
    for name, size in sizes.items():
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0) + size
    return ParameterBytes(
        ranks=tuple(ranks),
        trained=trained,
        device=homes[DEVICE],
        host=homes[HOST],
        storage=storage,
        frozen=frozen,
        largest=largest,
        buffers=sum(b.numel() * b.dtype.itemsize for b in model.buffers()),
        dtype=max(elements, key=lambda d: elements[d]) if elements else torch.float32,
        gathers=Gathers(
            max(sizes.values(), default=0),
            max(modules.values(), default=0),
            sum(shared.values()),
            whole,
            shared,
        ),
    )
