"""Whether two views of one memory have elements in common, by their strides alone."""

from __future__ import annotations

from typing import Any

import torch


def reads_what_it_writes(written: list[Any], given: list[Any]) -> bool:
    """Whether an operator takes of its arguments ``given`` what it changes meanwhile, by writing ``written``.

    An operand may be what is written, element by element; of lists, the one at the same place.
    """
    for argument in given:
        operands = argument if isinstance(argument, (list, tuple)) else [argument]
        for place, operand in enumerate(operands):
            for number, target in enumerate(written):
                if operand is target and len(written) == 1:
                    continue
                if (
                    not isinstance(operand, torch.Tensor)
                    or getattr(operand, "memory", None) is not target.memory
                ):
                    continue
                same = place == number and _alike(operand, target)
                if not same and _meet(operand, target):
                    return True
    return False


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    places = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg()) for t in (a, b)]
    return places[0] == places[1]


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one memory have bytes in common."""
    if not a.numel() or not b.numel():
        return False
    runs = [_runs(t) for t in (a, b)]
    (first, length), (other, width) = runs
    if int(first[-1]) + length <= int(other[0]) or int(other[-1]) + width <= int(first[0]):
        return False
    # A run of the one begins in a run of the other, or before it and reaches into it.
    at = torch.searchsorted(other, first, right=True)
    into = at > 0
    before = other[(at - 1).clamp(min=0)]
    if bool((into & (first < before + width)).any()):
        return True
    after = other[at.clamp(max=len(other) - 1)]
    return bool(((at < len(other)) & (after < first + length)).any())


def _runs(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where the unbroken runs of bytes of a view begin, in order, and how long each is."""
    width = length = t.element_size()
    starts = torch.full((1,), int(t.storage_offset()) * width, dtype=torch.int64, device="cpu")
    loops = sorted(
        (stride * width, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1
    )
    for stride, size in loops:
        if stride == length and len(starts) == 1:
            length *= size
        elif stride:
            steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
            starts = (starts.unsqueeze(1) + steps).reshape(-1)
    return starts.sort().values, length
