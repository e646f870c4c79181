"""A load that leaves the weights at rest, and has them brought in where a forward needs them.

One window serves all offloaded models of a pipeline. What a module computes with is there from before its
forward until room is needed for another.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import joined_world
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import replicated
from zerostart.live.report import Clock
from zerostart.loading.destinations import Destinations
from zerostart.loading.placement import Placement
from zerostart.loading.preparation import Prepared, prepare, undisturbed
from zerostart.loading.request import Request
from zerostart.models import Origins
from zerostart.recipe import Recipe
from zerostart.recipe.values import leaves_of
from zerostart.transfer import Arena, Progress, Tuning, execute, page_locked
from zerostart.transfer.planning import Destination, Plan, join
from zerostart.upstream.torch.tensors import make_wrapper

#: Most bytes of staging while a layer is read, beside the window.
STAGING = 32 << 20
#: Modules whose forward computes with the parameters of the modules inside them.
INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)
_PURPOSE = (
    "and layers of the model are read from it as they are needed; keep it as it is while the model is used, "
    "or place the component 'replicate'"
)


class AtRest(Protocol):
    """The parameters of one model, by name, whole."""

    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Fill each 1-D tensor with the parameter of its name, in row-major order, in the tensor's dtype.

        Raises ReadError where its files cannot be read, or are not what they were.
        """


class InFiles:
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
        # Layers come round with every step: their plans are made once.
        if key not in self._plans:
            self._plans[key] = self._plan(wanted)
        plan = self._plans[key]
        storage, tuning = self._catalog.storage.recalled(_PURPOSE), self._tuning.suited(plan)
        reader = storage.reader(cold=tuning.cold)
        # Not collective: each rank reads for itself, when its forward comes to it.
        progress = Progress(plan.read_bytes, False)
        execute(plan, list(wanted.values()), progress, tuning.threads, reader, tuning.depth)

    def _plan(self, wanted: Mapping[str, torch.Tensor]) -> Plan:
        places = []
        for name, to in wanted.items():
            recipe = self._recipes[name]
            layout = replicated(recipe.target.shape)
            recipe = replace(recipe, target=replace(recipe.target, dtype=to.dtype))
            on_host = to.device.type == "cpu"
            places.append((recipe, layout, Destination(name, to.numel(), layout.owned, to.dtype, on_host)))
        return join(self._catalog, places, self._tuning.options())


class InMemory:
    """In memory of one device, in a dtype of their own; page-locked on a host that has another device."""

    def __init__(
        self,
        source: InFiles,
        sizes: Mapping[str, tuple[int, torch.dtype]],
        device: torch.device,
        pinned: bool,
    ) -> None:
        self._held: dict[str, torch.Tensor] = {}
        arena = Arena(device, page_locked) if pinned else None
        # All before the first is taken, which allocates the arena.
        at = {name: arena.reserve(*size) for name, size in sizes.items()} if arena is not None else {}
        for name, (numel, dtype) in sizes.items():
            if arena is None:
                held = torch.empty(numel, dtype=dtype, device=device)
            else:
                held = arena.take(at[name], numel, dtype)
            # One at a time, so that no more than the tensor itself is needed beside what is held.
            source.fetch({name: held})
            self._held[name] = held

    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """See ``AtRest``; nothing is read."""
        for name, to in wanted.items():
            to.copy_(self._held[name], non_blocking=True)


@dataclass(eq=False)
class Weight:
    """A parameter that comes and goes."""

    name: str
    absent: nn.Parameter
    source: AtRest
    #: Where modules look for it.
    places: list[tuple[nn.Module, str]]
    #: Forwards that compute with it now.
    users: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.absent.numel() * self.absent.element_size()

    def put(self, tensor: nn.Parameter) -> None:
        """Have modules find ``tensor``."""
        for module, leaf in self.places:
            module._parameters[leaf] = tensor


