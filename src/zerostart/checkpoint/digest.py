"""Digests of tensors that know no layout: sums over positions, so that shares add up in any order.

The bits of a tensor, elements in row-major order, are read as words of 8 bytes (little-endian, the last one
filled up with zeros), and words lie in blocks of 8192. In each of two lanes, with keys of their own, ::

    sum over words w = low + 2**32 * high at place r of block q:   B[q] * (A[r] * w + C[r] * high)   mod 2**64

where ``high`` is signed, and ``A``, ``B`` and ``C`` are odd numbers without a pattern. Within a block that
is the multilinear hash of Lemire and Kaser (Strongly universal string hashing is fast, 2012) over the
halves ``low`` and ``high``: a product by a number of 64 bits loses no more than 31 of them for a half word.
So any two different contents meet with a chance of at most some 2**-32 in a lane, 2**-64 in both, wherever
they differ. It is linear in the bytes: a word of which several ranks have some bytes each is summed up like
all else. The digest is the BLAKE2b hash, 128 bits, of the lanes with dtype and shape. It finds accidents;
it is no protection from somebody who looks for a collision.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Protocol

import torch

from zerostart.checkpoint.catalog import DTYPE_BITS
from zerostart.errors import CheckpointError
from zerostart.upstream.torch.tensors import has_byte_products, product_of_bytes

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


#: Bytes that a thread takes which adds.
ROOM = TOGETHER * BLOCK
#: Bytes that are summed up in the time of one call, and of one element by itself; and elements at a time.
CALL, SINGLE, ELEMENTS = 100_000, 100, 1 << 16


class Ranks(Protocol):
    """Those who have a part of the tensors each."""

    def all_reduce_sum(self, values: torch.Tensor, during: str) -> torch.Tensor:
        """The sum over all of them of a 1-D tensor of integers; collective."""
        ...


class Digests:
    """The digests of ``entries`` (name, dtype in safetensors' spelling, shape), the same on all ranks.

    Each element is added once by anybody, in any order and in any pieces; :meth:`summed` tells if one was
    not. Safe to share between threads.
    """

    def __init__(self, entries: Iterable[tuple[str, str, Sequence[int]]]) -> None:
        self._entries: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype, tuple(shape)) for name, dtype, shape in entries
        }
        self._sums: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._blocks: list[Blocks] = []

    def add(self, name: str, first: int, data: torch.Tensor | bytes | bytearray | memoryview) -> None:
        """Add elements of tensor ``name`` from element ``first`` of its row-major order on.

        ``data`` is a contiguous 1-D tensor on any device, with elements as wide as the entry's, or their
        bytes. Of dtypes narrower than a byte both begin and end at a byte.
        """
        bits = self._bits(name)
        octets = _octets(data)
        self._count(name, octets.numel() * 8 // bits)
        self._sum(name, octets, first * bits // 8)

    def add_rows(self, name: str, first: int, step: int, data: torch.Tensor) -> None:
        """Add rows: ``data`` is [rows, count], and row ``k`` begins at element ``first + k * step``."""
        bits = self._bits(name)
        rows, count = data.shape
        if step == count or rows == 1:
            self.add(name, first, data.contiguous().view(-1))
            return
        alone, spread, scattered = CALL + count * bits // 8, step * bits // 8, SINGLE * count
        if bits < 8 or alone <= min(spread, scattered):
            for row in range(rows):
                self.add(name, first + row * step, data[row].contiguous())
            return
        together = max(1, MANY * BLOCK // spread if spread <= scattered else ELEMENTS // max(count, 1))
        for row in range(0, rows, together):
            part, place = data[row : row + together], first + row * step
            self._count(name, part.numel())
            if spread <= scattered:
                self._sum(name, _spread(part, step), place * bits // 8)
            else:
                self._note(name, _scattered(part, place, step, bits // 8))

    def summed(self, world: Ranks | None = None) -> dict[str, str]:
        """The digest of each entry as 32 hexadecimal digits; collective, one reduction. None: nobody else.

        Raises CheckpointError if the elements added on all ranks are not as many as the entry has.
        """
        for blocks in self._blocks:
            blocks.finish()
        table = torch.tensor([self._row(name) for name in self._entries], dtype=torch.int64, device="cpu")
        total = table if world is None else world.all_reduce_sum(table.view(-1), "summing up digests")
        found = {}
        for (name, (dtype, shape)), row in zip(
            self._entries.items(), total.view(-1, 2 * LANES + 1).tolist(), strict=True
        ):
            if row[-1] != prod(shape):
                raise CheckpointError(
                    f"{name}: {row[-1]} elements were counted for its digest, and it has {prod(shape)}"
                )
            lanes = [(row[2 * lane] + (row[2 * lane + 1] << 32)) & ALL for lane in range(LANES)]
            found[name] = _final(dtype, shape, lanes)
        return found

    def _bits(self, name: str) -> int:
        return DTYPE_BITS[self._entries[name][0]]

    def _sum(self, name: str, octets: torch.Tensor, position: int) -> None:
        """Add bytes that begin at byte ``position``."""
        if octets.device.type != "cpu" or not (has_byte_products() and bytes_agree()):
            self._note(name, lanes_of(octets, position))
            return
        if not hasattr(self._own, "blocks"):
            self._own.blocks = Blocks(self._note)
            with self._lock:
                self._blocks.append(self._own.blocks)
        self._own.blocks.add(name, octets, position)

    def _count(self, name: str, elements: int) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + elements

    def _note(self, name: str, lanes: Sequence[int]) -> None:
        with self._lock:
            sums = self._sums.setdefault(name, [0] * LANES)
            for lane, value in enumerate(lanes):
                sums[lane] = (sums[lane] + value) & ALL

    def _row(self, name: str) -> list[int]:
        """The lanes in halves, whose sum over ranks fits, and the elements."""
        lanes = self._sums.get(name, [0] * LANES)
        halves = [half for lane in lanes for half in (lane & 0xFFFFFFFF, lane >> 32)]
        return [*halves, self._counts.get(name, 0)]


def _final(dtype: str, shape: Sequence[int], lanes: Sequence[int]) -> str:
    text = f"{dtype} {list(shape)} ".encode() + b"".join(lane.to_bytes(8, "little") for lane in lanes)
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _octets(data: torch.Tensor | bytes | bytearray | memoryview) -> torch.Tensor:
    """The bytes of ``data`` where they lie."""
    if not isinstance(data, torch.Tensor):
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if not view.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj()).view(-1)
    return data.detach().view(torch.uint8)


def _spread(data: torch.Tensor, step: int) -> torch.Tensor:
    """The bytes of rows as ``add_rows`` takes them, with zeros for those between."""
    room = data.new_zeros(data.shape[0], step)
    room[:, : data.shape[1]] = data
    return _octets(room.view(-1)[: (data.shape[0] - 1) * step + data.shape[1]])


def _scattered(data: torch.Tensor, first: int, step: int, width: int) -> list[int]:
    """The sums of both lanes over such rows, without room for what lies between."""
    rows, count = data.shape
    device = data.device
    place = first + step * torch.arange(rows, device=device)[:, None] + torch.arange(count, device=device)
    octet = place.view(-1) * width
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    # Contiguous, so that elements of two numbers are one row of words.
    bits = data.detach().contiguous().view(-1).view(kind).to(torch.int64)
    return lanes_of_elements(bits, octet, width)


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
