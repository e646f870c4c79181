"""Weighted sums over the words of a tensor, which tell whether two hold the same bits: exact on any device.

The bits of a tensor, elements in row-major order, are read as words of 8 bytes (little-endian, the last one
filled up with zeros), and words lie in blocks of 8192. In each of two lanes, with keys of their own, ::

    sum over words w = low + 2**32 * high at place r of block q:   B[q] * (A[r] * w + C[r] * high)   mod 2**64

where ``high`` is signed, and ``A``, ``B`` and ``C`` are odd numbers without a pattern. Within a block that
is the multilinear hash of Lemire and Kaser (Strongly universal string hashing is fast, 2012) over the
halves ``low`` and ``high``: a product by a number of 64 bits loses no more than 31 of them for a half word.
So any two different contents meet with a chance of at most some 2**-32 in a lane, 2**-64 in both, wherever
they differ. It is linear in the bytes: shares of a tensor add up, in any order, on any ranks.

Run on the CPU and on the pretend accelerator (docs/configuring.md), on no real one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Words and bytes of one block; most blocks at a time, on the host (what its cache holds) and elsewhere.
WORDS, HOST_MANY, MANY = 1 << 13, 1 << 3, 1 << 6
BLOCK = 8 * WORDS
LANES = 2
ALL = (1 << 64) - 1
#: Seeds of the keys: A of both lanes, C of both, B of both.
_SEEDS = tuple(number << 48 for number in range(1, 3 * LANES + 1))
_STEP, _MIX, _MORE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def lanes_of(octets: torch.Tensor, position: int = 0) -> list[int]:
    """The sums of both lanes over the bytes ``octets``, which begin at byte ``position`` of the tensor."""
    host = _on_host(octets.device)
    sums = [0] * LANES
    while octets.numel():
        block, offset = divmod(position, BLOCK)
        # Whole blocks together; what begins or ends within one by itself, for its keys begin there, too.
        blocks = 0 if offset else min(octets.numel() // BLOCK, HOST_MANY if host else MANY)
        taken = blocks * BLOCK or min(octets.numel(), BLOCK - offset)
        words = _words(octets[:taken], offset % 8).view(max(blocks, 1), -1)
        found = (_on_the_host if host else _elsewhere)(words, block, offset // 8)
        sums = [(total + value) & ALL for total, value in zip(sums, found, strict=True)]
        octets, position = octets[taken:], position + taken
    return sums


def lanes_of_elements(bits: torch.Tensor, octet: torch.Tensor, width: int) -> list[int]:
    """The same over single elements: their bits as integers, the byte at which each begins, its width."""
    if width < 8:
        bits = (bits & ((1 << (8 * width)) - 1)) << (8 * (octet % 8))
    word = octet // 8
    block, inside = word // WORDS, word % WORDS
    keys = _keys(bits.device)
    found = []
    for lane in range(LANES):
        weighted = keys[lane][inside] * bits + keys[LANES + lane][inside] * (bits >> 32)
        found.append(int((weighted * _block_keys(lane, block)).sum()))
    return found


def signed(number: int) -> int:
    """The 64-bit integer with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def _on_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _words(octets: torch.Tensor, lead: int) -> torch.Tensor:
    """Bytes as words of 8, of which the first ``lead`` bytes are not there and count as zeros."""
    rest = -(lead + octets.numel()) % 8
    if lead or rest:
        octets = torch.cat([octets.new_zeros(lead), octets, octets.new_zeros(rest)])
    elif octets.storage_offset() % 8:
        octets = octets.clone()
    return octets.view(torch.int64)


def _on_the_host(words: torch.Tensor, block: int, place: int) -> list[int]:
    """The sums of both lanes over rows of words, from ``place`` on in blocks that follow each other."""
    # NumPy's einsum of integers keeps sums in registers, several at a time; torch writes the products to
    # memory first, and NumPy's dot has one sum (2.6, 0.9 and 2.0 GB/s on a core).
    data = words.numpy()
    keys = _host_keys()[:, place : place + data.shape[1]]
    rows = np.einsum("bw,lw->bl", data, keys[:LANES]) + np.einsum("bw,lw->bl", data >> 32, keys[LANES:])
    return [
        sum(value * _block_key(lane, block + number) for number, value in enumerate(column))
        for lane, column in enumerate(rows.T.tolist())
    ]


def _elsewhere(words: torch.Tensor, block: int, place: int) -> list[int]:
    """The same on an accelerator, which has products of matrices for floats alone."""
    keys = _keys(words.device)[:, place : place + words.shape[1]]
    upper = words >> 32
    blocks = torch.arange(block, block + len(words), device=words.device)
    found = []
    for lane in range(LANES):
        rows = (words * keys[lane]).sum(1) + (upper * keys[LANES + lane]).sum(1)
        found.append((rows * _block_keys(lane, blocks)).sum())
    return [int(value) for value in torch.stack(found).tolist()]


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """A of both lanes, then C of both, [4, WORDS]."""
    place = torch.arange(WORDS, dtype=torch.int64, device="cpu")
    return torch.stack([_mixed(place + seed) for seed in _SEEDS[: 2 * LANES]]).to(device)


@functools.cache
def _host_keys() -> npt.NDArray[Any]:
    return _keys(torch.device("cpu")).numpy()


def _block_keys(lane: int, blocks: torch.Tensor) -> torch.Tensor:
    """B of a lane for each of the ``blocks``: odd, without a pattern, the same everywhere."""
    return _mixed(blocks + signed(_SEEDS[2 * LANES + lane]))


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 of numbers that have the seed in them, made odd."""
    mixed = (numbers + 1) * signed(_STEP)
    mixed = (mixed ^ _shifted(mixed, 30)) * signed(_MIX)
    mixed = (mixed ^ _shifted(mixed, 27)) * signed(_MORE)
    return (mixed ^ _shifted(mixed, 31)) | 1


@functools.lru_cache(1 << 16)
def _block_key(lane: int, block: int) -> int:
    """``_block_keys`` of one block."""
    mixed = (block + _SEEDS[2 * LANES + lane] + 1) * _STEP & ALL
    mixed = (mixed ^ (mixed >> 30)) * _MIX & ALL
    mixed = (mixed ^ (mixed >> 27)) * _MORE & ALL
    return (mixed ^ (mixed >> 31)) | 1


def _shifted(numbers: torch.Tensor, places: int) -> torch.Tensor:
    """A shift to the right that brings in zeros."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)
