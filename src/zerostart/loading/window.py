"""Offloaded parameters: where they are at rest, and the window of those that are resident.

One window serves all offloaded models of a pipeline. What a unit's modules compute with is there from before
the forward of the first of them until room is needed for another; then that goes whose next use is farthest
off, as the last time through has shown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.errors import EngineError
from zerostart.geometry import Box
from zerostart.geometry.layout import Layout, LocalBox, replicated
from zerostart.recipe import Recipe
from zerostart.recipe.values import leaves_of
from zerostart.transfer import Arena, Progress, Tuning, execute, page_locked
from zerostart.transfer.planning import Destination, Plan, join

_PURPOSE = (
    "and layers of the model are read from it as they are needed; keep it as it is while the model is used, "
    "or place the component 'replicate'"
)


class AtRest(ABC):
    """The parameters of one model, by name, whole."""

    @abstractmethod
    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Fill each 1-D tensor with the parameter of its name, in row-major order, in the tensor's dtype.

        Raises ReadError where its files cannot be read, or are not what they were.
        """

    @abstractmethod
    def rows(self, name: str, rows: Sequence[int], into: torch.Tensor) -> None:
        """Fill ``into``, [rows, columns], with these rows of the matrix ``name``; raises as ``fetch``."""


class InFiles(AtRest):
    """In the checkpoint's files, in whatever layout and dtype; nothing is kept in memory or open."""

    def __init__(self, catalog: Catalog, recipes: Mapping[str, Recipe], tuning: Tuning) -> None:
        self._recipes = dict(recipes)
        self._tuning = tuning
        used = {catalog.tensors[n].file for r in self._recipes.values() for n in leaves_of(r.pieces)}
        self._catalog = replace(catalog, storage=catalog.storage.kept(used))
        # By names and dtypes of what is fetched together.
        self._plans: dict[tuple[tuple[str, torch.dtype], ...], Plan] = {}

    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """See ``AtRest``. Raises ReadError."""
        key = tuple((name, to.dtype) for name, to in wanted.items())
        # Layers come round with every step: their plans are made once. ``rows`` differ each time, and are not
        # kept.
        if key not in self._plans:
            self._plans[key] = self._plan(
                [(name, replicated(self._recipes[name].target.shape), t) for name, t in wanted.items()]
            )
        # Not collective: each rank reads for itself, when its forward comes to it.
        self._run(self._plans[key], list(wanted.values()))

    def rows(self, name: str, rows: Sequence[int], into: torch.Tensor) -> None:
        """See ``AtRest``. Raises ReadError."""
        shape = self._recipes[name].target.shape
        (columns,) = shape[1:]
        boxes = [
            LocalBox(Box((first, 0), (count, columns)), at * columns, (columns, 1))
            for first, count, at in _runs(rows)
        ]
        layout = Layout(shape, into.numel(), into.numel(), tuple(boxes))
        self._run(self._plan([(name, layout, into.view(-1))]), [into.view(-1)])

    def _plan(self, wanted: Sequence[tuple[str, Layout, torch.Tensor]]) -> Plan:
        return join(
            self._catalog,
            [
                (
                    replace(recipe := self._recipes[name], target=replace(recipe.target, dtype=to.dtype)),
                    layout,
                    Destination(name, to.numel(), layout.owned, to.dtype, to.device.type == "cpu"),
                )
                for name, layout, to in wanted
            ],
            self._tuning.options(),
        )

    def _run(self, plan: Plan, storages: list[torch.Tensor]) -> None:
        # Weights in memory are held weakly until here: this raises where they are gone.
        storage, tuning = self._catalog.storage.recalled(_PURPOSE), self._tuning.suited(plan)
        reader = storage.reader(cold=tuning.cold)
        execute(plan, storages, Progress(plan.read_bytes, False), tuning.threads, reader, tuning.depth)


class InMemory(AtRest):
    """In memory of one device, in a dtype of their own; page-locked on a host that has another device."""

    def __init__(
        self,
        source: InFiles,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        pinned: bool,
    ) -> None:
        self._held: dict[str, torch.Tensor] = {}
        arena = Arena(device, page_locked) if pinned else None
        sizes = {name: (prod(shape), dtype) for name, (shape, dtype) in shapes.items()}
        # All before the first is taken, which allocates the arena.
        at = {name: arena.reserve(*size) for name, size in sizes.items()} if arena is not None else {}
        for name, (shape, _) in shapes.items():
            numel, dtype = sizes[name]
            if arena is None:
                held = torch.empty(numel, dtype=dtype, device=device)
            else:
                held = arena.take(at[name], numel, dtype)
            # One at a time, so that no more than the tensor itself is needed beside what is held.
            source.fetch({name: held})
            self._held[name] = held.view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(held.nbytes for held in self._held.values())

    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """See ``AtRest``; nothing is read."""
        for name, to in wanted.items():
            # Not waited for: the stream that copies is the one that computes with it.
            to.copy_(self._held[name].view(-1), non_blocking=True)

    def rows(self, name: str, rows: Sequence[int], into: torch.Tensor) -> None:
        """See ``AtRest``; nothing is read."""
        held = self._held[name]
        chosen = torch.tensor(rows, dtype=torch.int64, device=held.device)
        # As bytes: there is no indexing of eight-bit floats.
        found = held.view(torch.uint8).index_select(0, chosen).view(held.dtype)
        into.copy_(found)


