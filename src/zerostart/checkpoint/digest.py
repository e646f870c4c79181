"""Layout-free digests of tensors: sums over positions that shards add in any order.

The digest is the BLAKE2b hash, 128 bits, of the sums in ``upstream/torch/byte_sums.py`` with dtype and shape,
after the number of this definition: 34 hexadecimal digits. It detects accidents, not deliberate collisions.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Protocol

import torch

from zerostart.checkpoint.catalog import DTYPE_BITS
from zerostart.errors import CheckpointError
from zerostart.upstream.torch.byte_sums import (
    BLOCK,
    LANES,
    MASK,
    ROW,
    lanes_of,
    lanes_of_rows,
)

#: Prefix of each digest. The previous definition, sums over words, had none.
DEFINITION = "02"
#: Memory of a thread that adds, in bytes.
ROOM = BLOCK


class Ranks(Protocol):
    """Ranks that own a part of each tensor."""

    def all_reduce_sum(self, values: torch.Tensor, during: str) -> torch.Tensor:
        """Sum a 1-D integer tensor over all ranks; collective."""
        ...


class Digests:
    """Digests of ``entries`` (name, safetensors dtype, shape).

    The digests are equal on all ranks. Any rank adds each element once, in any order and in any pieces;
    :meth:`summed` detects missing ones. Safe to share between threads.
    """

    def __init__(self, entries: Iterable[tuple[str, str, Sequence[int]]]) -> None:
        self._entries: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype, tuple(shape)) for name, dtype, shape in entries
        }
        self._sums: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, first: int, data: torch.Tensor | bytes | bytearray | memoryview) -> None:
        """Add elements of a tensor from element ``first``.

        Elements count in row-major order. ``data`` is a contiguous 1-D tensor on any device, with
        elements as wide as the entry's, or their bytes. For dtypes narrower than a byte both begin
        and end at a byte.
        """
        bits = self._bits(name)
        octets = _octets(data)
        self._count(name, octets.numel() * 8 // bits)
        self._note(name, lanes_of(octets, first * bits // 8))

    def add_rows(self, name: str, first: int, step: int, data: torch.Tensor) -> None:
        """Add ``data`` [rows, count]; row ``k`` begins at ``first + k * step``."""
        bits = self._bits(name)
        rows, count = data.shape
        if step == count or rows == 1:
            self.add(name, first, data.contiguous().view(-1))
            return
        width = max(1, bits // 8)
        # Rows that begin at the same offset in a row of the sums are added together.
        if bits < 8 or rows <= ROW // gcd(step * width, ROW):
            for row in range(rows):
                self.add(name, first + row * step, data[row].contiguous())
            return
        self._count(name, rows * count)
        self._note(name, lanes_of_rows(_bytes_of_rows(data), first * width, step * width))

    def summed(self, world: Ranks | None = None) -> dict[str, str]:
        """Return the digest of each entry; collective, one reduction.

        A digest has 34 hexadecimal digits. ``world`` is None for a single process. Raises
        CheckpointError if the ranks added more or fewer elements than the entry has.
        """
        digests = {}
        for name, (*lanes, elements) in self.sums(world).items():
            dtype, shape = self._entries[name]
            if elements != prod(shape):
                raise CheckpointError(
                    f"tensor {name}: {elements} elements were counted for its digest, but the tensor has "
                    f"{prod(shape)}; this is a bug in zerostart"
                )
            digests[name] = _final(dtype, shape, lanes)
        return digests

    def sums(self, world: Ranks | None = None) -> dict[str, tuple[int, ...]]:
        """Return sums and element counts over all ranks.

        Collective, one reduction; ``world`` is None for a single process.
        """
        # One row for each entry, in the same order on all ranks: sums and counts share one reduction.
        table = torch.tensor([self._row(name) for name in self._entries], dtype=torch.int64, device="cpu")
        total = table if world is None else world.all_reduce_sum(table.view(-1), "summing up digests")
        sums = {}
        for name, row in zip(self._entries, total.view(-1, 2 * LANES + 1).tolist(), strict=True):
            # The halves were summed without overflow; the joined lanes wrap as usual.
            lanes = ((row[2 * lane] + (row[2 * lane + 1] << 32)) & MASK for lane in range(LANES))
            sums[name] = (*lanes, row[-1])
        return sums

    def _bits(self, name: str) -> int:
        return DTYPE_BITS[self._entries[name][0]]

    def _count(self, name: str, elements: int) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + elements

    def _note(self, name: str, lanes: Sequence[int]) -> None:
        with self._lock:
            sums = self._sums.setdefault(name, [0] * LANES)
            for lane, value in enumerate(lanes):
                sums[lane] = (sums[lane] + value) & MASK

    def _row(self, name: str) -> list[int]:
        """Return the sums in halves, and the element count."""
        lanes = self._sums.get(name, [0] * LANES)
        halves = [half for lane in lanes for half in (lane & 0xFFFFFFFF, lane >> 32)]
        return [*halves, self._counts.get(name, 0)]


def _final(dtype: str, shape: Sequence[int], lanes: Sequence[int]) -> str:
    text = f"{dtype} {list(shape)} ".encode() + b"".join(lane.to_bytes(8, "little") for lane in lanes)
    return DEFINITION + hashlib.blake2b(text, digest_size=16).hexdigest()


def is_comparable(digest: object) -> bool:
    """Return True if ``digest`` has this module's definition."""
    return isinstance(digest, str) and len(digest) == 34 and digest.startswith(DEFINITION)


def _octets(data: torch.Tensor | bytes | bytearray | memoryview) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if not view.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj()).view(-1)
    return data.detach().view(torch.uint8)


def _bytes_of_rows(data: torch.Tensor) -> torch.Tensor:
    """Return [rows, count] as [rows, bytes]."""
    if data.stride(1) != 1:
        data = data.contiguous()
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj()).flatten(1)
    return data.detach().view(torch.uint8)
