"""Private parts of accelerate: what ``accelerate launch`` puts into the environment of each rank.

accelerate itself reads it when an ``Accelerator`` is made. ``zerostart train`` reads it before, and makes its
own ``Accelerator`` around a model that is sharded already, where it would be read a second time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zerostart.upstream.accelerate.plugins import is_set

#: Beginnings of the names of all that is read again where an ``Accelerator`` or a plugin is made.
_READ_AGAIN = (
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DEEPSPEED_",
    "ACCELERATE_GRADIENT_",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "FSDP_",
)


def launched_for(variable: str) -> bool:
    """Whether a launcher has set up the engine of that environment variable."""
    return is_set(variable)


def launched_precision() -> str:
    """The launcher's mixed precision; ``"no"`` where it says nothing of it, too."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def launched_dynamo() -> str:
    """By what the launcher wants models compiled; ``"no"`` for nothing."""
    return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()


@contextmanager
def hidden() -> Iterator[None]:
    """Inside, accelerate finds nothing of an engine in the environment, as after a plain launch."""
    taken = {name: value for name, value in os.environ.items() if name.startswith(_READ_AGAIN)}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)
