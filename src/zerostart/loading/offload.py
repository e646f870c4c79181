"""Load a model whose parameters are on the device only during forwards.

All offloaded models of a pipeline share one window of device memory. The parameters of a module are fetched
before its forward, and stay until another module needs the memory.
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
from zerostart.loading.destinations import Destinations, read_request
from zerostart.loading.placement import Placement
from zerostart.loading.preparation import Prepared, isolated, prepare
from zerostart.loading.request import Request
from zerostart.models import Origins
from zerostart.recipe import Recipe
from zerostart.recipe.values import find_leaves
from zerostart.transfer import Arena, Progress, Tuning, execute, page_locked
from zerostart.transfer.planning import Plan, join
from zerostart.upstream.torch.tensors import make_wrapper

#: Maximum size of the staging buffers while a layer is read, in bytes, in addition to the window.
MAX_STAGING_BYTES = 32 << 20
#: Modules whose forward computes with the parameters of their submodules.
INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)
_PURPOSE = (
    "and layers of the model are read from it as they are needed; keep it as it is while the model is used, "
    "or place the component 'replicate'"
)


class WeightStore(Protocol):
    """Whole parameters of one model, by name."""

    def fetch(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Fill each 1-D tensor with the parameter of its name.

        Elements are in row-major order, in the tensor's dtype. Raises ReadError if a file cannot be read or
        was changed.
        """


