"""Which modules of a model are sharded as units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zerostart.errors import ConfigError
from zerostart.models import library_of


def blocks_of(model: nn.Module, wrap: Sequence[str | type[nn.Module]] | None) -> list[nn.Module]:
    """The modules to be sharded as units, innermost first.

    Those that ``wrap`` names (class names, classes, or names of modules, ``*`` for any part), else those
    whose class is in the model's ``_no_split_modules``; a plain module's are the entries of its outermost
    ``ModuleList``s. A module that shares a parameter with the rest of the model is none. Raises ConfigError
    for an entry of ``wrap`` that matches nothing. Of a model that is called by parts, all else that holds
    parameters is a unit as well: the root's forward, which would gather them, never runs.
    """
    if wrap:
        found = _named(model, wrap)
    elif kinds := set(getattr(model, "_no_split_modules", None) or ()):
        found = [m for m in model.modules() if type(m).__name__ in kinds]
    else:
        found = [child for part in _outermost_lists(model) for child in part]
    if library_of(model).by_parts(model):
        found = _with_the_rest(model, found)
    holders = _holders(model)
    blocks = [m for m in found if m is not model and any(True for _ in m.parameters())]
    # FSDP2 wants all holders of a tied parameter in one unit; here that is the root.
    return [m for m in reversed(blocks) if _alone(m, holders)]


def _alone(module: nn.Module, holders: Mapping[int, set[nn.Module]]) -> bool:
    """Whether nothing outside of ``module`` holds a parameter of it."""
    inside = set(module.modules())
    return all(holders[id(parameter)] <= inside for parameter in module.parameters())


def _with_the_rest(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The ``blocks``, and the modules outside of them that hold parameters; outer ones first."""
    inside = {id(module) for block in blocks for module in block.modules()}
    own = [m for m in model.modules() if id(m) not in inside and any(True for _ in m.parameters(False))]
    wanted = {id(module) for module in (*blocks, *own)}
    return [module for module in model.modules() if id(module) in wanted]


def _named(model: nn.Module, wrap: Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    found: list[nn.Module] = []
    matched: set[int] = set()
    for name, module in model.named_modules():
        hits = [number for number, entry in enumerate(wrap) if _matches(name, module, entry)]
        matched.update(hits)
        found += [module] if hits else []
    for number, entry in enumerate(wrap):
        if number not in matched:
            shown = entry if isinstance(entry, str) else entry.__name__
            raise ConfigError(
                f"engine_config['wrap'] has {shown!r}, which no module has as its class or name"
            )
    return found


def _matches(name: str, module: nn.Module, entry: str | type[nn.Module]) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    if type(module).__name__ == entry:
        return True
    parts, patterns = name.split("."), entry.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _holders(model: nn.Module) -> dict[int, set[nn.Module]]:
    """The modules that hold each parameter, by its ``id``."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(module)
    return holders


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    lists: list[nn.ModuleList] = []
    for child in module.children():
        lists += [child] if isinstance(child, nn.ModuleList) else _outermost_lists(child)
    return lists
