"""Places that hold a parameter beside its module, under an engine that swaps parameters in its modules.

FSDP2 puts the gathered parameter into its module before the module runs, and the sharded one back
afterwards. It does so with ``setattr`` where a class has a ``__setattr__`` of its own, as torch's recurrent
layers have to keep their lists of weights up to date. So do the modules here whose parameters are kept
elsewhere too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from zerostart.models import Alias

_ATTRIBUTE = "_zerostart_aliases"


def follow_swaps(model: nn.Module, aliases: Sequence[Alias]) -> None:
    """Let each place hold what is under its name in ``model``, whenever that changes."""
    for alias in aliases:
        path, _, leaf = alias.name.rpartition(".")
        module = model.get_submodule(path)
        if leaf not in module._parameters:
            continue
        if _ATTRIBUTE not in vars(module):
            vars(module)[_ATTRIBUTE] = {}
            module.__class__ = _following(type(module))  # type: ignore[arg-type]  # a class is hashable
        vars(module)[_ATTRIBUTE].setdefault(leaf, []).append(alias)


@functools.cache
def _following(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like ``kind`` whose modules tell of a new parameter, under the same name."""

    def put(self: Any, name: str, value: Any) -> None:
        kind.__setattr__(self, name, value)
        for alias in vars(self)[_ATTRIBUTE].get(name, ()):
            alias.follow(value)

    return type(kind.__name__, (kind,), {"__setattr__": put, "__module__": kind.__module__})
