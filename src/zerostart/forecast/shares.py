"""What each rank holds of the parameters, in elements and bytes: sums over ranks that differ, not walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from zerostart.engines.placements import DEVICE, HOST, Placements
from zerostart.layout import Parallelism

__all__ = ["Array", "Gathers", "Held", "held_of"]

#: A number for each rank in question.
Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Gathers:
    """Sizes of what is gathered on a rank while a model runs, in bytes of the dtype that it is held in.

    ``largest``: of the largest parameter; ``module``: of the parameters of one module that holds some itself;
    ``total``: of all that train. ``elements`` are those of each parameter. An expert counts with what one
    rank has of it before it is sharded. ``shared`` are the bytes of ``total`` by the number of ranks that
    share them: those that have the same experts, or all.
    """

    largest: int
    module: int
    total: int
    elements: Mapping[str, int]
    shared: Mapping[int, int]


@dataclass(frozen=True)
class Held:
    """Shares of ``ranks``, one number for each of them.

    ``trained`` are elements that the optimizer updates, of which ``main`` have the dtype of most. ``device``,
    ``host`` and ``storage`` are bytes of all shares by home. ``largest`` are elements of the largest share of
    one parameter. ``buffers``: bytes of the model's buffers, whole on every rank. ``dtype`` is that of most
    trained elements, ``frozen`` the bytes of shares that are not trained.
    """

    ranks: tuple[int, ...]
    trained: Array
    device: Array
    host: Array
    storage: Array
    frozen: Array
    largest: Array
    buffers: int
    dtype: torch.dtype
    gathers: Gathers

    @property
    def nbytes(self) -> Array:
        """Bytes of all shares."""
        return self.device + self.host + self.storage


def held_of(
    model: nn.Module,
    placed: Placements,
    parallelism: Parallelism,
    ranks: Sequence[int],
    numels: Mapping[str, Array],
) -> Held:
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
    sizes = {name: whole[name] * p.dtype.itemsize for name, p in model.named_parameters()}
    modules: dict[str, int] = {}
    for name, size in sizes.items():
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0) + size
    return Held(
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
