"""The store by which the ranks of the default process group have found each other, for messages beside it."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from zerostart.upstream.registry import Use, demand
from zerostart.upstream.versions import TORCH

__all__ = ["TOUCHED", "patience", "store_of"]

TOUCHED = (
    Use(
        library=TORCH,
        owner="torch.distributed.distributed_c10d",
        names=("_get_default_store",),
        why="a rank that is alone in a call learns it without a collective, which would wait for the others",
    ),
)


@functools.cache
def _require() -> None:
    demand(TOUCHED)


def store_of(prefix: str) -> Any:
    """The default group's store, with ``prefix`` before all keys."""
    _require()
    parts: Any = distributed_c10d
    return parts.PrefixStore(prefix, parts._get_default_store())


def patience() -> timedelta:
    """How long a rank waits for the others: the time-out that the default group was made with."""
    _require()
    parts: Any = distributed_c10d
    found: timedelta = parts._get_default_store().timeout
    return found
