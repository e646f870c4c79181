"""How much a pickle stands for, where its containers hold one another more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

__all__ = ["CONTAINERS", "check_unfolded"]

CONTAINERS = (dict, list, tuple)
#: Characters of a text that count as one member.
_TEXT = 64


def check_unfolded(
    value: Any,
    limit: int,
    inside: Callable[[Any], Iterable[Any]],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Refuse containers that hold one another so often that nobody could print or copy them.

    A list that holds another one twice, which holds a third one twice, takes a few bytes for each, and twice
    the time with each. What objects hold (``inside``) is theirs, and nobody goes through it as a whole.
    """
    weights: dict[int, int | None] = {}  # None: begun
    pending = [(value, False)]
    while pending:
        item, ended = pending.pop()
        if type(item) not in CONTAINERS:
            pending += ((inner, False) for inner in inside(item) if id(inner) not in weights)
            continue
        members = [*item.keys(), *item.values()] if type(item) is dict else list(item)
        if not ended:
            if id(item) not in weights:
                weights[id(item)] = None
                pending.append((item, True))
                pending += ((inner, False) for inner in members if id(inner) not in weights)
            continue
        total = 1
        for inner in members:
            weight = weights.get(id(inner), 1) if type(inner) in CONTAINERS else _weight(inner)
            if weight is None:
                refuse("holds a container that holds itself")
            total += weight
        if total > limit:
            refuse(f"holds containers in one another, with more than {limit} members in all")
        weights[id(item)] = total


def _weight(item: Any) -> int:
    return 1 + len(item) // _TEXT if type(item) in (str, bytes) else 1
