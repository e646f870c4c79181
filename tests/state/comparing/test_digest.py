"""Tensor digests: formula, order of pieces, and errors."""

import hashlib
import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from zerostart.checkpoint.digest import Digests
from zerostart.errors import CheckpointError
from zerostart.recipe.dtypes import spelling

ROW, ROWS, COLUMNS = 1024, 1024, 8
BLOCK = ROW * ROWS
MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """Apply the finaliser of SplitMix64."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def byte_key(position: int, column: int) -> int:
    """Return a nonzero number from -127 to 127."""
    key = (mix(position * COLUMNS + column + (1 << 48)) >> 1) % 254 - 127
    return key if key < 0 else key + 1


def reference_digest(dtype: str, shape: Sequence[int], data: bytes, first: int = 0) -> str:
    """Follow docs/specs/digest.md in integers; bytes before ``first`` are zeros."""
    keys = [[byte_key(position, column) for column in range(COLUMNS)] for position in range(ROW)]
    sums: dict[int, list[int]] = {}
    for number, byte in enumerate(data, first):
        row, position = divmod(number, ROW)
        value = byte if byte < 128 else byte - 256
        old = sums.get(row, [0] * COLUMNS)
        sums[row] = [total + value * key for total, key in zip(old, keys[position], strict=True)]
    lanes = []
    for lane in range(2):
        total = 0
        for row, columns in sums.items():
            block, number = divmod(row, ROWS)
            for column, value in enumerate(columns):
                a = mix(number * COLUMNS + column + ((2 + lane) << 48)) | 1
                total += (mix(block + ((4 + lane) << 48)) | 1) * a * value
        lanes.append((total & MASK).to_bytes(8, "little"))
    text = f"{dtype} {list(shape)} ".encode() + b"".join(lanes)
    return "02" + hashlib.blake2b(text, digest_size=16).hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
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
def test_documented_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((), (0,), (3,), (7, 5), (37, 601)):
        values = torch.randn(shape) * 5
        tensor = values.to(dtype)
        assert digest(tensor) == reference_digest(spelling(dtype), shape, bytes(as_bytes(tensor).numpy())), (
            shape
        )


def test_documented_formula_across_blocks() -> None:
    torch.manual_seed(0)
    shape, first = (2, BLOCK), BLOCK - 7_003
    tensor = torch.zeros(shape, dtype=torch.int8)
    tensor.view(-1)[first : first + 20_000].random_(-128, 128)
    data = bytes(as_bytes(tensor)[first : first + 20_000].numpy())
    assert digest(tensor) == reference_digest("I8", shape, data, first)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_pieces_in_any_order(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    generator = random.Random(0)
    tensor = (torch.randn(411, 757) * 50).to(dtype)
    flat = tensor.view(-1)
    for _ in range(5):
        cuts = sorted({0, flat.numel(), *(generator.randrange(flat.numel()) for _ in range(9))})
        pieces = list(itertools.pairwise(cuts))
        generator.shuffle(pieces)
        sums = Digests([("t", spelling(dtype), tensor.shape)])
        for first, end in pieces:
            data = flat[first:end]
            sums.add("t", first, data if generator.random() < 0.5 else bytes(as_bytes(data).numpy()))
        assert sums.summed()["t"] == digest(tensor)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(411, 757), (5, 70_003), (3001, 8), (700, 4096), (40, 32_768)])
def test_column_slices(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Cut wide, narrow, adjacent and distant columns."""
    torch.manual_seed(2)
    tensor = (torch.randn(shape) * 50).to(dtype)
    sums = Digests([("t", spelling(dtype), shape)])
    cuts = [0, 1, 4, shape[1] // 2, shape[1]]
    for first, end in itertools.pairwise(cuts):
        sums.add_rows("t", first, shape[1], tensor[:, first:end])
    assert sums.summed()["t"] == digest(tensor)


def test_missing_and_repeated_elements_are_errors() -> None:
    tensor = torch.zeros(100)
    for pieces in ([(0, 99)], [(0, 60), (40, 100)]):
        sums = Digests([("t", "F32", (100,))])
        for first, end in pieces:
            sums.add("t", first, tensor[first:end])
        with pytest.raises(CheckpointError, match=r"t: (99|120) elements were counted .* the tensor has 100"):
            sums.summed()


def test_dtype_and_shape_change_the_digest() -> None:
    tensor = torch.arange(24, dtype=torch.int16)
    variants = [
        tensor,
        tensor.view(2, 12),
        tensor.view(12, 2),
        tensor.view(torch.bfloat16),
        tensor.view(torch.int32),
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)
    assert digest(tensor.view(4, 6).t().contiguous()) != digest(tensor.view(6, 4))
