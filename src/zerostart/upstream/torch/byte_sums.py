"""Compute keyed sums over the bytes of a tensor, equal on all devices.

The bits of a tensor, elements in row-major order, are bytes ``b``, taken as signed. They lie in rows of
1024, and rows in blocks of 1024. Each row has eight sums; in each of two lanes, with keys of their own, ::

    s[r, n] = sum over k of b[r, k] * W[k, n]                                 exact, below 2**24
    lane    = sum over blocks q, rows r, columns n of B[q] * A[r, n] * s[r, n]         mod 2**64

``W`` are numbers of -127 to 127 without zero, ``A`` and ``B`` odd ones of 64 bits, all without a pattern. For
two different rows, a column is equal for at most one in 254 choices of its keys, all eight columns for one in
2**63. The lanes are the multilinear hash of Lemire and Kaser (Strongly universal string hashing is fast,
2012), so different contents have equal sums with a chance of about 2**-60. The sums are linear in the bytes:
shares of a tensor add up, in any order, on any ranks.

The first sums are a product of matrices. Processors and CUDA multiply bytes (``torch._int_mm``; CUDA needs at
least 17 rows, each aligned to 16 bytes). Other processors multiply in fp32, which is exact: all sums have at
most 24 bits. Other devices multiply and add integers.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zerostart.upstream.guard import Use, find_misfits

#: Bytes in a row, rows in a block, sums of a row.
ROW, ROWS, COLUMNS = 1 << 10, 1 << 10, 8
BLOCK = ROWS * ROW
LANES = 2
#: Maximum number of bytes of a sparse tensor to sum at a time.
MAX_TENSOR_BYTES = 16 * BLOCK
#: Maximum number of bytes to multiply at a time; as fp32 on the host, within its cache.
MAX_PRODUCT_BYTES, MAX_HOST_PRODUCT_BYTES = 4 * BLOCK, 1 << 17
#: Maximum number of bytes that an accelerator sums at a time.
MAX_DEVICE_BYTES = 64 * BLOCK
#: Minimum number of rows of a product on CUDA, and their alignment in bytes.
MIN_DEVICE_ROWS, ROW_ALIGNMENT = 17, 16
MASK = (1 << 64) - 1
#: Seeds of the keys: W, A of both lanes, B of both.
_SEEDS = tuple(number << 48 for number in range(1, 2 * LANES + 2))
_STEP, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

TOUCHED = (Use("torch", "_int_mm", "the product of matrices of bytes"),)


def lanes_of(octets: torch.Tensor, position: int = 0) -> list[int]:
    """Sum the bytes ``octets`` from byte ``position`` of the tensor on, in both lanes."""
    parts = []
    limit = MAX_PRODUCT_BYTES if _is_host(octets.device) else MAX_DEVICE_BYTES
    octets = octets.view(torch.int8)
    while count := octets.numel():
        row, inside = divmod(position, ROW)
        whole = 0 if inside else min(count, limit) // ROW
        count_now = whole * ROW or min(count, ROW - inside)
        parts.append(_weigh_rows(_row_sums(octets[:count_now].view(max(whole, 1), -1), inside), row))
        octets, position = octets[count_now:], position + count_now
    return _add_lanes(parts)


def lanes_of_rows(octets: torch.Tensor, position: int, step: int) -> list[int]:
    """Sum ``octets`` [number, length]; row ``k`` begins at byte ``position + k * step``."""
    number, length = octets.shape
    parts = []
    step_rows = max(1, MAX_TENSOR_BYTES // step)
    for begin in range(0, number if length else 0, step_rows):
        at = position + begin * step
        part = octets[begin : begin + step_rows]
        row = at // ROW
        last = (at + (part.shape[0] - 1) * step + length - 1) // ROW
        sums = torch.zeros(last + 1 - row, COLUMNS, dtype=torch.int32, device=part.device)
        _sum_rows(sums, part.view(torch.int8), at - row * ROW, step)
        parts.append(_weigh_rows(sums, row))
    return _add_lanes(parts)


def _sum_rows(sums: torch.Tensor, octets: torch.Tensor, position: int, step: int) -> None:
    number, length = octets.shape
    period = ROW // math.gcd(step, ROW)
    row_step = period * step // ROW
    for first in range(min(period, number)):
        part = octets[first::period]
        count = part.shape[0]
        row, inside = divmod(position + first * step, ROW)
        if not inside and length % ROW == 0 and part.is_contiguous():
            shape, strides = (count, length // ROW * COLUMNS), (row_step * COLUMNS, 1)
            part_sums = _row_sums(part.view(-1, ROW), 0).view(shape)
            sums.as_strided(shape, strides, row * COLUMNS).add_(part_sums)
            continue
        at = 0
        while at < length:
            width = min(length - at, ROW - inside)
            part_sums = _row_sums(part[:, at : at + width], inside)
            sums[row : row + (count - 1) * row_step + 1 : row_step].add_(part_sums)
            row, at, inside = row + 1, at + width, 0


def to_signed(number: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _row_sums(octets: torch.Tensor, inside: int) -> torch.Tensor:
    length = octets.shape[1]
    if octets.stride(1) != 1 or octets.stride(0) < length:
        octets = octets.contiguous()
    keys, device = slice(inside, inside + length), octets.device
    if not _is_host(device) and _has_device_product(device):
        rows = octets.shape[0]
        if length < ROW or rows < MIN_DEVICE_ROWS:
            # Pad with zeros: a product of floats would keep memory for each stream.
            room = octets.new_zeros(max(rows, MIN_DEVICE_ROWS), ROW)
            room[:rows, keys] = octets
            octets = room
        elif octets.data_ptr() % ROW_ALIGNMENT or octets.stride(0) % ROW_ALIGNMENT:
            octets = octets.clone(memory_format=torch.contiguous_format)
        return torch._int_mm(octets, _byte_columns(device))[:rows]
    if _is_host(device) and _has_host_product():
        # torch sets the number of threads lazily.
        torch.get_num_threads()
        return torch._int_mm(octets, _byte_keys(device)[keys])
    if _is_host(device):
        return _multiply_as_floats(octets, _float_keys()[keys])
    # cuBLAS refuses a product of floats in torch's deterministic mode without a workspace.
    columns = _byte_keys(device)[keys].T
    products = []
    for part in torch.split(octets, max(1, MAX_PRODUCT_BYTES // length)):
        wide = part.to(torch.int16)  # for products of two bytes
        products.append(torch.stack([(wide * each).sum(1) for each in columns], 1))
    return torch.cat(products)


def _multiply_as_floats(octets: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    sums = torch.empty(octets.shape[0], COLUMNS, dtype=torch.float32, device="cpu")
    rows = max(1, MAX_HOST_PRODUCT_BYTES // octets.shape[1])
    for part, place in zip(torch.split(octets, rows), torch.split(sums, rows), strict=True):
        # Autocast ignores ``out``.
        torch.mm(part.to(torch.float32), keys, out=place)
    return sums.to(torch.int32)


def _weigh_rows(sums: torch.Tensor, row: int) -> list[int]:
    lanes = [0] * LANES
    values, keys = sums.cpu().view(-1).numpy().astype(np.int64), _row_keys()
    while len(values):
        block, first = divmod(row, ROWS)
        blocks = 0 if first else len(values) // keys.shape[1]
        count = blocks * keys.shape[1] or min(len(values), keys.shape[1] - first * COLUMNS)
        part, own = values[:count].reshape(max(blocks, 1), -1), keys[:, first * COLUMNS :][:, :count]
        # NumPy's einsum is faster than torch's for integers.
        for number, lane_sums in enumerate(np.einsum("bk,lk->bl", part, own).tolist(), block):
            lanes = [lanes[lane] + value * _block_key(lane, number) for lane, value in enumerate(lane_sums)]
        values, row = values[count:], row + count // COLUMNS
    return lanes


def _add_lanes(parts: Sequence[list[int]]) -> list[int]:
    return [sum(part[lane] for part in parts) & MASK for lane in range(LANES)]


@functools.cache
def _has_host_product() -> bool:
    # Elsewhere torch multiplies in a slow loop.
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if find_misfits(TOUCHED):
        return False
    # Without AVX512-VNNI, sums of two products may overflow 16 bits.
    keys = _byte_keys(torch.device("cpu"))
    octets = torch.stack([torch.where(keys[:, 0] > 0, low, -1 - low) for low in (-128, 127)])
    octets = torch.cat([octets, torch.tensor([-128, 127], device="cpu")[:, None].expand(2, ROW)]).to(
        torch.int8
    )
    octets = octets.repeat(16, 1)
    try:
        result = torch._int_mm(octets, keys)
    except RuntimeError:
        return False
    return torch.equal(result, _multiply_as_floats(octets, _float_keys()))


@functools.cache
def _has_device_product(device: torch.device) -> bool:
    if find_misfits(TOUCHED):
        return False
    keys = _byte_keys(torch.device("cpu"))
    octets = torch.where(keys.T > 0, -128, 127).to(torch.int8).repeat(MIN_DEVICE_ROWS, 1)
    try:
        result = torch._int_mm(octets.to(device), _byte_columns(device)).cpu()
    except RuntimeError:
        return False
    return torch.equal(result.to(torch.int64), octets.to(torch.int64) @ keys.to(torch.int64))


@functools.cache
def _byte_keys(device: torch.device) -> torch.Tensor:
    number = torch.arange(ROW * COLUMNS, dtype=torch.int64, device="cpu")
    values = _shift_right(_mix(number + _SEEDS[0]), 1) % 254 - 127
    return _move_keys((values + (values >= 0)).to(torch.int8).view(ROW, COLUMNS), device)


@functools.cache
def _byte_columns(device: torch.device) -> torch.Tensor:
    return _move_keys(_byte_keys(torch.device("cpu")).T.contiguous(), device).T


@functools.cache
def _float_keys() -> torch.Tensor:
    return _byte_keys(torch.device("cpu")).to(torch.float32)


@functools.cache
def _row_keys() -> npt.NDArray[Any]:
    number = torch.arange(ROWS * COLUMNS, dtype=torch.int64, device="cpu")
    return torch.stack([_mix(number + seed) | 1 for seed in _SEEDS[1 : 1 + LANES]]).numpy()


def _move_keys(keys: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = keys.to(device)
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    return copy


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    mixed = (numbers + 1) * to_signed(_STEP)
    mixed = (mixed ^ _shift_right(mixed, 30)) * to_signed(_MIX)
    mixed = (mixed ^ _shift_right(mixed, 27)) * to_signed(_MIX_AGAIN)
    return mixed ^ _shift_right(mixed, 31)


@functools.lru_cache(1 << 16)
def _block_key(lane: int, block: int) -> int:
    mixed = (block + _SEEDS[1 + LANES + lane] + 1) * _STEP & MASK
    mixed = (mixed ^ (mixed >> 30)) * _MIX & MASK
    mixed = (mixed ^ (mixed >> 27)) * _MIX_AGAIN & MASK
    return (mixed ^ (mixed >> 31)) | 1


def _shift_right(numbers: torch.Tensor, places: int) -> torch.Tensor:
    return (numbers >> places) & ((1 << (64 - places)) - 1)
