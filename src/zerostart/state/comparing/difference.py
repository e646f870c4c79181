"""What differs between two sets of tensors, found out piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zerostart.distributed.world import World
from zerostart.errors import printable

#: Integers as wide as an element, in which elements are compared bit for bit.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Tensors that are listed in words.
_LISTED = 20


class TensorDifference(NamedTuple):
    """How one tensor differs: the largest absolute difference, and how many elements do.

    ``largest`` is nan where a nan meets something else, or shapes differ. Elements of one dtype differ where
    their bits do (0.0 and -0.0 by 0.0), of two dtypes where their values do; ``note`` names dtypes and shapes
    that are not the same.
    """

    largest: float
    elements: int
    note: str = ""

    def __str__(self) -> str:
        if "shape" in self.note:
            return self.note
        note = f" ({self.note})" if self.note else ""
        return f"{self.elements} elements differ, by {self.largest:.6g} at most{note}"


@dataclass(frozen=True)
class Difference:
    """Two sets of tensors, by name: ``equal`` in shape, dtype and bits, ``differing``, or in one alone."""

    equal: tuple[str, ...]
    differing: Mapping[str, TensorDifference]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not (self.differing or self.only_a or self.only_b)

    def document(self) -> dict[str, Any]:
        """The same as JSON has it."""
        differing = {name: one._asdict() for name, one in self.differing.items()}
        return {
            "equal": list(self.equal),
            "differing": differing,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }

    def __str__(self) -> str:
        counts = {"equal": self.equal, "differing": self.differing, "only in a": self.only_a}
        counts["only in b"] = self.only_b
        lines = [", ".join(f"{len(names)} {what}" for what, names in counts.items())]
        lines += _listed([f"  {printable(name)}: {one}" for name, one in self.differing.items()])
        lines += _listed([f"  {printable(name)}: only in a" for name in self.only_a])
        lines += _listed([f"  {printable(name)}: only in b" for name in self.only_b])
        return "\n".join(lines)


def _listed(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines if more <= 0 else [*lines[:_LISTED], f"  and {more} more"]


class Tally:
    """Counts differences of tensors whose pieces come in any order, from several threads."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def compare(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare the same elements of a tensor, as two 1-D host tensors of any dtypes."""
        largest, count = _differences(a, b)
        if count:
            with self._lock:
                self._found[name] = _both(self._found.get(name, (0.0, 0)), (largest, count))

    def summed(self, world: World) -> dict[str, tuple[float, int]]:
        """What all ranks have found; collective, with a message as long as the list of what differs."""
        total: dict[str, tuple[float, int]] = {}
        for found in world.all_gather_object(self._found, "putting differences together"):
            for name, one in found.items():
                total[name] = _both(total.get(name, (0.0, 0)), one)
        return total


def _both(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, int]:
    largest = torch.tensor([one[0], other[0]], dtype=torch.float64, device="cpu").max()  # a nan stays
    return float(largest), one[1] + other[1]


def _differences(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    if a.dtype == b.dtype:
        one, other = _bits(a), _bits(b)
        if torch.equal(one, other):
            return 0.0, 0
        differ = (one != other).view(a.numel(), -1).any(1)
    else:
        one, other = _wide(a), _wide(b)
        differ = (one != other) & ~(one.isnan() & other.isnan())
    count = int(differ.sum())
    if not count:
        return 0.0, 0
    return float((_wide(a[differ]) - _wide(b[differ])).abs().max()), count


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.contiguous().view(_WORDS[whole.itemsize])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
