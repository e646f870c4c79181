"""A load that leaves the weights at rest, and has them brought in where a forward needs them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zerostart.distributed.world import joined_world
from zerostart.errors import ConfigError, EngineError
from zerostart.live.report import Clock
from zerostart.loading.destinations import Destinations
from zerostart.loading.placement import Placement
from zerostart.loading.preparation import Prepared, prepare, undisturbed
from zerostart.loading.request import Request
from zerostart.loading.window import AtRest, Division, InFiles, InMemory, Unit, Window, divide
from zerostart.models import Origins
from zerostart.recipe import Recipe
from zerostart.transfer.planning import join
from zerostart.upstream.torch.tensors import make_wrapper

#: Most bytes of staging while a layer is read, beside the window.
STAGING = 32 << 20


@dataclass
class _Offloaded:
    """What one model holds of a window."""

    window: Window
    units: list[Unit]
    kept: Unit | None


# Weak: a model that nobody has any more leaves its window by itself.
_offloaded: weakref.WeakKeyDictionary[nn.Module, _Offloaded] = weakref.WeakKeyDictionary()


def load_offloaded(request: Request, placement: Placement, window: Window, grows: bool) -> nn.Module:
    """The model of ``request``, whose parameters come and go through ``window``; collective.

    With ``grows`` the window has no limit yet, and gets what this model's layers need. The model computes on
    the window's device, without gradients for its parameters or through them.
    Raises ConfigError for a limit with which one of its modules cannot run, and what a load raises.
    """
    with undisturbed():
        world = joined_world()
        with world.phase("loading"):
            clock = Clock()
            # For its settings alone: nothing here is sharded, and every rank brings its own layers.
            request = request.with_engine()
            engine = request.resolve(world.size)
            prepared = prepare(request, engine, world, clock, strict=True)
            with world.phase("offloading the model"):
                model = prepared.built.model
                _check(prepared, request)
                _load_buffers(prepared, window.device, request)
                # The order matters: at rest first, so that what rests on the device has left its room in the
                # window before layers are shared out.
                source = _source(prepared, placement, window, grows, request)
                held = _attach(model, source, window, grows)
            model.eval()
            prepared.built.library.finish(
                prepared.built, prepared.recipes, str(request.source), prepared.catalog
            )
    _offloaded[model] = held
    return model


def release(model: nn.Module) -> None:
    """Let go what ``model`` has in its window, where it has one; it can compute no more."""
    held = _offloaded.pop(model, None)
    if held is not None:
        for unit in [*held.units, *([held.kept] if held.kept else [])]:
            # A forward that an error has left may still count as a user; nobody will leave it any more.
            unit.users = 0
            held.window.forget(unit)


def _check(prepared: Prepared, request: Request) -> None:
    # What is initialised has nothing at rest that could be fetched.
    lacking = [name for name, origin in prepared.origins.parameters.items() if not isinstance(origin, Recipe)]
    if lacking:
        raise ConfigError(
            f"{request.source} lacks {len(lacking)} parameters ({lacking[0]}, ...), which would "
            "have to be initialised; an offloaded component needs all of them in its files. Place "
            "the component 'replicate'"
        )
    parameters = {name for name, _ in prepared.built.model.named_parameters(remove_duplicate=False)}
    kept = [alias.name for alias in prepared.aliases.entries if alias.name in parameters]
    if kept:
        raise ConfigError(
            f"{type(prepared.built.model).__name__} refers to {kept[0]} from a second place "
            "outside its module, which an offloaded component cannot; place the component "
            "'replicate'"
        )
    if request.resolve(1).cast_dtype is not None:
        raise AssertionError("parameters at rest are in the model's own dtypes")


def _load_buffers(prepared: Prepared, device: torch.device, request: Request) -> None:
    """Buffers stay: they are small, and read whole."""
    buffers = Origins({}, prepared.origins.buffers, ())
    destinations = Destinations.of(prepared.built.model, buffers, [], device)
    prepared.aliases.join(list(prepared.recipes.by_name))
    prepared.aliases.follow(prepared.built.model)
    tuning = _tuning(prepared, device, request)
    plan = join(prepared.catalog, destinations.wanted(), tuning.options())
    # Each rank reads all of them for itself: no strategy, and nobody to wait for.
    if plan.reads or plan.computations:
        destinations.read(plan, tuning, None, False, joined_world())


def _tuning(prepared: Prepared, device: torch.device, request: Request) -> Any:
    # The caller's limit, where there is one, is that of every load.
    limited = request if request.memory_limit is not None else replace(request, memory_limit=STAGING)
    return limited.tuning(prepared.engine, prepared.catalog, device, bool(prepared.recipes.computed))


def _source(
    prepared: Prepared, placement: Placement, window: Window, grows: bool, request: Request
) -> AtRest:
    device = window.device
    recipes = {n: o for n, o in prepared.origins.parameters.items() if isinstance(o, Recipe)}
    accelerator = device.type != "cpu"
    host = placement.kind == "offload" and (placement.store or ("host" if accelerator else "disk")) == "host"
    # A component that is not offloaded but stored in a narrower dtype rests on the device itself.
    at = device if placement.kind != "offload" else torch.device("cpu")
    files = InFiles(
        prepared.catalog, recipes, _tuning(prepared, at if host or at == device else device, request)
    )
    if not host and placement.kind == "offload":
        return files
    model = prepared.built.model
    main = placement.compute_dtype or request.dtype
    shapes = {
        name: (tuple(p.shape), _resting(p, placement.storage_dtype, main))
        for name, p in model.named_parameters()
    }
    # Where the window grows, the limit is found afterwards, with what rests here counted already.
    if at.type != "cpu" and not grows:
        _cede(window, sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values()), model)
    return InMemory(files, shapes, at, pinned=host and accelerator)


def _cede(window: Window, nbytes: int, model: nn.Module) -> None:
    left = window.limit
    if lacks := window.cede(nbytes):
        raise ConfigError(
            f"{type(model).__name__} takes {nbytes} bytes on {window.device}, but "
            f"device_memory_limit has only {left} left; raise it by {lacks}, or place the "
            "component 'offload'"
        )


def _resting(parameter: nn.Parameter, storage: torch.dtype | None, main: torch.dtype | None) -> torch.dtype:
    # None: nobody has said in which dtype the model computes, so whatever it is in counts.
    alike = main is None or parameter.dtype == main
    if storage is None or parameter.dim() < 2 or not parameter.is_floating_point() or not alike:
        return parameter.dtype
    return storage


def _attach(model: nn.Module, source: AtRest, window: Window, grows: bool) -> _Offloaded:
    parameters = _emptied(model, window.device)
    sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    division = divide(model, sizes, None if grows else window.free)
    _claim(window, division, sizes, grows, type(model).__name__)
    # By identity: a parameter that modules share is put into each of them.
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and path not in division.tables:
                places.setdefault(id(parameter), []).append((module, leaf))
    found = {name: places.get(id(p), []) for name, p in parameters.items()}

    def unit(name: str, names: list[str]) -> Unit:
        return Unit(name, {n: parameters[n] for n in names}, {n: found[n] for n in names}, source)

    kept = unit("what is always there", division.permanent) if division.permanent else None
    if kept is not None:
        # Brought once: modules with children use these around the forwards of the others.
        window.enter(kept)  # and never leaves
    units = []
    for part in division.parts:
        units.append(made := unit(part.name, part.parameters))
        for path in part.modules:
            _Use(window, made, path or type(model).__name__).attach(model.get_submodule(path))
    for path, name in division.tables.items():
        table: Any = model.get_submodule(path)
        # On the object: its class keeps its own forward.
        table.forward = _Rows(table, name, source, window.device)
    return _Offloaded(window, units, kept)


def _claim(window: Window, division: Division, sizes: Mapping[str, int], grows: bool, name: str) -> None:
    """Raise ConfigError unless the model, and all others, can run in the window."""
    kept = sum(sizes[one] for one in division.permanent)
    least, where = division.least(sizes)
    largest = max((sum(sizes[one] for one in part.parameters) for part in division.parts), default=0)
    # For ease, beside what one forward needs, the largest part: so the next has room before that one goes.
    lacks = window.claim(kept, least - kept, least - kept + largest, grows)
    if lacks:
        raise ConfigError(
            f"{name}: {where or 'what is always there'} needs {least} bytes at once, but "
            f"device_memory_limit leaves {window.limit} to offloaded components, of which "
            f"{window.limit - window.free} are always in use; raise it by {lacks}"
        )


def _emptied(model: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    made = {id(p): absent(p, name, device) for name, p in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = made[id(parameter)]
    return dict(model.named_parameters())


@dataclass
class _Use:
    """One module's need of a unit."""

    window: Window
    unit: Unit
    name: str
    depth: int = 0

    def attach(self, module: nn.Module) -> None:
        """Ask for the unit before each forward of ``module``."""
        module.register_forward_pre_hook(self.begin, with_kwargs=True)
        # `always_call`: also when the forward raises, or the unit would be in use for ever.
        module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Raise EngineError where a backward would need the weights; else have them there."""
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            raise EngineError(
                f"{self.name} is offloaded, but an input needs a gradient, and its weights do not stay "
                "for a backward. Call it under torch.no_grad(), or place the component 'replicate' or "
                "'shard'"
            )
        self.window.enter(self.unit)
        # Counted only once the unit is there; a module may be called again inside its own forward.
        self.depth += 1

    def end(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # ``end`` is called also where ``begin`` has raised, which then counted nothing.
        if self.depth:
            self.depth -= 1
            self.window.leave(self.unit)


class _Rows:
    """The forward of an embedding of which only the rows that are looked up are read."""

    def __init__(self, module: nn.Embedding, name: str, source: AtRest, device: torch.device) -> None:
        self._shape, self._dtype = module.weight.shape, module.weight.dtype
        self._name, self._source, self._device = name, source, device

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        # Each row once, in ascending order, which is that of the file.
        rows, places = torch.unique(input.detach().cpu(), return_inverse=True)
        wanted: list[int] = rows.tolist()
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self._shape[0]:
            raise IndexError(f"{self._name} has {self._shape[0]} rows; asked for {wanted[0]} to {wanted[-1]}")
        # A tensor made in inference mode could not be filled by the reading threads, which are in none.
        with torch.inference_mode(False), torch.no_grad():
            found = torch.empty((len(wanted), self._shape[1]), dtype=self._dtype, device=self._device)
            self._source.rows(self._name, wanted, found)
        return F.embedding(places.to(self._device), found)


class _Absent(torch.Tensor):
    """Shape, dtype and device of a parameter, and nothing in it; what would compute with it is told."""

    _name: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        own = next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, cls))
        # nn.Parameter detaches what it is given: that asks for no values.
        if func is torch.ops.aten.detach.default:
            return _made(own, own._name, own.device)
        # Every operation but that comes here: an optimizer, a save and a cast are told at once what they
        # asked for.
        raise own._asked_for_by(func)

    def _asked_for_by(self, what: object) -> EngineError:
        return EngineError(
            f"{self._name} is offloaded, and its values are in memory only during its module's "
            f"forward, but {what} asked for them outside of that. Place the component 'replicate' "
            "or 'shard'"
        )

    def storage(self) -> Any:
        """Where files are written from; there is none. Raises EngineError."""
        raise self._asked_for_by("storage")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Absent({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def absent(parameter: torch.Tensor, name: str, device: torch.device) -> nn.Parameter:
    """A parameter like ``parameter``, [any shape], that is on ``device`` as far as anybody asks."""
    return nn.Parameter(_made(parameter, name, device), requires_grad=False)


def _made(like: torch.Tensor, name: str, device: torch.device) -> _Absent:
    made = make_wrapper(_Absent, like.shape, like.stride(), 0, like.dtype, device=device)
    made._name = name
    return made
