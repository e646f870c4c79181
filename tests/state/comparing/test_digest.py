"""Digests that know no layout: the formula, any pieces in any order, and what must not go unnoticed."""

import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zerostart.checkpoint.digest import Digests
from zerostart.errors import CheckpointError
from zerostart.recipe.dtypes import spelling
from zerostart.upstream.torch import byte_sums

ROW, ROWS, COLUMNS = 1024, 1024, 8
BLOCK = ROW * ROWS
MASK = (1 << 64) - 1


def mixed(number: int) -> int:
    """The finaliser of SplitMix64."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def byte_key(place: int, column: int) -> int:
    """A number of -127 to 127 without zero."""
    drawn = (mixed(place * COLUMNS + column + (1 << 48)) >> 1) % 254 - 127
    return drawn if drawn < 0 else drawn + 1


def by_the_formula(dtype: str, shape: Sequence[int], data: bytes, first: int = 0) -> str:
    """The digest as docs/verify.md has it, in integers of Python alone; before byte ``first`` are zeros."""
    keys = [[byte_key(place, column) for column in range(COLUMNS)] for place in range(ROW)]
    sums: dict[int, list[int]] = {}
    for number, byte in enumerate(data, first):
        row, place = divmod(number, ROW)
        value = byte if byte < 128 else byte - 256
        before = sums.get(row, [0] * COLUMNS)
        sums[row] = [total + value * key for total, key in zip(before, keys[place], strict=True)]
    lanes = []
    for lane in range(2):
        total = 0
        for row, columns in sums.items():
            block, number = divmod(row, ROWS)
            for column, value in enumerate(columns):
                a = mixed(number * COLUMNS + column + ((2 + lane) << 48)) | 1
                total += (mixed(block + ((4 + lane) << 48)) | 1) * a * value
        lanes.append((total & MASK).to_bytes(8, "little"))
    text = f"{dtype} {list(shape)} ".encode() + b"".join(lanes)
    return "02" + hashlib.blake2b(text, digest_size=16).hexdigest()


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    sums = Digests([("t", spelling(tensor.dtype), tensor.shape)])
    sums.add("t", 0, tensor.contiguous().view(-1))
    return sums.summed()["t"]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float32,
        torch.int64,
        torch.complex64,
    ],
)
def test_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((), (0,), (3,), (7, 5), (37, 601)):
        values = torch.randn(shape) * 5
        tensor = values.to(dtype)
        assert digest(tensor) == by_the_formula(spelling(dtype), shape, bytes(octets(tensor).numpy())), shape


def test_the_formula_across_blocks() -> None:
    torch.manual_seed(0)
    shape, first = (2, BLOCK), BLOCK - 7_003
    tensor = torch.zeros(shape, dtype=torch.int8)
    tensor.view(-1)[first : first + 20_000].random_(-128, 128)
    data = bytes(octets(tensor)[first : first + 20_000].numpy())
    assert digest(tensor) == by_the_formula("I8", shape, data, first)


@pytest.mark.parametrize("place", [0, 3, 262_144])
def test_as_other_devices_compute_it(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By products of fp32 and of bytes, from any place on: on the host, which has the same operators."""
    torch.manual_seed(6)
    tensor = torch.randn(600_000 + place)
    tensor.view(torch.int32)[:5000] = -1 ^ 0x7F7F7F7F  # every byte the lowest
    expected = digest(tensor)

    def found() -> str:
        sums = Digests([("t", "F32", tensor.shape)])
        sums.add("t", place, tensor[place:])
        sums.add("t", 0, tensor[:place])
        return sums.summed()["t"]

    def of_columns() -> str:
        square = tensor[: 512 * 1024].view(512, 1024)
        sums = Digests([("t", "F32", square.shape)])
        sums.add_rows("t", 301, 1024, square[:, 301:])
        sums.add_rows("t", 0, 1024, square[:, :301].contiguous())  # at odd distances in memory
        return sums.summed()["t"]

    of_square = digest(tensor[: 512 * 1024].view(512, 1024))
    monkeypatch.setattr(byte_sums, "_has_products_of_bytes", lambda: False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (found(), of_columns()) == (expected, of_square)
    monkeypatch.setattr(byte_sums, "_is_host", lambda device: False)
    monkeypatch.setattr(torch, "_int_mm", _of_cuda(torch._int_mm))
    for products in (True, False):
        monkeypatch.setattr(byte_sums, "_has_products_of_bytes_there", lambda device, has=products: has)
        assert (found(), of_columns()) == (expected, of_square)


def _of_cuda(product: Any) -> Any:
    """A product of bytes that takes what CUDA's takes: 17 rows at least, at multiples of 16 bytes."""

    def multiplied(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        assert one.shape[0] > 16
        assert not one.data_ptr() % 16
        assert not any(stride % 16 for stride in one.stride() if stride != 1)
        return product(one, other)  # type: ignore[no-any-return]

    return multiplied


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_pieces_in_any_order(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    chosen = random.Random(0)
    tensor = (torch.randn(411, 757) * 50).to(dtype)
    flat = tensor.view(-1)
    for _ in range(5):
        cuts = sorted({0, flat.numel(), *(chosen.randrange(flat.numel()) for _ in range(9))})
        pieces = list(itertools.pairwise(cuts))
        chosen.shuffle(pieces)
        sums = Digests([("t", spelling(dtype), tensor.shape)])
        for first, end in pieces:
            data = flat[first:end]
            sums.add("t", first, data if chosen.random() < 0.5 else bytes(octets(data).numpy()))
        assert sums.summed()["t"] == digest(tensor)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(411, 757), (5, 70_003), (3001, 8), (700, 4096), (40, 32_768)])
def test_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Columns as tensor parallelism cuts them: wide and narrow, near each other and far apart."""
    torch.manual_seed(2)
    tensor = (torch.randn(shape) * 50).to(dtype)
    sums = Digests([("t", spelling(dtype), shape)])
    cuts = [0, 1, 4, shape[1] // 2, shape[1]]
    for first, end in itertools.pairwise(cuts):
        sums.add_rows("t", first, shape[1], tensor[:, first:end])
    assert sums.summed()["t"] == digest(tensor)


def test_what_is_left_out_or_added_twice_is_told() -> None:
    tensor = torch.zeros(100)
    for pieces in ([(0, 99)], [(0, 60), (40, 100)]):
        sums = Digests([("t", "F32", (100,))])
        for first, end in pieces:
            sums.add("t", first, tensor[first:end])
        with pytest.raises(CheckpointError, match=r"t: (99|120) elements were counted .* the tensor has 100"):
            sums.summed()


def corrupted(data: torch.Tensor, chosen: random.Random) -> list[torch.Tensor]:
    """What becomes of the bytes of a tensor by accident, all of it different from what they were."""
    count = data.numel()
    found = []

    def changed() -> torch.Tensor:
        found.append(data.clone())
        return found[-1]

    for bit in (*range(8), *range(8)):
        changed()[chosen.randrange(count)] ^= 1 << bit
    for distance in (2, 4, 8, 64, ROW, 8 * ROW, BLOCK, 2 * BLOCK):  # the top bits of two elements
        at = chosen.randrange((count - distance) // 8) * 8 + 7
        both = changed()
        both[at] ^= 0x80
        both[at + distance] ^= 0x80
    for length in (2, 4, 8, 512, ROW, 8 * ROW, BLOCK):  # elements, rows and blocks that change places
        one, other = (number * length for number in chosen.sample(range(count // length), 2))
        both = changed()
        both[one : one + length] = data[other : other + length]
        both[other : other + length] = data[one : one + length]
        changed()[one : one + length] = 0
        changed()[one : one + length] = data[other : other + length]
        found.append(torch.cat([data[length:], data[:length]]))
    changed()[-4096:] = 0
    return found


@pytest.mark.parametrize("kind", ["noise", "alike", "sparse"])
def test_accidents_are_noticed(kind: str) -> None:
    torch.manual_seed(3)
    chosen = random.Random(4)
    data = torch.randint(0, 256, (3 * BLOCK + 24,), dtype=torch.uint8)
    if kind == "alike":  # most of the high bytes are one, as those of weights are
        data[1::2] = 0x3C
    elif kind == "sparse":
        data[chosen.randrange(64) :: 61] = 0
    right = digest(data)
    different = [wrong for wrong in corrupted(data, chosen) if not torch.equal(wrong, data)]
    assert len(different) > 30
    assert all(digest(wrong) != right for wrong in different)


def test_dtype_and_shape_count() -> None:
    tensor = torch.arange(24, dtype=torch.int16)
    alike = [
        tensor,
        tensor.view(2, 12),
        tensor.view(12, 2),
        tensor.view(torch.bfloat16),
        tensor.view(torch.int32),
    ]
    assert len({digest(one) for one in alike}) == len(alike)
    assert digest(tensor.view(4, 6).t().contiguous()) != digest(tensor.view(6, 4))
