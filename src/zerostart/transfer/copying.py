"""One strided copy on the host, in blocks that stay in the cache where it transposes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

Loop = tuple[int, int, int]
#: Elements on one side of a block, and bytes of a block: small enough for the second-level cache, with
#: rows long enough for the copies to and from it.
SIDE, BLOCK = 512, 256 << 10


def copy_strided(target: torch.Tensor, to: int, source: torch.Tensor, loops: Sequence[Loop]) -> None:
    """``target[to + sum(index * destination stride)] = source[sum(index * source stride)]``, cast as needed.

    ``target`` and ``source`` are 1-D; ``loops`` are (size, source stride, destination stride). Raises nothing
    of its own; the caller has checked the bounds.
    """
    turned = _transposition(loops) if source.device.type == target.device.type == "cpu" else None
    with torch.no_grad():
        if turned is None:
            _view(target, to, loops, 2).copy_(_view(source, 0, loops, 1))
            return
        inner, outer, others = turned
        for indices in product(*(range(size) for size, _, _ in others)):
            start = sum(i * loop[1] for i, loop in zip(indices, others, strict=True))
            place = to + sum(i * loop[2] for i, loop in zip(indices, others, strict=True))
            _transpose(_view(target, place, (inner, outer), 2), _view(source, start, (outer, inner), 1))


def _view(tensor: torch.Tensor, start: int, loops: Sequence[Loop], side: int) -> torch.Tensor:
    sizes, strides = [loop[0] for loop in loops], [loop[side] for loop in loops]
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + start)


def _transposition(loops: Sequence[Loop]) -> tuple[Loop, Loop, list[Loop]] | None:
    """The loop that is dense in the source, the one that is dense in the destination, and the rest.

    None unless both are long and differ: a copy whose inner loop is dense on both sides, or on none, has
    nothing to gain from blocks.
    """
    inner = next((loop for loop in loops if loop[1] == 1), None)
    outer = next((loop for loop in loops if loop[2] == 1), None)
    if inner is None or outer is None or inner is outer or min(inner[0], outer[0]) < SIDE // 16:
        return None
    return inner, outer, [loop for loop in loops if loop is not inner and loop is not outer]


def _transpose(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target[:] = source.t()`` for a source with dense rows and a target with dense rows.

    torch transposes well from a dense block to a dense block, so each block is made dense on either side.
    """
    rows, columns = source.shape
    width = BLOCK // (SIDE * source.itemsize)
    room = source.new_empty(2, SIDE * width)
    for i in range(0, rows, SIDE):
        for j in range(0, columns, width):
            part = source[i : i + SIDE, j : j + width]
            block = room[0, : part.numel()].view(part.shape).copy_(part)
            turned = room[1, : part.numel()].view(part.shape[::-1]).copy_(block.t())
            target[j : j + width, i : i + SIDE].copy_(turned)