class Window:
    """At most ``limit`` bytes of parameters on ``device``; ``highest`` is what there was at most."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self.device = limit, device
        self.used = self.highest = self.fetches = 0
        # In the order of their last use.
        self._resident: dict[Weight, None] = {}

    def enter(self, weights: Sequence[Weight]) -> None:
        """Have ``weights`` resident until ``leave``. Raises EngineError where too much is in use."""
        missing = [weight for weight in weights if weight not in self._resident]
        for weight in weights:
            weight.users += 1
            if weight in self._resident:
                self._resident[weight] = self._resident.pop(weight)
        if missing:
            try:
                self._make_room(missing)
                self._bring(missing)
            except BaseException:
                self.leave(weights)
                raise

    def leave(self, weights: Sequence[Weight]) -> None:
        """Let ``weights`` go when their room is needed."""
        for weight in weights:
            weight.users -= 1

    def forget(self, weight: Weight) -> None:
        """Take ``weight`` out, if it is in."""
        if weight in self._resident:
            weight.put(weight.absent)
            del self._resident[weight]
            self.used -= weight.nbytes

    def _bring(self, missing: Sequence[Weight]) -> None:
        # Plain tensors: what inference mode makes cannot be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            flat = {
                weight: torch.empty(weight.absent.numel(), dtype=weight.absent.dtype, device=self.device)
                for weight in missing
            }
            missing[0].source.fetch({weight.name: tensor for weight, tensor in flat.items()})
            for weight, tensor in flat.items():
                weight.put(nn.Parameter(tensor.view(weight.absent.shape), requires_grad=False))
                self._resident[weight] = None
                self.used += weight.nbytes
        self.highest = max(self.highest, self.used)
        self.fetches += len(missing)

    def _make_room(self, missing: Sequence[Weight]) -> None:
        needed = sum(weight.nbytes for weight in missing)
        # Other models' first. Of the model's own the one used last, which a forward from the first layer to
        # the last needs again later than all others.
        idle = [weight for weight in self._resident if not weight.users]
        others = [weight for weight in idle if weight.source is not missing[0].source]
        own = [weight for weight in reversed(idle) if weight.source is missing[0].source]
        for weight in [*others, *own]:
            if self.used + needed <= self.limit:
                break
            self.forget(weight)
        if self.used + needed > self.limit:
            busy = ", ".join(weight.name for weight in self._resident)
            raise EngineError(
                f"{missing[0].name} needs {needed} bytes while {busy} are in use, which is {self.used} of "
                f"the {self.limit} that device_memory_limit leaves to offloaded components; raise it"
            )


# Weak: a model that nobody has any more leaves its window by itself.
_offloaded: weakref.WeakKeyDictionary[nn.Module, tuple[Window, list[Weight]]] = weakref.WeakKeyDictionary()


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
                weights = _attach(model, source, window, grows)
            model.eval()
            prepared.built.library.finish(
                prepared.built, prepared.recipes, str(request.source), prepared.catalog
            )
    _offloaded[model] = (window, weights)
    return model


def release(model: nn.Module) -> None:
    """Let go what ``model`` has in its window, where it has one; it can compute no more."""
    if held := _offloaded.pop(model, None):
        window, weights = held
        for weight in weights:
            window.forget(weight)


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
    sizes = {
        name: (p.numel(), _resting(p, placement.storage_dtype, main)) for name, p in model.named_parameters()
    }
    # Where the window grows, the limit is found afterwards, with what rests here counted already.
    if at.type != "cpu" and not grows:
        nbytes = sum(numel * dtype.itemsize for numel, dtype in sizes.values())
        if nbytes > window.limit:
            raise ConfigError(
                f"{type(model).__name__} takes {nbytes} bytes on {window.device}, but device_memory_limit "
                f"has only {window.limit} left; raise it by {nbytes - window.limit}, or place the "
                "component 'offload'"
            )
        window.limit -= nbytes
    return InMemory(files, sizes, at, pinned=host and accelerator)


def _resting(parameter: nn.Parameter, storage: torch.dtype | None, main: torch.dtype | None) -> torch.dtype:
    # None: nobody has said in which dtype the model computes, so whatever it is in counts.
    alike = main is None or parameter.dtype == main
    if storage is None or parameter.dim() < 2 or not parameter.is_floating_point() or not alike:
        return parameter.dtype
    return storage


def _attach(model: nn.Module, source: AtRest, window: Window, grows: bool) -> list[Weight]:
    """Have the modules of ``model`` ask the window for their parameters.

    Raises ConfigError where the window is too small for one of them and those that it is called in.
    """
    weights = _emptied(model, source, window.device)
    needed: dict[str, list[Weight]] = {}
    inside = None
    for path, module in model.named_modules():
        if inside is not None and (not inside or path.startswith(f"{inside}.")):
            continue
        whole = isinstance(module, INDIVISIBLE)
        inside = path if whole else inside
        found = module.parameters(recurse=whole)
        if own := [weights[id(parameter)] for parameter in found]:
            needed[path] = own
    least, where = 0, ""
    for path in needed:
        outer = (own for at, own in needed.items() if path == at or not at or path.startswith(f"{at}."))
        if (nbytes := sum(w.nbytes for w in set().union(*outer))) > least:
            least, where = nbytes, path
    if grows:
        window.limit = max(window.limit, 2 * least)
    if least > window.limit:
        raise ConfigError(
            f"{type(model).__name__}: {where} needs {least} bytes at once, but device_memory_limit leaves "
            f"{window.limit} to offloaded components; raise it by {least - window.limit}"
        )
    for path, own in needed.items():
        _Use(window, own, path or type(model).__name__).attach(model.get_submodule(path))
    return list(weights.values())


def _emptied(model: nn.Module, source: AtRest, device: torch.device) -> dict[int, Weight]:
    """Put absent parameters in the model; returns them by ``id``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, Weight] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = names[id(parameter)]
                weight = made.setdefault(
                    id(parameter), Weight(name, absent(parameter, name, device), source, [])
                )
                weight.places.append((module, leaf))
    for weight in made.values():
        weight.put(weight.absent)
    return {id(weight.absent): weight for weight in made.values()}


@dataclass
class _Use:
    """One module's need of weights."""

    window: Window
    weights: Sequence[Weight]
    name: str
    depth: int = 0

    def attach(self, module: nn.Module) -> None:
        """Ask for the weights before each forward of ``module``."""
        module.register_forward_pre_hook(self.begin, with_kwargs=True)
        # `always_call`: also when the forward raises, or the weights would be in use for ever.
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
        self.window.enter(self.weights)
        # Counted only once the weights are there; a module may be called again inside its own forward.
        self.depth += 1

    def end(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # ``end`` is called also where ``begin`` has raised, which then counted nothing.
        if self.depth:
            self.depth -= 1
            self.window.leave(self.weights)


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
