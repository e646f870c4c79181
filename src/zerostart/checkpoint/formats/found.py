"""What a directory of a training run holds, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from zerostart.checkpoint.catalog import Assembled, TensorEntry
from zerostart.checkpoint.formats.inert_pickle import MAX_DIMENSIONS
from zerostart.checkpoint.strict_json import DAMAGED
from zerostart.errors import CheckpointError

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


def is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether what a pickle holds is the sizes of a tensor."""
    few = type(value) is tuple and len(value) <= MAX_DIMENSIONS  # one of millions may be that of each box
    return few and all(type(size) is int and size >= 0 for size in value)


def names_of(value: Any) -> tuple[str, ...]:
    """Names out of a pickle; a number is one as well. Raises CheckpointError for anything else."""
    if type(value) not in (list, tuple) or any(type(name) not in (str, int) for name in value):
        raise CheckpointError(f"the parameters of an optimizer group have no names: {DAMAGED}")
    return tuple(map(str, value))
