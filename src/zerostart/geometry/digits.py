"""Write one axis as mixed-radix digits.

An axis of ``n`` elements is written as digits ``(size, stride)``, most significant first, whose sizes
multiply to ``n``. The address of element ``i`` is the sum of its digits times their strides. A plain strided
axis has one digit. A row permutation such as the one of rotary embeddings, which no single stride can
express, has two or three. Digits keep a conversion to a handful of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

Digit = tuple[int, int]
Digits = tuple[Digit, ...]


def extent(digits: Digits) -> int:
    """Number of elements of the axis."""
    count = 1
    for size, _ in digits:
        count *= size
    return count


def simplify(digits: Digits, unit: int | None = None) -> Digits:
    """Drop digits of size 1 and merge neighbours that one stride can say.

    ``unit`` is the number of elements of one source tensor: a stride of that size steps from one tensor
    of a run to the next, and is never merged with the strides inside a tensor.
    """
    out: list[Digit] = []
    for size, stride in digits:
        # A digit of size 1 moves nothing, whatever its stride.
        if size == 1:
            continue
        if out:
            above_size, above_stride = out[-1]
            within = unit is None or above_stride < unit
            if within and above_stride == stride * size:
                out[-1] = (above_size * size, stride)
                continue
        out.append((size, stride))
    return tuple(out)


def cut(digits: Digits, start: int, stop: int, step: int = 1) -> list[tuple[int, int, Digits]]:
    """Elements ``range(start, stop, step)`` of the axis, as ``(position, offset, digits)`` parts.

    ``position`` counts from the first element kept; ``offset`` is the address of the part's first element.
    """
    if step != 1:
        return _cut_steps(digits, range(start, stop, step))
    if stop <= start:
        return []
    if start == 0 and stop == extent(digits):
        return [(0, 0, digits)]
    return [(position - start, offset, part) for position, offset, part in _interval(digits, start, stop)]


def _interval(digits: Digits, start: int, stop: int) -> list[tuple[int, int, Digits]]:
    if not digits:
        return [(start, 0, ())]
    (_, stride), minor = digits[0], digits[1:]
    below = extent(minor)
    # The range begins in row `first` of this digit, at element `head` of the digits below it.
    first, head = divmod(start, below)
    last, tail = divmod(stop, below)

    def inner(value: int, lo: int, hi: int) -> list[tuple[int, int, Digits]]:
        return [
            (value * below + position, value * stride + offset, part)
            for position, offset, part in _interval(minor, lo, hi)
        ]

    # All within one row: the digits below decide.
    if first == last:
        return inner(first, head, tail)
    parts: list[tuple[int, int, Digits]] = []
    if head:
        parts += inner(first, head, below)
        first += 1
    if first < last:
        parts.append((first * below, first * stride, ((last - first, stride), *minor)))
    if tail:
        parts += inner(last, 0, tail)
    return parts


def _cut_steps(digits: Digits, indices: range) -> list[tuple[int, int, Digits]]:
    if not indices:
        return []
    if len(digits) == 1:
        stride = digits[0][1]
        return [(0, indices.start * stride, simplify(((len(indices), indices.step * stride),)))]
    parts: list[tuple[int, int, Digits]] = []
    for position, index in enumerate(indices):
        # A single element is a single part.
        ((_, offset, _),) = _interval(digits, index, index + 1)
        parts.append((position, offset, ()))
    return parts


def split_at(digits: Digits, minor: int) -> tuple[Digits, Digits] | None:
    """Split the axis into two, the second with ``minor`` elements.

    None if no digit allows it.
    """
    low: list[Digit] = []
    high = list(digits)
    while minor > 1:
        if not high:
            return None
        size, stride = high.pop()
        # The whole digit lies below the split.
        if minor % size == 0:
            low.insert(0, (size, stride))
            minor //= size
        # The split goes through this digit: its upper part steps over ``minor`` elements of the lower one.
        elif size % minor == 0:
            low.insert(0, (minor, stride))
            high.append((size // minor, stride * minor))
            minor = 1
        else:
            return None
    return tuple(high), tuple(low)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