def _runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Rows in rising order as unbroken runs ``(first, count, place)``."""
    runs: list[tuple[int, int, int]] = []
    for place, row in enumerate(rows):
        if runs and runs[-1][0] + runs[-1][1] == row:
            first, count, at = runs[-1]
            runs[-1] = (first, count + 1, at)
        else:
            runs.append((row, 1, place))
    return runs


#: Uses that are remembered: several times through the layers of any model.
REMEMBERED = 1 << 14


# Compared by identity: units are keys, and two with the same contents are two.
@dataclass(eq=False)
class Unit:
    """Parameters that come and go together."""

    name: str
    #: By name, without values: what lies in the places while the unit is not there.
    parameters: Mapping[str, nn.Parameter]
    #: Modules that have each parameter, and its name there.
    places: Mapping[str, list[tuple[nn.Module, str]]]
    source: AtRest
    #: Forwards under way that need it; it stays while there are any.
    users: int = 0
    #: Whether its values are on the device.
    resident: bool = False
    #: The window's clock when it was last asked for.
    last: int = field(default=0, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())

    def bring(self, device: torch.device) -> None:
        """Put the values in the places; raises ReadError as ``AtRest.fetch`` does."""
        # One allocation for all its parameters, which goes as a whole when the unit is dropped.
        arena = Arena(device)
        kept = {n: arena.reserve(p.numel(), p.dtype) for n, p in self.parameters.items()}
        # A tensor that is made in inference mode could not be computed with out of it.
        with torch.inference_mode(False), torch.no_grad():
            flat = {n: arena.take(kept[n], p.numel(), p.dtype) for n, p in self.parameters.items()}
            self.source.fetch(flat)
            made = {n: nn.Parameter(t.view(self.parameters[n].shape), False) for n, t in flat.items()}
        self._put(made)
        self.resident = True

    def drop(self) -> None:
        """Leave the places as they were, without values."""
        self._put(self.parameters)
        self.resident = False

    def _put(self, tensors: Mapping[str, nn.Parameter]) -> None:
        for name, tensor in tensors.items():
            for module, leaf in self.places[name]:
                module._parameters[leaf] = tensor


class Window:
    """At most ``limit`` bytes of parameters on ``device``; ``highest`` is what there was at most."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self.device = limit, device
        self.used = self.highest = self.fetches = 0
        # Bytes: for good, of the model that needs most at once, and of the one that would like most.
        self._kept = self._least = self._wanted = 0
        self._resident: dict[Unit, None] = {}
        # The order in which units were entered, the newest last; by it what comes next is told.
        self._uses: deque[Unit] = deque(maxlen=REMEMBERED)
        self._clock = 0

    @property
    def free(self) -> int:
        """Bytes that are not for good somebody's."""
        return self.limit - self._kept

    def claim(self, kept: int, least: int, wanted: int, grows: bool) -> int:
        """Have a model share the window: ``kept`` bytes for good, ``least`` at once, ``wanted`` for ease.

        Returns by how many bytes the limit is too low for all that share it, unless it ``grows``.
        """
        self._kept += kept
        self._least = max(self._least, least)
        self._wanted = max(self._wanted, wanted)
        # Of models that run one after the other each has the window to itself, but for what all keep.
        if grows:
            self.limit = self._kept + self._wanted
        return max(0, self._kept + self._least - self.limit)

    def cede(self, nbytes: int) -> int:
        """Leave ``nbytes`` of the limit to what rests on the device itself.

        Returns by how many bytes the limit is too low for it, and for all that share the window.
        """
        # For good: what rests there is not of the window any more.
        self.limit -= nbytes
        return max(0, self._kept + self._least - self.limit)

    def enter(self, unit: Unit) -> None:
        """Have ``unit`` resident until ``leave``. Raises EngineError where all that is there is in use."""
        # A unit whose modules run one after the other is one use: the order of units is what repeats.
        if not self._uses or self._uses[-1] is not unit:
            self._uses.append(unit)
        self._clock += 1
        # For units that the last time through does not show: the longest unused goes first.
        unit.last = self._clock
        if not unit.resident:
            # Before it is brought, so that the limit is never passed, not even for a moment.
            self._make_room(unit)
            unit.bring(self.device)
            self._resident[unit] = None
            self.used += unit.nbytes
            self.highest = max(self.highest, self.used)
            self.fetches += 1
        # Last, so that a unit whose reading has failed has no user that nobody takes away.
        unit.users += 1

    def leave(self, unit: Unit) -> None:
        """Let ``unit`` go when its room is needed."""
        unit.users -= 1

    def forget(self, unit: Unit) -> None:
        """Take ``unit`` out for good."""
        if unit in self._resident:
            self._evict(unit)
        # No unit of a released model is kept alive by the memory of its uses.
        self._uses = deque((used for used in self._uses if used is not unit), REMEMBERED)

    def _make_room(self, unit: Unit) -> None:
        while self.used + unit.nbytes > self.limit:
            # Modules inside modules: an outer forward that is under way keeps its own unit in use.
            idle = [one for one in self._resident if not one.users]
            if not idle:
                busy = ", ".join(one.name for one in self._resident)
                raise EngineError(
                    f"{unit.name} needs {unit.nbytes} bytes while {busy} are in use, which is {self.used} of "
                    f"the {self.limit} that device_memory_limit leaves to offloaded components; raise it"
                )
            self._evict(self._farthest(idle))

    def _evict(self, unit: Unit) -> None:
        unit.drop()
        del self._resident[unit]
        self.used -= unit.nbytes

    def _farthest(self, idle: list[Unit]) -> Unit:
        uses = list(self._uses)
        now = uses[-1]
        # The last time that this unit was entered: what came after it then is what is expected now.
        before = next((n for n in range(len(uses) - 2, -1, -1) if uses[n] is now), None)
        ahead: dict[Unit, int] = {}
        if before is not None:
            for distance, unit in enumerate(uses[before + 1 : -1]):
                ahead.setdefault(unit, distance)
        never = len(uses)
        # Belady's rule, with the last time through for the future.
        return max(idle, key=lambda unit: (ahead.get(unit, never), -unit.last))


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
    """How a model is divided for a window."""

    #: They come and go.
    parts: list[Part] = field(default_factory=list)
    #: Parameters that are always there.
    permanent: list[str] = field(default_factory=list)
    #: Names of embedding modules, and of their weights.
    tables: dict[str, str] = field(default_factory=dict)

    def least(self, sizes: Mapping[str, int]) -> tuple[int, str]:
        """The least bytes with which each forward has what it needs, and the module that needs most."""
        kept = sum(sizes[name] for name in self.permanent)
        needs: dict[str, set[int]] = {}
        for number, part in enumerate(self.parts):
            for module in part.modules:
                needs.setdefault(module, set()).add(number)
        nbytes = [sum(sizes[name] for name in part.parameters) for part in self.parts]
        most, where = 0, ""
        for module in needs:
            # Forwards nest: while this module's runs, those of all modules around it do, with their parts.
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
    # 1. What belongs together: parameters by the first of their names, those of each module, and those that
    #    several modules have.
    made = Division()
    first: dict[int, str] = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    names = {
        path: [first[id(p)] for p in module._parameters.values() if p is not None]
        for path, module in model.named_modules()
    }
    modules = dict(model.named_modules())
    shared = _shared(names)
    # 2. Tables of embeddings, which are read by rows and take no room in the window.
    floor = LEAST_TABLE if limit is None else min(LEAST_TABLE, limit // 4)
    for path, module in modules.items():
        if reads_rows(module) and names[path] and sizes[names[path][0]] >= floor:
            made.tables[path] = names[path][0]
    # 3. Parameters of modules that contain others: the forward that uses them runs around those of the
    #    others, so that they would be there all the time. They never leave.
    for path, module in modules.items():
        if path not in made.tables and names[path] and _below(module) and not isinstance(module, INDIVISIBLE):
            made.permanent += [name for name in names[path] if name not in shared]
    # 4. The rest in parts that have room beside each other, and what is shared each as a part of its own.
    kept = sum(sizes[name] for name in made.permanent)
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
    """Add the parts, in the order of the modules.

    Modules come before those inside them. So the first on a path that has room is the largest that has; what
    is ``inside`` of it is passed over, and of one that has none the modules inside are tried in turn.
    """
    taken = {*made.permanent, *shared, *made.tables.values()}
    inside: str | None = None
    for path, module in modules.items():
        if inside is not None and (path == inside or _inside(path, inside)):
            continue
        users = [p for p in modules if (p == path or _inside(p, path)) and p not in made.tables]
        owned = [name for p in users for name in names[p] if name not in taken]
        # What cannot be divided further is a part even where it has no room beside another; whether it has
        # any at all is found by ``Division.least``.
        whole = isinstance(module, INDIVISIBLE) or not _below(module)
        # The model itself is no part: its components' forwards are called by methods of other names as well.
        if owned and (path or whole) and (whole or sum(sizes[n] for n in owned) <= room):
            # The part's own module, and those with parameters in it: they may be called without it.
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
    return any(True for child in module.children() for _ in child.parameters())


def _largest_entry(model: nn.Module, sizes: Mapping[str, int], first: Mapping[int, str]) -> int:
    # Entries of the outermost lists, which are a model's layers; where it has none, its children.
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
