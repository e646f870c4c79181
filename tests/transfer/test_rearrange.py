"""Parts of a buffer reordered in place, against taking them out and putting them back."""

import random
import tracemalloc

import pytest
import torch

from zerostart.transfer.rearrange import Segment, in_place, rearrange


def drawn(generator: random.Random, most: int) -> tuple[int, list[Segment]]:
    """A buffer's size, and disjoint parts with gaps and new places with other gaps."""
    numels = [generator.randint(0, most) for _ in range(generator.randint(0, 12))]

    def places() -> list[int]:
        order, found, end = list(range(len(numels))), [0] * len(numels), 0
        if generator.random() < 0.7:
            generator.shuffle(order)
        for part in order:
            end += generator.choice([0, 0, 1, 5])
            found[part] = end
            end += numels[part]
        return found

    now, then = places(), places()
    size = max([a + n for a, n in zip(now + then, numels + numels, strict=True)], default=0)
    return size + generator.randint(0, 3), list(zip(now, then, numels, strict=True))


@pytest.mark.parametrize("scratch", [1, 3, 7, 1000])
def test_every_part_arrives(scratch: int) -> None:
    generator = random.Random(scratch)
    for most in (3, 20, 90):
        for _ in range(150):
            size, segments = drawn(generator, most)
            flat = torch.arange(size, dtype=torch.int16)
            expected = {to: flat[start : start + numel].clone() for start, to, numel in segments if numel}
            rearrange(flat, segments, scratch * flat.element_size())
            for to, part in expected.items():
                assert torch.equal(flat[to : to + part.numel()], part), (size, segments)


def test_what_is_in_place_is_left_alone() -> None:
    segments = [(0, 0, 4), (6, 6, 2), (4, 4, 1)]
    assert in_place(segments)
    flat = torch.arange(9)
    rearrange(flat, segments)
    assert flat.tolist()[:5] == [0, 1, 2, 3, 4]
    assert flat.tolist()[6:8] == [6, 7]
    assert not in_place([(0, 0, 4), (6, 5, 2)])


@pytest.mark.slow
def test_many_parts_take_little_work() -> None:
    """Large and small parts in turn, sorted apart: moves are few times the size, not its square."""
    numels = [997 if n % 2 else 3 for n in range(2000)]
    starts = [sum(numels[:n]) for n in range(2000)]
    order = [*range(1, 2000, 2), *range(0, 2000, 2)]
    segments, end = [], 0
    for part in order:
        segments.append((starts[part], end, numels[part]))
        end += numels[part]
    flat = torch.arange(end)
    expected = torch.cat([flat[starts[n] : starts[n] + numels[n]] for n in order])
    tracemalloc.start()
    rearrange(flat, segments, 4096)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(flat, expected)
    assert peak < 4 << 20
