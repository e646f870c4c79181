"""Find the modules of a model by class or by name."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.errors import ConfigError


def matching_modules(
    model: nn.Module, entries: Iterable[str | type[nn.Module]], setting: str | None = None
) -> dict[str, nn.Module]:
    """Return the modules by name that match any entry, outer ones first.

    An entry is a class, the name of one, or the name of modules with ``*`` for any part. Raises ConfigError,
    which begins with ``setting``, for an entry without a match; None allows it.
    """
    named = dict(model.named_modules())
    names: set[str] = set()
    for entry in entries:
        hits = [name for name, module in named.items() if _matches(name, module, entry)]
        if not hits and setting is not None:
            shown = entry if isinstance(entry, str) else entry.__name__
            raise ConfigError(f"{setting} {shown!r}, but no module has that class or name")
        names.update(hits)
    return {name: module for name, module in named.items() if name in names}


def _matches(name: str, module: nn.Module, entry: str | type[nn.Module]) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    # Skip the class that FSDP2 adds, but match no other base class: the output projection of torch's
    # attention is a kind of Linear that is never called, so that nothing would gather a unit of it.
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    if kind.__name__ == entry:
        return True
    parts, patterns = name.split("."), entry.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
