"""What tells whether parameters are the same on all ranks: any difference shows, wherever memory begins."""

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zerostart.upstream.deepspeed.zero12.buffers import alike, fingerprint
from zerostart.upstream.torch.word_sums import BLOCK


def hashed(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(fingerprint(tensor))


def test_bits_and_their_order_count_and_nothing_else() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(3, 7, 11).bfloat16()
    first = hashed(tensor)
    assert hashed(tensor.clone()) == first
    assert hashed(torch.cat([tensor.new_zeros(5), tensor.reshape(-1)])[5:]) == first
    assert hashed(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == first
    others = [tensor.flip(0), tensor.flip(2), tensor.roll(4), -tensor, tensor.transpose(0, 1)]
    assert len({first, *map(hashed, others)}) == len(others) + 1
    assert hashed(torch.tensor([0.0])) != hashed(torch.tensor([-0.0]))
    assert hashed(torch.empty(0)) == hashed(torch.empty(0, 3))


def test_every_bit_shows() -> None:
    words = torch.zeros(6, dtype=torch.int64)
    seen = {hashed(words)}
    for place in range(6):
        for bit in range(64):
            other = words.clone()
            other[place] = torch.tensor(1, dtype=torch.int64) << bit
            seen.add(hashed(other))
    assert len(seen) == 1 + 6 * 64


def test_chunks_that_change_places_show() -> None:
    size = BLOCK
    data = torch.randint(0, 256, (3 * size + 5,), dtype=torch.uint8)
    other = data.clone()
    other[:size], other[size : 2 * size] = data[size : 2 * size], data[:size]
    assert hashed(data) == hashed(data.clone())
    assert hashed(data) != hashed(other)


def on_ranks() -> list[bool]:
    torch.manual_seed(3)
    tensors = [torch.randn(40) for _ in range(4)]
    if dist.get_rank() == 1:
        tensors[1][7], tensors[1][9] = tensors[1][9].clone(), tensors[1][7].clone()
        tensors[2][0] += 1
    found = alike(tensors, dist.group.WORLD)
    return [any(one is tensor for one in found) for tensor in tensors]


def test_ranks_agree() -> None:
    assert run_ranks(on_ranks, 3) == [[True, False, False, True]] * 3
