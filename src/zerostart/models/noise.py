"""Random bytes for a tensor, as fast as they can be written and the same for the same name and seed.

Drawing every element from a generator would take minutes for a large model. Here one block of normal
values is drawn, and a tensor's content is a window of the endlessly repeated block, from a position that
its name decides. The block's length is prime: no two rows of a tensor are alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

#: Elements of the block, a prime: 16 MB in fp32.
_PERIOD = 4_194_301


class Noise:
    """Content for tensors: normal values with deviation ``std``, decided by ``seed`` and names alone."""

    def __init__(self, seed: int, std: float) -> None:
        self._seed = seed
        self._std = std
        self._blocks: dict[tuple[str, torch.dtype], memoryview] = {}

    def content(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[memoryview]:
        """Bytes of the tensor ``name`` in order, in pieces of at most one block.

        Matrices and larger are normal; of the rest, what is called a bias is zeros, and so are integers
        and truth values; other vectors and scalars are ones.
        """
        width = dtype.itemsize
        left = width
        for size in shape:
            left *= size
        kind = self._kind(name, dtype, len(shape))
        block = self._block(kind, dtype)
        start = self._position(name) * width if kind == "normal" else 0
        while left:
            piece = block[start : start + left]
            yield piece
            left -= piece.nbytes
            start = 0

    @staticmethod
    def _kind(name: str, dtype: torch.dtype, dimensions: int) -> str:
        if not dtype.is_floating_point:
            return "zeros"
        if dimensions >= 2:
            return "normal"
        return "zeros" if name.endswith("bias") else "ones"

    def _position(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % _PERIOD

    def _block(self, kind: str, dtype: torch.dtype) -> memoryview:
        block = self._blocks.get((kind, dtype))
        if block is None:
            if kind == "normal":
                drawn = np.random.default_rng(self._seed).standard_normal(_PERIOD, dtype=np.float32)
                values = torch.from_numpy(drawn).mul_(self._std).to(dtype)
            else:
                values = torch.full((_PERIOD,), int(kind == "ones"), dtype=dtype, device="cpu")
            block = values.view(torch.uint8).numpy().data
            self._blocks[kind, dtype] = block
        return block
