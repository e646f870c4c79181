"""What a directory of a training run holds, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zerostart.checkpoint.catalog import Assembled, TensorEntry

__all__ = ["STATE", "Found", "Group"]

#: What separates the name of an optimizer's state from that of its parameter, in ``Found.assembled``.
STATE = ":"


@dataclass(frozen=True)
class Group:
    """One parameter group of an optimizer: its ``settings`` as they were pickled, and its parameters."""

    settings: dict[str, Any]
    parameters: tuple[str, ...]


@dataclass
class Found:
    """Stored tensors, what they make up, and what is no tensor.

    ``assembled`` has weights by their names, and states of an optimizer as ``exp_avg:NAME`` and the like.
    ``numbers`` are states that are one number, by key and parameter; ``engine`` has counters of the engine by
    its own names, ``schedule`` the state of its schedule, ``ties`` other names of a weight.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    assembled: dict[str, Assembled] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None
    ties: dict[str, str] = field(default_factory=dict)

    def add(self, entries: Iterable[TensorEntry]) -> None:
        """Note stored tensors."""
        self.tensors.update((entry.name, entry) for entry in entries)
