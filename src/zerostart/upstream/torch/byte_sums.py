"""Keyed sums over the bytes of a tensor, which tell whether two hold the same bits: exact on any device.

The bits of a tensor, elements in row-major order, are bytes ``b``, taken as signed. They lie in rows of 1024,
and rows in blocks of 1024. Each row has eight sums; in each of two lanes, with keys of their own, ::

    s[r, n] = sum over k of b[r, k] * W[k, n]                                 exact, below 2**24
    lane    = sum over blocks q, rows r, columns n of B[q] * A[r, n] * s[r, n]         mod 2**64

``W`` are numbers of -127 to 127 without zero, ``A`` and ``B`` odd ones of 64 bits, all without a pattern. Of
two rows that differ a column is the same for one in 254 choices of its keys at most, all eight columns for
one in 2**63. Sums that differ are told by the multilinear hash of Lemire and Kaser (Strongly universal string
hashing is fast, 2012): a product by a number of 64 bits loses as many of them as the difference has zeros at
its end, which is few in one of eight columns. So two contents meet with a chance of some 2**-60, wherever
they differ. It is linear in the bytes: shares of a tensor add up, in any order, on any ranks.

The first sums are a product of matrices. Processors and CUDA have it for bytes (``torch._int_mm``, a private
name; CUDA's takes 17 rows at least, each of which begins at a multiple of 16 bytes). Other processors take
that of fp32, which is exact as well: bytes and keys have eight bits, and no sum of products leaves the 24 of
fp32. Other devices multiply and add integers.
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

from zerostart.upstream.guard import Use, misfit

#: Bytes of a row, rows and bytes of a block, sums of a row.
ROW, ROWS, COLUMNS = 1 << 10, 1 << 10, 8
BLOCK = ROWS * ROW
LANES = 2
#: Bytes of a tensor whose rows are weighed together, with zeros between, where few of its bytes are there.
TOGETHER = 16 * BLOCK
#: Most bytes that are multiplied at a time; as fp32 on the host, of what its cache holds.
MANY, HOST_MANY = 4 * BLOCK, 1 << 17
#: Most bytes that an accelerator sums up at a time.
THERE_MANY = 64 * BLOCK
#: Fewest rows of a product of bytes on an accelerator (CUDA), and where in memory each begins.
LEAST_THERE, ALIGNED = 17, 16
ALL = (1 << 64) - 1
#: Seeds of the keys: W, A of both lanes, B of both.
_SEEDS = tuple(number << 48 for number in range(1, 2 * LANES + 2))
_STEP, _MIX, _MORE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

TOUCHED = (Use("torch", "_int_mm", "the product of matrices of bytes"),)


def lanes_of(octets: torch.Tensor, position: int = 0) -> list[int]:
    """The sums of both lanes over the bytes ``octets``, which begin at byte ``position`` of the tensor."""
    parts = []
    octets, most = octets.view(torch.int8), MANY if _is_host(octets.device) else THERE_MANY
    while count := octets.numel():
        row, inside = divmod(position, ROW)
        whole = 0 if inside else min(count, most) // ROW
        taken = whole * ROW or min(count, ROW - inside)
        parts.append(_weighed(_row_sums(octets[:taken].view(max(whole, 1), -1), inside), row))
        octets, position = octets[taken:], position + taken
    return _added(parts)


def lanes_of_rows(octets: torch.Tensor, position: int, step: int) -> list[int]:
    """The same over ``octets`` [number, length], of which ``k`` begins at byte ``position + k * step``."""
    number, length = octets.shape
    parts = []
    # A few blocks at a time: most sums of rows are zeros.
    many = max(1, TOGETHER // step)
    for begin in range(0, number if length else 0, many):
        at = position + begin * step
        part = octets[begin : begin + many]
        row = at // ROW
        last = (at + (part.shape[0] - 1) * step + length - 1) // ROW
        sums = torch.zeros(last + 1 - row, COLUMNS, dtype=torch.int32, device=part.device)
        _sum_rows(sums, part.view(torch.int8), at - row * ROW, step)
        parts.append(_weighed(sums, row))
    return _added(parts)


def _sum_rows(sums: torch.Tensor, octets: torch.Tensor, position: int, step: int) -> None:
    number, length = octets.shape
    period = ROW // math.gcd(step, ROW)
    apart = period * step // ROW
    for first in range(min(period, number)):
        part = octets[first::period]
        count = part.shape[0]
        row, inside = divmod(position + first * step, ROW)
        if not inside and length % ROW == 0 and part.is_contiguous():
            shape, strides = (count, length // ROW * COLUMNS), (apart * COLUMNS, 1)
            made = _row_sums(part.view(-1, ROW), 0).view(shape)
            sums.as_strided(shape, strides, row * COLUMNS).add_(made)
            continue
        at = 0
        while at < length:
            taken = min(length - at, ROW - inside)
            made = _row_sums(part[:, at : at + taken], inside)
            sums[row : row + (count - 1) * apart + 1 : apart].add_(made)
            row, at, inside = row + 1, at + taken, 0


def signed(number: int) -> int:
    """The 64-bit integer with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _row_sums(octets: torch.Tensor, inside: int) -> torch.Tensor:
    length = octets.shape[1]
    if octets.stride(1) != 1 or octets.stride(0) < length:
        octets = octets.contiguous()
    keys, device = slice(inside, inside + length), octets.device
    if not _is_host(device) and _has_products_of_bytes_there(device):
        rows = octets.shape[0]
        if length < ROW or rows < LEAST_THERE:
            # Zeros around them: a product of floats would take room that stays taken, for each stream.
            room = octets.new_zeros(max(rows, LEAST_THERE), ROW)
            room[:rows, keys] = octets
            octets = room
        elif octets.data_ptr() % ALIGNED or octets.stride(0) % ALIGNED:
            octets = octets.clone(memory_format=torch.contiguous_format)
        return torch._int_mm(octets, _byte_columns(device))[:rows]
    if _is_host(device) and _has_products_of_bytes():
        # It is asked for the number of threads so that torch, which does so lazily, sets it in this one.
        torch.get_num_threads()
        return torch._int_mm(octets, _byte_keys(device)[keys])
    if _is_host(device):
        return _by_floats(octets, _float_keys()[keys])
    # No product of floats: cuBLAS refuses it in torch's deterministic mode without a workspace.
    columns = _byte_keys(device)[keys].T
    made = []
    for part in torch.split(octets, max(1, MANY // length)):
        wide = part.to(torch.int16)  # in which a product of two bytes has room
        made.append(torch.stack([(wide * each).sum(1) for each in columns], 1))
    return torch.cat(made)


def _by_floats(octets: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    made = torch.empty(octets.shape[0], COLUMNS, dtype=torch.float32, device="cpu")
    rows = max(1, HOST_MANY // octets.shape[1])
    for part, place in zip(torch.split(octets, rows), torch.split(made, rows), strict=True):
        # Into a place, where autocast leaves it as it is.
        torch.mm(part.to(torch.float32), keys, out=place)
    return made.to(torch.int32)


def _weighed(sums: torch.Tensor, row: int) -> list[int]:
    lanes = [0] * LANES
    values, keys = sums.cpu().view(-1).numpy().astype(np.int64), _row_keys()
    while len(values):
        block, first = divmod(row, ROWS)
        many = 0 if first else len(values) // keys.shape[1]
        count = many * keys.shape[1] or min(len(values), keys.shape[1] - first * COLUMNS)
        part, own = values[:count].reshape(max(many, 1), -1), keys[:, first * COLUMNS :][:, :count]
        # NumPy's einsum of integers keeps sums in registers; torch writes the products to memory first.
        for number, found in enumerate(np.einsum("bk,lk->bl", part, own).tolist(), block):
            lanes = [lanes[lane] + value * _block_key(lane, number) for lane, value in enumerate(found)]
        values, row = values[count:], row + count // COLUMNS
    return lanes


def _added(parts: Sequence[list[int]]) -> list[int]:
    return [sum(part[lane] for part in parts) & ALL for lane in range(LANES)]


@functools.cache
def _has_products_of_bytes() -> bool:
    # Elsewhere torch has a loop over numbers for it.
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if misfit(TOUCHED):
        return False
    # Before AVX512-VNNI pairs of products were summed up in 16 bits, and cut off there.
    keys = _byte_keys(torch.device("cpu"))
    octets = torch.stack([torch.where(keys[:, 0] > 0, low, -1 - low) for low in (-128, 127)])
    octets = torch.cat([octets, torch.tensor([-128, 127], device="cpu")[:, None].expand(2, ROW)]).to(
        torch.int8
    )
    octets = octets.repeat(16, 1)
    try:
        found = torch._int_mm(octets, keys)
    except RuntimeError:
        return False
    return torch.equal(found, _by_floats(octets, _float_keys()))


@functools.cache
def _has_products_of_bytes_there(device: torch.device) -> bool:
    if misfit(TOUCHED):
        return False
    keys = _byte_keys(torch.device("cpu"))
    octets = torch.where(keys.T > 0, -128, 127).to(torch.int8).repeat(LEAST_THERE, 1)
    try:
        found = torch._int_mm(octets.to(device), _byte_columns(device)).cpu()
    except RuntimeError:
        return False
    return torch.equal(found.to(torch.int64), octets.to(torch.int64) @ keys.to(torch.int64))


@functools.cache
def _byte_keys(device: torch.device) -> torch.Tensor:
    number = torch.arange(ROW * COLUMNS, dtype=torch.int64, device="cpu")
    drawn = _shifted(_mixed(number + _SEEDS[0]), 1) % 254 - 127
    return _moved((drawn + (drawn >= 0)).to(torch.int8).view(ROW, COLUMNS), device)


@functools.cache
def _byte_columns(device: torch.device) -> torch.Tensor:
    return _moved(_byte_keys(torch.device("cpu")).T.contiguous(), device).T


@functools.cache
def _float_keys() -> torch.Tensor:
    return _byte_keys(torch.device("cpu")).to(torch.float32)


@functools.cache
def _row_keys() -> npt.NDArray[Any]:
    number = torch.arange(ROWS * COLUMNS, dtype=torch.int64, device="cpu")
    return torch.stack([_mixed(number + seed) | 1 for seed in _SEEDS[1 : 1 + LANES]]).numpy()


def _moved(keys: torch.Tensor, device: torch.device) -> torch.Tensor:
    there = keys.to(device)
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    return there


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    mixed = (numbers + 1) * signed(_STEP)
    mixed = (mixed ^ _shifted(mixed, 30)) * signed(_MIX)
    mixed = (mixed ^ _shifted(mixed, 27)) * signed(_MORE)
    return mixed ^ _shifted(mixed, 31)


@functools.lru_cache(1 << 16)
def _block_key(lane: int, block: int) -> int:
    mixed = (block + _SEEDS[1 + LANES + lane] + 1) * _STEP & ALL
    mixed = (mixed ^ (mixed >> 30)) * _MIX & ALL
    mixed = (mixed ^ (mixed >> 27)) * _MORE & ALL
    return (mixed ^ (mixed >> 31)) | 1


def _shifted(numbers: torch.Tensor, places: int) -> torch.Tensor:
    return (numbers >> places) & ((1 << (64 - places)) - 1)
