"""Digests of tensors that know no layout: sums over positions, so that shares add up in any order.

The digest is the BLAKE2b hash, 128 bits, of the sums in ``upstream/torch/byte_sums.py`` with dtype and shape,
behind the number of this definition: 34 hexadecimal digits. It finds accidents; it is no protection from
somebody who looks for a collision.
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

#: What each digest begins with. Those of the definition before, sums over words, had nothing there.
DEFINITION = "02"
#: Bytes that a thread takes which adds.
ROOM = BLOCK


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

    def add(self, name: str, first: int, data: torch.Tensor | bytes | bytearray | memoryview) -> None:
        """Add elements of tensor ``name`` from element ``first`` of its row-major order on.

        ``data`` is a contiguous 1-D tensor on any device, with elements as wide as the entry's, or their
        bytes. Of dtypes narrower than a byte both begin and end at a byte.
        """
        bits = self._bits(name)
        octets = _octets(data)
        self._count(name, octets.numel() * 8 // bits)
        self._note(name, lanes_of(octets, first * bits // 8))

    def add_rows(self, name: str, first: int, step: int, data: torch.Tensor) -> None:
        """Add rows: ``data`` is [rows, count], and row ``k`` begins at element ``first + k * step``."""
        bits = self._bits(name)
        rows, count = data.shape
        if step == count or rows == 1:
            self.add(name, first, data.contiguous().view(-1))
            return
        width = max(1, bits // 8)
        # Rows that begin at the same place of a row of the sums are added together.
        if bits < 8 or rows <= ROW // gcd(step * width, ROW):
            for row in range(rows):
                self.add(name, first + row * step, data[row].contiguous())
            return
        self._count(name, rows * count)
        self._note(name, lanes_of_rows(_bytes_of_rows(data), first * width, step * width))

    def summed(self, world: Ranks | None = None) -> dict[str, str]:
        """The digest of each entry as 34 hexadecimal digits; collective, one reduction. None: nobody else.

        Raises CheckpointError if the elements added on all ranks are not as many as the entry has.
        """
        found = {}
        for name, (*lanes, elements) in self.sums(world).items():
            dtype, shape = self._entries[name]
            if elements != prod(shape):
                raise CheckpointError(
                    f"tensor {name}: {elements} elements were counted for its digest, but the tensor has "
                    f"{prod(shape)}; this is a bug in zerostart"
                )
            found[name] = _final(dtype, shape, lanes)
        return found

    def sums(self, world: Ranks | None = None) -> dict[str, tuple[int, ...]]:
        """The lanes of each entry over the elements that were added on all ranks, and how many these are.

        Collective, one reduction; None: nobody else.
        """
        # One row for each entry, in the order that all ranks have: sums and counts travel in one reduction.
        table = torch.tensor([self._row(name) for name in self._entries], dtype=torch.int64, device="cpu")
        total = table if world is None else world.all_reduce_sum(table.view(-1), "summing up digests")
        found = {}
        for name, row in zip(self._entries, total.view(-1, 2 * LANES + 1).tolist(), strict=True):
            # The halves were summed without overflow; put together again they wrap as the lanes do.
            lanes = ((row[2 * lane] + (row[2 * lane + 1] << 32)) & MASK for lane in range(LANES))
            found[name] = (*lanes, row[-1])
        return found

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
        """The lanes in halves, whose sum over ranks fits, and the elements."""
        lanes = self._sums.get(name, [0] * LANES)
        halves = [half for lane in lanes for half in (lane & 0xFFFFFFFF, lane >> 32)]
        return [*halves, self._counts.get(name, 0)]


def _final(dtype: str, shape: Sequence[int], lanes: Sequence[int]) -> str:
    text = f"{dtype} {list(shape)} ".encode() + b"".join(lane.to_bytes(8, "little") for lane in lanes)
    return DEFINITION + hashlib.blake2b(text, digest_size=16).hexdigest()


def is_comparable(digest: object) -> bool:
    """Whether ``digest``, which somebody has written down, is one of the definition that this module has."""
    return isinstance(digest, str) and len(digest) == 34 and digest.startswith(DEFINITION)


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


def _bytes_of_rows(data: torch.Tensor) -> torch.Tensor:
    """The bytes of [rows, count] as [rows, bytes], where they lie if each row is one run."""
    if data.stride(1) != 1:
        data = data.contiguous()
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj()).flatten(1)
    return data.detach().view(torch.uint8)