class FileWeights:
    """Weights in the checkpoint's files, in any layout and dtype."""

    def __init__(self, catalog: Catalog, recipes: Mapping[str, Recipe], tuning: Tuning) -> None:
        self._recipes = dict(recipes)
        self._tuning = tuning
        used = {catalog.tensors[n].file for r in self._recipes.values() for n in find_leaves(r.pieces)}
        self._catalog = replace(catalog, storage=catalog.storage.detach(used))
        # Plans by names and dtypes of the fetched tensors: every step fetches the same layers.
        self._plans: dict[tuple[tuple[str, torch.dtype], ...], Plan] = {}

    def fetch(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Read the parameters; not collective. Raises ReadError."""
        key = tuple((name, tensor.dtype) for name, tensor in outputs.items())
        if key not in self._plans:
            self._plans[key] = self._plan(outputs)
        plan = self._plans[key]
        storage, tuning = self._catalog.storage.reattach(_PURPOSE), self._tuning.fit_to_plan(plan)
        reader = storage.reader(cold=tuning.cold)
        progress = Progress(plan.read_bytes, False)
        execute(plan, list(outputs.values()), progress, tuning.threads, reader, tuning.depth)

    def _plan(self, outputs: Mapping[str, torch.Tensor]) -> Plan:
        requests = []
        for name, tensor in outputs.items():
            recipe = self._recipes[name]
            requests.append(read_request(name, recipe, replicated(recipe.target.shape), tensor))
        return join(self._catalog, requests, self._tuning.options())


class MemoryWeights:
    """Weights in the memory of a device, page-locked if ``pinned``."""

    def __init__(
        self,
        files: FileWeights,
        sizes: Mapping[str, tuple[int, torch.dtype]],
        device: torch.device,
        pinned: bool,
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        arena = Arena(device, page_locked) if pinned else None
        # Reserve all before the first `take`, which allocates the arena.
        offsets = {name: arena.reserve(*size) for name, size in sizes.items()} if arena is not None else {}
        for name, (numel, dtype) in sizes.items():
            if arena is None:
                tensor = torch.empty(numel, dtype=dtype, device=device)
            else:
                tensor = arena.take(offsets[name], numel, dtype)
            # One at a time: staging needs memory for one tensor only.
            files.fetch({name: tensor})
            self._tensors[name] = tensor

    def fetch(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters; reads no file."""
        for name, tensor in outputs.items():
            tensor.copy_(self._tensors[name], non_blocking=True)


@dataclass(eq=False)
class Weight:
    """An offloaded parameter."""

    name: str
    #: Parameter in the model while the values are not on the device.
    placeholder: nn.Parameter
    store: WeightStore
    #: Modules and attribute names that refer to the parameter.
    places: list[tuple[nn.Module, str]]
    #: Number of running forwards that compute with it.
    users: int = 0

    @property
    def nbytes(self) -> int:
        """Size on the device, in bytes."""
        return self.placeholder.numel() * self.placeholder.element_size()

    def assign(self, tensor: nn.Parameter) -> None:
        """Put ``tensor`` into the model."""
        for module, leaf in self.places:
            module._parameters[leaf] = tensor


class Window:
    """Device memory for fetched parameters of offloaded models, of at most ``limit`` bytes."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self.device = limit, device
        self.used = self.highest = self.fetches = 0
        # Weights on the device, in the order of their last use.
        self._resident: dict[Weight, None] = {}

    def acquire(self, weights: Sequence[Weight]) -> None:
        """Fetch ``weights``, and keep them until ``release``.

        Raises EngineError if the limit has no room for them.
        """
        missing = [weight for weight in weights if weight not in self._resident]
        for weight in weights:
            weight.users += 1
            if weight in self._resident:
                self._resident[weight] = self._resident.pop(weight)
        if missing:
            try:
                self._make_room(missing)
                self._fetch(missing)
            except BaseException:
                self.release(weights)
                raise

    def release(self, weights: Sequence[Weight]) -> None:
        """Allow the eviction of ``weights``."""
        for weight in weights:
            weight.users -= 1

    def evict(self, weight: Weight) -> None:
        """Free the memory of ``weight`` if it is on the device."""
        if weight in self._resident:
            weight.assign(weight.placeholder)
            del self._resident[weight]
            self.used -= weight.nbytes

    def _fetch(self, missing: Sequence[Weight]) -> None:
        # Tensors made in inference mode cannot be used outside it.
        with torch.inference_mode(False), torch.no_grad():
            flat = {
                weight: torch.empty(
                    weight.placeholder.numel(), dtype=weight.placeholder.dtype, device=self.device
                )
                for weight in missing
            }
            missing[0].store.fetch({weight.name: tensor for weight, tensor in flat.items()})
            for weight, tensor in flat.items():
                weight.assign(nn.Parameter(tensor.view(weight.placeholder.shape), requires_grad=False))
                self._resident[weight] = None
                self.used += weight.nbytes
        self.highest = max(self.highest, self.used)
        self.fetches += len(missing)

    def _make_room(self, missing: Sequence[Weight]) -> None:
        needed = sum(weight.nbytes for weight in missing)
        # Evict other models first. Of this model evict the most recently used: a forward that runs from the
        # first layer to the last needs it again later than all foreign.
        idle = [weight for weight in self._resident if not weight.users]
        foreign = [weight for weight in idle if weight.store is not missing[0].store]
        own = [weight for weight in reversed(idle) if weight.store is missing[0].store]
        for weight in [*foreign, *own]:
            if self.used + needed <= self.limit:
                break
            self.evict(weight)
        if self.used + needed > self.limit:
            busy = ", ".join(weight.name for weight in self._resident)
            raise EngineError(
                f"{missing[0].name} needs {needed} bytes while {busy} are in use, which is {self.used} of "
                f"the {self.limit} that device_memory_limit leaves to offloaded components; raise it"
            )


# Weak keys: a deleted model leaves no entry.
_offloaded: weakref.WeakKeyDictionary[nn.Module, tuple[Window, list[Weight]]] = weakref.WeakKeyDictionary()


def load_offloaded(request: Request, placement: Placement, window: Window, grows: bool) -> nn.Module:
    """Load a model whose parameters are fetched into ``window``; collective.

    If ``grows``, the window is enlarged for this model's layers. The model computes on the window's device,
    without gradients for its parameters or through them.

    Raises ConfigError if the limit is too small for one of its modules, and the errors of a load.
    """
    with isolated():
        world = joined_world()
        with world.phase("loading"):
            clock = Clock()
            # The engine only reads settings: nothing is sharded, and every rank fetches its own layers.
            request = request.with_engine()
            engine = request.resolve(world.size)
            prepared = prepare(request, engine, world, clock, strict=True)
            with world.phase("offloading the model"):
                model = prepared.built.model
                _check(prepared, request)
                _load_buffers(prepared, window.device, request)
                # Before `_attach`: weights stored on the device reduce the window's limit.
                store = _make_store(prepared, placement, window, grows, request)
                weights = _attach(model, store, window, grows)
            model.eval()
            prepared.built.library.finish(
                prepared.built, prepared.recipes, str(request.source), prepared.catalog
            )
    _offloaded[model] = (window, weights)
    return model


def release(model: nn.Module) -> None:
    """Free the device memory of an offloaded model, which cannot compute afterwards."""
    if entry := _offloaded.pop(model, None):
        window, weights = entry
        for weight in weights:
            window.evict(weight)


def _check(prepared: Prepared, request: Request) -> None:
    lacking = [name for name, origin in prepared.origins.parameters.items() if not isinstance(origin, Recipe)]
    if lacking:
        raise ConfigError(
            f"{request.source} lacks {len(lacking)} parameters ({lacking[0]}, ...), which would "
            "have to be initialised; an offloaded component needs all of them in its files. Place "
            "the component 'replicate'"
        )
    parameters = {name for name, _ in prepared.built.model.named_parameters(remove_duplicate=False)}
    aliased = [alias.name for alias in prepared.aliases.entries if alias.name in parameters]
    if aliased:
        raise ConfigError(
            f"{type(prepared.built.model).__name__} refers to {aliased[0]} from a second place "
            "outside its module, which an offloaded component cannot; place the component "
            "'replicate'"
        )
    if request.resolve(1).cast_dtype is not None:
        raise AssertionError("offloaded parameters have the model's own dtypes")


def _load_buffers(prepared: Prepared, device: torch.device, request: Request) -> None:
    """Load all buffers onto ``device``: they are small and stay there."""
    buffers = Origins({}, prepared.origins.buffers, ())
    destinations = Destinations.of(prepared.built.model, buffers, [], device)
    prepared.aliases.join(list(prepared.recipes.by_name))
    prepared.aliases.follow(prepared.built.model)
    tuning = _tuning(prepared, device, request)
    plan = join(prepared.catalog, destinations.requests(), tuning.options())
    # Without a strategy: each rank reads all of them.
    if plan.reads or plan.computations:
        destinations.read(plan, tuning, None, False, joined_world())


def _tuning(prepared: Prepared, device: torch.device, request: Request) -> Tuning:
    if request.memory_limit is None:
        request = replace(request, memory_limit=MAX_STAGING_BYTES)
    return request.tuning(prepared.engine, prepared.catalog, device, bool(prepared.recipes.computed))


def _make_store(
    prepared: Prepared, placement: Placement, window: Window, grows: bool, request: Request
) -> WeightStore:
    accelerator = window.device.type != "cpu"
    offload = placement.kind == "offload"
    on_host = offload and (placement.store or ("host" if accelerator else "disk")) == "host"
    # A replicated component in a narrower storage dtype is stored on the device itself.
    device = torch.device("cpu") if offload else window.device
    recipes = {n: o for n, o in prepared.origins.parameters.items() if isinstance(o, Recipe)}
    reads_to = device if on_host or not offload else window.device
    files = FileWeights(prepared.catalog, recipes, _tuning(prepared, reads_to, request))
    if offload and not on_host:
        return files
    model = prepared.built.model
    main = placement.compute_dtype or request.dtype
    sizes = {
        name: (p.numel(), _storage_dtype(p, placement.storage_dtype, main))
        for name, p in model.named_parameters()
    }
    # A window that grows has no limit to reduce yet.
    if device.type != "cpu" and not grows:
        nbytes = sum(numel * dtype.itemsize for numel, dtype in sizes.values())
        if nbytes > window.limit:
            raise ConfigError(
                f"{type(model).__name__} takes {nbytes} bytes on {window.device}, but device_memory_limit "
                f"has only {window.limit} left; raise it by {nbytes - window.limit}, or place the "
                "component 'offload'"
            )
        window.limit -= nbytes
    return MemoryWeights(files, sizes, device, pinned=on_host and accelerator)


def _storage_dtype(
    parameter: nn.Parameter, storage: torch.dtype | None, main: torch.dtype | None
) -> torch.dtype:
    # Only matrices in the model's main dtype are stored in the narrower one; None: any dtype is the main one.
    is_main = main is None or parameter.dtype == main
    if storage is None or parameter.dim() < 2 or not parameter.is_floating_point() or not is_main:
        return parameter.dtype
    return storage


def _attach(model: nn.Module, store: WeightStore, window: Window, grows: bool) -> list[Weight]:
    """Make each module fetch its parameters before its forward.

    Raises ConfigError if the window is too small for a module and the modules that call it.
    """
    weights = _offload_parameters(model, store, window.device)
    needed: dict[str, list[Weight]] = {}
    inside = None
    for path, module in model.named_modules():
        if inside is not None and (not inside or path.startswith(f"{inside}.")):
            continue
        whole = isinstance(module, INDIVISIBLE)
        inside = path if whole else inside
        parameters = module.parameters(recurse=whole)
        if own := [weights[id(parameter)] for parameter in parameters]:
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
        _ForwardHooks(window, own, path or type(model).__name__).attach(model.get_submodule(path))
    return list(weights.values())


def _offload_parameters(model: nn.Module, store: WeightStore, device: torch.device) -> dict[int, Weight]:
    """Replace the parameters by placeholders; return the weights by the ``id`` of their placeholder."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights: dict[int, Weight] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = names[id(parameter)]
                placeholder = _placeholder(parameter, name, device)
                weight = weights.setdefault(id(parameter), Weight(name, placeholder, store, []))
                weight.places.append((module, leaf))
    for weight in weights.values():
        weight.assign(weight.placeholder)
    return {id(weight.placeholder): weight for weight in weights.values()}


@dataclass
class _ForwardHooks:
    """Hooks that hold the weights of one module during its forward."""

    window: Window
    weights: Sequence[Weight]
    name: str
    #: Number of running forwards; a module may be called inside its own forward.
    depth: int = 0

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.acquire, with_kwargs=True)
        # `always_call`: release the weights also if the forward raises.
        module.register_forward_hook(self.release, always_call=True)

    def acquire(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Fetch the weights. Raises EngineError if a backward would need them."""
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            raise EngineError(
                f"{self.name} is offloaded, but an input needs a gradient, and its weights do not stay "
                "for a backward. Call it under torch.no_grad(), or place the component 'replicate' or "
                "'shard'"
            )
        self.window.acquire(self.weights)
        self.depth += 1

    def release(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # torch also calls this if `acquire` has raised: nothing is to be released then.
        if self.depth:
            self.depth -= 1
            self.window.release(self.weights)


class _AbsentTensor(torch.Tensor):
    """A parameter without values; every use of the values is an error."""

    _name: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        own = next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, cls))
        # nn.Parameter detaches its tensor, which needs no values.
        if func is torch.ops.aten.detach.default:
            return _absent_like(own, own._name, own.device)
        raise own._error(func)

    def _error(self, operation: object) -> EngineError:
        return EngineError(
            f"{self._name} is offloaded, and its values are in memory only during its module's "
            f"forward, but {operation} asked for them outside of that. Place the component 'replicate' "
            "or 'shard'"
        )

    def storage(self) -> Any:
        """Raise EngineError: writers of files ask for the storage."""
        raise self._error("storage")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Absent({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _placeholder(parameter: torch.Tensor, name: str, device: torch.device) -> nn.Parameter:
    return nn.Parameter(_absent_like(parameter, name, device), requires_grad=False)


def _absent_like(tensor: torch.Tensor, name: str, device: torch.device) -> _AbsentTensor:
    absent = make_wrapper(_AbsentTensor, tensor.shape, tensor.stride(), 0, tensor.dtype, device=device)
    absent._name = name
    return absent
