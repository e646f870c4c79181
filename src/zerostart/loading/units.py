"""Dividing a model into what is brought in at once: layers, their parts where a layer is too large, rows.

A unit is the largest part of the model that has room; its modules' forwards ask for it. Tables of embeddings
are not brought in: only the rows that are looked up are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

#: Tables of at least so many bytes are read by rows.
LEAST_TABLE = 16 << 20
#: Modules that compute with the parameters of their children themselves.
INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)


@dataclass
class Part:
    """Names of parameters that come together, and the names of the modules whose forwards need them."""

    name: str
    parameters: list[str]
    modules: list[str]


@dataclass
class Division:
    """``parts`` that come and go; ``kept`` parameters that are always there; ``tables`` read by rows."""

    parts: list[Part] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    #: Names of embedding modules, and of their weights.
    tables: dict[str, str] = field(default_factory=dict)

    def least(self, sizes: Mapping[str, int]) -> tuple[int, str]:
        """The least bytes with which each forward has what it needs, and the module that needs most."""
        kept = sum(sizes[name] for name in self.kept)
        needs: dict[str, set[int]] = {}
        for number, part in enumerate(self.parts):
            for module in part.modules:
                needs.setdefault(module, set()).add(number)
        nbytes = [sum(sizes[name] for name in part.parameters) for part in self.parts]
        most, where = 0, ""
        for module in needs:
            path = [outer for outer in needs if outer == module or _inside(module, outer)]
            need = sum(nbytes[n] for n in set().union(*(needs[outer] for outer in path)))
            if need > most:
                most, where = need, module
        return kept + most, where


def divide(model: nn.Module, sizes: Mapping[str, int], limit: int | None) -> Division:
    """The division of ``model`` for a window of ``limit`` bytes; ``sizes`` are those of its parameters.

    A part has at most half of what the limit leaves beside what is kept, so that the next has room beside it;
    without a limit it is an entry of a ``ModuleList``, or what lies in none.
    """
    made = Division()
    first: dict[int, str] = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    names = {
        path: [first[id(p)] for p in module._parameters.values() if p is not None]
        for path, module in model.named_modules()
    }
    modules = dict(model.named_modules())
    shared = _shared(names)
    floor = LEAST_TABLE if limit is None else min(LEAST_TABLE, limit // 4)
    for path, module in modules.items():
        if reads_rows(module) and names[path] and sizes[names[path][0]] >= floor:
            made.tables[path] = names[path][0]
    for path, module in modules.items():
        if path not in made.tables and names[path] and _below(module) and not isinstance(module, INDIVISIBLE):
            made.kept += [name for name in names[path] if name not in shared]
    kept = sum(sizes[name] for name in made.kept)
    room = _largest_entry(model, sizes, first) if limit is None else max(0, limit - kept) // 2
    _walk(made, modules, names, sizes, room, shared)
    for name in shared:
        users = [path for path, own in names.items() if name in own and path not in made.tables]
        if users:
            made.parts.append(Part(name, [name], users))
    return made


def reads_rows(module: nn.Module) -> bool:
    """Whether nothing but rows of its weight is looked at."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
    )


def _walk(
    made: Division,
    modules: Mapping[str, nn.Module],
    names: Mapping[str, list[str]],
    sizes: Mapping[str, int],
    room: int,
    shared: set[str],
) -> None:
    """Add the parts, in the order of the modules."""
    taken = {*made.kept, *shared, *made.tables.values()}
    inside: str | None = None
    for path, module in modules.items():
        if inside is not None and (path == inside or _inside(path, inside)):
            continue
        users = [p for p in modules if (p == path or _inside(p, path)) and p not in made.tables]
        owned = [name for p in users for name in names[p] if name not in taken]
        whole = isinstance(module, INDIVISIBLE) or not _below(module)
        # The model itself is no part: its components' forwards are called by methods of other names as well.
        if owned and (path or whole) and (whole or sum(sizes[n] for n in owned) <= room):
            askers = [p for p in users if p == path or names[p]]
            made.parts.append(Part(path or "the model", owned, askers))
            taken |= set(owned)
            inside = path


def _shared(names: Mapping[str, list[str]]) -> set[str]:
    """Parameters that several modules have, each of which comes by itself."""
    count: dict[str, int] = {}
    for own in names.values():
        for name in set(own):
            count[name] = count.get(name, 0) + 1
    return {name for name, times in count.items() if times > 1}


def _below(module: nn.Module) -> bool:
    """Whether modules inside it have parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def _largest_entry(model: nn.Module, sizes: Mapping[str, int], first: Mapping[int, str]) -> int:
    entries = [entry for part in _lists(model) for entry in part] or list(model.children())
    return max((sum(sizes[first[id(p)]] for p in entry.parameters()) for entry in entries), default=0)


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _lists(child)


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
