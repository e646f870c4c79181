"""The strides of what torch's CPU kernels make, where its meta kernels say otherwise.

Bits depend on strides, and code may ask for them. For the operators here the CPU kernel is run on a few
elements that lie in the same order, and the result is taken to lie as that one does. That no other operator
needs it is what ``tests/recipe/test_strides.py`` finds out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from zerostart.recipe.refusals import refusal
from zerostart.upstream.torch.wrapper import without_dispatch

aten = torch.ops.aten
#: Operators whose meta kernels lay out what they make in another way than those of the CPU.
OTHERWISE = {
    *(aten._fft_r2c, aten._fft_c2r, aten._fft_c2c, aten._linalg_svd, aten.svd, aten.linalg_eig),
    *(aten.channel_shuffle, aten.native_channel_shuffle, aten.pixel_shuffle, aten.pixel_unshuffle),
    *(aten.isin, aten.log_sigmoid_forward, aten.resize_as, aten.native_dropout_backward),
    *(aten.mse_loss_backward, aten.huber_loss_backward, aten.smooth_l1_loss_backward),
    aten.pow.Scalar,
}


def as_on_cpu(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], made: Any) -> object:
    """``made``, which ``func`` gave of tensors on the meta device, in the strides of the CPU kernel.

    Raises ConversionError for operands that lie in an order of which the result's cannot be told.
    """
    # For all other operators the meta kernel's strides are those of the CPU: nothing is run.
    if not {func, func._overloadpacket} & OTHERWISE:
        return made
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    # Few elements, but equal sizes stay equal and their order stays: kernels choose a layout by these.
    sizes = _few({size for t in given for size in t.shape})
    try:
        with without_dispatch(), torch.no_grad():
            few = tree_map(functools.partial(_small, sizes=sizes), (tuple(args), dict(kwargs)))
            shown = func(*few[0], **{**few[1], **({"device": "cpu"} if kwargs.get("device") else {})})
    except (RuntimeError, IndexError) as error:
        if all(t.is_contiguous() for t in given):
            return made
        raise refusal(
            f"a conversion calls {func} on tensors that are not contiguous, so the memory layout "
            "of the result is unknown; make them contiguous before"
        ) from error
    if isinstance(made, torch.Tensor):
        return _lying_as(made, shown)
    return type(made)(_lying_as(meta, few) for meta, few in zip(made, shown, strict=True))


def _few(sizes: set[int]) -> dict[int, int]:
    """Small numbers in the same order for sizes, the same for equal ones."""
    larger = sorted(size for size in sizes if size > 1)
    return {0: 0, 1: 1} | {size: 2 + number for number, size in enumerate(larger)}


def _small(value: object, sizes: Mapping[int, int]) -> object:
    """A tensor of few elements that lies in memory as ``value`` does; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [sizes[size] for size in value.shape]
    strides = [0] * len(shape)
    extent, room = 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (value.stride(d), -d)):
        stride = value.stride(dim)
        if stride and value.shape[dim] > 1:
            # `extent` and `room` are how far the dimensions so far reach, in the tensor and in the small one.
            strides[dim] = room if stride == extent else room + 1  # a gap stays one
            extent, room = stride * value.shape[dim], strides[dim] * shape[dim]
        elif stride:
            strides[dim] = room
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device="cpu")
    values = torch.linspace(0.1, 0.9, max(made.numel(), 1), device="cpu")
    return made.copy_(values[: made.numel()].reshape(shape))


def _lying_as(meta: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
    """``meta`` with its dimensions in the order in which those of ``few`` lie in memory."""
    if meta.dim() != few.dim() or few.is_contiguous():
        strides = list(torch.empty(meta.shape, device="meta").stride())
    else:
        strides, step = [0] * meta.dim(), 1
        for dim in sorted(range(meta.dim()), key=lambda d: (few.stride(d), -d)):
            strides[dim] = step
            step *= max(meta.shape[dim], 1)
    return torch.empty_strided(meta.shape, strides, dtype=meta.dtype, device="meta")
