"""The sums of a digest over words of 8 bytes (``digest.py`` has the formula), exact on any device.

Run on the CPU and on the pretend accelerator (docs/configuring.md), on no real one.

Two ways to the same integers. An accelerator, and a processor that has no faster one, multiplies words by
keys of 64 bits. Where the processor multiplies bytes (AVX-512), a lane's sum over a block is a product of
matrices of bytes: of the block's bytes, made signed by 128 less, and of each byte's weight in it, ``A`` and
``2**32 * A + C`` shifted to its place, in digits of 7 bits. ``2**7 * 2**7 * 2**16`` fits into 32 bits, and
two products of an unsigned byte by such a digit into 16: some processors add up pairs there, and saturate.
The weights are many: so blocks, whatever tensors they are of, wait until there are some to multiply at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from zerostart.upstream.torch.tensors import product_of_bytes

#: Words of one block, and most blocks at a time.
WORDS, MANY = 1 << 13, 1 << 6
BLOCK = 8 * WORDS
LANES = 2
ALL = (1 << 64) - 1
#: Blocks whose bytes are multiplied at a time: 2 MiB for each thread that adds.
TOGETHER = 32
#: Seeds of the keys: A of both lanes, C of both, B of both.
_SEEDS = tuple(number << 48 for number in range(1, 3 * LANES + 1))
_STEP, _MIX, _MORE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: Digits of a weight, from -64 to 63 each, and their width.
_DIGITS, _WIDTH = 10, 7
#: Flipped in each byte of a word but the last, which is signed as it is: 128 less, as a signed byte.
_FLIPPED, _BYTES = 0x0080808080808080, 8


class Blocks:
    """Bytes of one thread in blocks that wait to be multiplied together.

    ``told`` gets the sums of both lanes over a block, and the name of its tensor.
    """

    def __init__(self, told: Callable[[str, list[int]], None]) -> None:
        self._told = told
        self._waiting: list[tuple[str, int]] = []
        self._room = torch.empty(TOGETHER, WORDS, dtype=torch.int64, device="cpu")

    def add(self, name: str, octets: torch.Tensor, position: int) -> None:
        """Add bytes of the tensor ``name`` that begin at its byte ``position``."""
        while octets.numel():
            block, offset = divmod(position, BLOCK)
            row = len(self._waiting)
            blocks = 0 if offset else min(octets.numel() // BLOCK, TOGETHER - row)
            taken = blocks * BLOCK or min(octets.numel(), BLOCK - offset)
            self._put(octets[:taken], offset, self._room[row : row + max(blocks, 1)])
            self._waiting += [(name, block + number) for number in range(max(blocks, 1))]
            octets, position = octets[taken:], position + taken
            if len(self._waiting) == TOGETHER:
                self.finish()

    def finish(self) -> None:
        """Multiply what waits, and tell of it."""
        if not self._waiting:
            return
        weights, units, shift = _weights()
        digits = product_of_bytes(self._room.view(torch.int8), weights).to(torch.int64)
        sums = ((digits * units).view(-1, LANES, _DIGITS).sum(2) + shift).tolist()
        for (name, block), row in zip(self._waiting, sums, strict=False):
            self._told(name, [value * _block_key(lane, block) for lane, value in enumerate(row)])
        self._waiting.clear()

    @staticmethod
    def _put(octets: torch.Tensor, offset: int, room: torch.Tensor) -> None:
        """Bytes into ``room``, made signed, with zeros for those that are not there."""
        words = room.view(-1)
        if octets.numel() == 8 * words.numel() and octets.storage_offset() % 8 == 0:
            torch.bitwise_xor(octets.view(torch.int64), _FLIPPED, out=words)
            return
        if octets.numel() < 8 * words.numel():
            words.zero_()
        words.view(torch.uint8)[offset : offset + octets.numel()] = octets
        words.bitwise_xor_(_FLIPPED)


@functools.cache
def bytes_agree() -> bool:
    """Whether products of bytes are exact on this processor: both ways over some bytes, extremes among them.

    Digests of other values would be worse than slow ones.
    """
    number = torch.arange(3 * BLOCK, dtype=torch.int64, device="cpu")
    octets = ((number * 0x9E3779B1) >> 15).to(torch.uint8)
    octets[:BLOCK:2], octets[BLOCK + 7 : 2 * BLOCK : 3] = 255, 0
    sums = [0] * LANES

    def told(_: str, lanes: list[int]) -> None:
        sums[:] = [(total + value) & ALL for total, value in zip(sums, lanes, strict=True)]

    blocks = Blocks(told)
    blocks.add("", octets, 0)
    blocks.finish()
    return sums == [value & ALL for value in lanes_of(octets, 0)]


def lanes_of(octets: torch.Tensor, position: int) -> list[int]:
    """The sums of both lanes over the bytes ``octets``, which begin at byte ``position`` of the tensor."""
    many = 1 if _on_host(octets.device) else MANY
    sums = [0] * LANES
    while octets.numel():
        block, offset = divmod(position, BLOCK)
        blocks = 0 if offset else min(octets.numel() // BLOCK, many)
        taken = blocks * BLOCK or min(octets.numel(), BLOCK - offset)
        words = _words(octets[:taken], offset % 8).view(max(blocks, 1), -1)
        found = _by_words(words, block, offset // 8)
        sums = [total + value for total, value in zip(sums, found, strict=True)]
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


def _by_words(words: torch.Tensor, block: int, place: int) -> list[int]:
    """The sums of both lanes over rows of words, from ``place`` on in blocks that follow each other."""
    keys = _keys(words.device)[:, place : place + words.shape[1]]
    upper = words >> 32
    if _on_host(words.device):  # one block, at the speed of the cache; accelerators have it for floats alone
        sums = torch.mv(keys[:LANES], words[0]) + torch.mv(keys[LANES:], upper[0])
        return [value * _block_key(lane, block) for lane, value in enumerate(sums.tolist())]
    blocks = torch.arange(block, block + len(words), device=words.device)
    found = []
    for lane in range(LANES):
        rows = (words * keys[lane]).sum(1) + (upper * keys[LANES + lane]).sum(1)
        found.append((rows * _block_keys(lane, blocks)).sum())
    return [int(value) for value in torch.stack(found).tolist()]


@functools.cache
def _weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Digits of the weight of each byte of a block, [BLOCK, lanes x digits], with what each digit counts;

    and for each lane what the bytes have lost by being made signed.
    """
    keys = _keys(torch.device("cpu"))
    places = torch.arange(0, 32, 8, dtype=torch.int64, device="cpu")
    columns, shift = [], []
    for lane in range(LANES):
        low, high = keys[lane][:, None], (keys[lane] << 32)[:, None] + keys[LANES + lane][:, None]
        weight = torch.cat([low << places, high << places], 1)
        shift.append(weight[:, : _BYTES - 1].sum() * 128)
        left = weight.view(-1)
        for _ in range(_DIGITS):
            digit = ((left + 64) & 127) - 64
            columns.append(digit.to(torch.int8))
            left = (left - digit) >> _WIDTH
    units = torch.tensor([1 << (_WIDTH * digit) for digit in range(_DIGITS - 1)] + [-(1 << 63)], device="cpu")
    return torch.stack(columns, 1), units.repeat(LANES), torch.stack(shift)


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    """A of both lanes, then C of both, [4, WORDS]."""
    place = torch.arange(WORDS, dtype=torch.int64, device="cpu")
    return torch.stack([_mixed(place + seed) for seed in _SEEDS[: 2 * LANES]]).to(device)


def _block_keys(lane: int, blocks: torch.Tensor) -> torch.Tensor:
    """B of a lane for each of the ``blocks``: odd, without a pattern, the same everywhere."""
    return _mixed(blocks + _signed(_SEEDS[2 * LANES + lane]))


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 of numbers that have the seed in them, made odd."""
    mixed = (numbers + 1) * _signed(_STEP)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_MIX)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_MORE)
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


def _signed(number: int) -> int:
    """The 64-bit integer with the same bits."""
    return number - (1 << 64) if number >> 63 else number
