"""Build models on the meta device, with parameters in the dtype of the load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.source import config_path
from zerostart.errors import BuildError, ConfigError
from zerostart.models.aliases import Aliases, recast, replace_all, replace_tensor, state_names
from zerostart.models.initialise import Program, find_program
from zerostart.models.library import BuildRequest, Built, ModelLibrary
from zerostart.models.operator_log import OperatorLog
from zerostart.models.origins import (
    Origins,
    fill_plain_tensors,
    keep_dtypes,
    make_buffer,
    require_program,
    resolve_origins,
)
from zerostart.models.registry import find_maker, library_in, library_of, recognise_tensors
from zerostart.recipe import CheckpointSymbols, Coverage, Recipes, Target, match_names
from zerostart.upstream.transformers.models import (
    check_built,
    is_imported,
    is_pretrained,
    without_weights,
)

ModelLike = nn.Module | type[nn.Module] | Callable[[], nn.Module] | Built | None


def needs_config(model: ModelLike) -> bool:
    """Return True if building ``model`` needs the configuration next to the weights."""
    return model is None or (isinstance(model, type) and library_of(model).from_config)


def import_code(model: ModelLike, root: str | None, shapes: Mapping[str, tuple[int, ...]] = {}) -> None:
    """Import the model's library and class. Raises BuildError.

    The ``shapes`` of its tensors identify a checkpoint without configuration.
    """
    if model is None:
        if root and shapes and config_path(root) is None and recognise_tensors(shapes) is not None:
            return
        library_in(root).import_code(None, root)
    elif isinstance(model, type):
        library_of(model).import_code(model, root)


def build(
    model: ModelLike,
    root: str | None,
    dtype: torch.dtype | None,
    stored: torch.dtype | None,
    main: torch.dtype | None = None,
    trusted: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Built:
    """Build ``model``, by default the class in ``root``'s configuration.

    ``stored`` is the dtype of the first floating tensor, ``main`` the dtype of most elements; ``trusted``
    allows running code in ``root``, and ``shapes`` are those of the tensors. A model that is already
    ``Built`` is returned. Raises BuildError or ConfigError.
    """
    if isinstance(model, Built):
        return model
    # In this order: a module, a configuration, a class with a configuration, a callable.
    request = BuildRequest(root, dtype, stored, main, trusted, shapes or {})
    if isinstance(model, nn.Module):
        built = _wrap_module(model, request)
    elif model is None:
        built = _build_configured(None, request)
    elif isinstance(model, type) and library_of(model).from_config:
        built = _build_configured(model, request)
    else:
        built = _build_by_call(model, request)
    return replace(built, quantizer=built.library.quantizer(built.model, root, built.dtype))


def _build_configured(kind: type[nn.Module] | None, request: BuildRequest) -> Built:
    library = library_of(kind) if kind is not None else _find_library(request)
    how, log = library.construction(kind, request), OperatorLog()
    with without_weights(how.building), log, explain_errors(how.name):
        model = how.make()
    check_built(model)
    return Built(model, log, how.dtype, True, library)


def _find_library(request: BuildRequest) -> ModelLibrary:
    bare = request.root and request.shapes and config_path(request.root) is None
    description = recognise_tensors(request.shapes) if bare else None
    return library_in(request.root) if description is None else description[0]


def _build_by_call(make: type[nn.Module] | Callable[[], nn.Module], request: BuildRequest) -> Built:
    if not callable(make):
        raise ConfigError(
            f"model={make!r} is a {type(make).__name__}; pass a class, a callable that builds the model, or "
            "a module whose parameters are on the meta device"
        )
    name = getattr(make, "__name__", repr(make))
    model, log = _run_constructor(make, lambda: without_weights(torch.get_default_dtype()), name)
    check_built(model)
    library = library_of(model)
    return Built(model, log, library.whole_dtype(model, request, False), True, library)


def _wrap_module(model: nn.Module, request: BuildRequest) -> Built:
    real = [name for name, p in model.named_parameters() if p.device.type != "meta"]
    if real:
        raise ConfigError(
            f"model has {len(real)} parameters that are not on the meta device ({real[0]}, ...). "
            "Build it inside `with torch.device('meta'):`, or pass the class or a callable that "
            "builds it"
        )
    library = library_of(model)
    return Built(model, OperatorLog(), library.whole_dtype(model, request, True), False, library)


def _run_constructor(
    make: Callable[[], Any], context: Callable[[], AbstractContextManager[None]], name: str
) -> tuple[nn.Module, OperatorLog]:
    """Call ``make`` inside ``context``, and log its operators.

    If ``make`` itself imports transformers and builds one of its models, call it again: these models need
    contexts that exist only after the import.
    """
    was_imported, log = is_imported(), OperatorLog()
    try:
        with context(), log, explain_errors(name):
            model = make()
    except BuildError:
        if was_imported or not is_imported():
            raise
    else:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={name} returned a {type(model).__name__}, not a torch.nn.Module")
        if was_imported or not any(map(is_pretrained, model.modules())):
            return model, log
    return _run_constructor(make, context, name)


@contextlib.contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Convert errors of a constructor inside the block to a BuildError that explains them."""
    try:
        yield
    except (BuildError, ConfigError):
        raise
    except Exception as error:
        raise BuildError(
            f"{name} cannot be built on the meta device: {type(error).__name__}: {error}. Its constructor "
            "may need the values of tensors; build it yourself with parameters on meta and pass the module"
        ) from error


def set_dtypes(built: Built, stored: dict[str, torch.dtype]) -> None:
    """Give meta tensors their final dtypes, before memory is allocated.

    If ``built`` has a dtype, it replaces the main floating dtype of the model; tensors in other dtypes keep
    theirs. Otherwise (a plain module), each tensor gets its dtype in the checkpoint, from ``stored``.
    """
    model = built.model
    floating = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    # Constructors make most tensors in one dtype, the first one included.
    main = floating[0] if floating else None
    new_dtypes: dict[str, torch.dtype] = {}
    to_recast: list[tuple[str, torch.Tensor]] = []
    for name, tensor, _ in state_names(model):
        new_dtype = built.dtype if built.dtype is not None and tensor.dtype == main else tensor.dtype
        if built.dtype is None and tensor.dtype.is_floating_point:
            new_dtype = stored.get(name, tensor.dtype)
        if new_dtype != tensor.dtype and tensor.device.type == "meta":
            new_dtypes[name] = new_dtype
            to_recast.append((name, tensor))
    replace_all(model, to_recast, lambda name, tensor: recast(tensor, new_dtypes[name]))


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating parameter on meta, as an engine would."""
    named = model.named_parameters(remove_duplicate=False)
    to_cast = [(name, p) for name, p in named if p.dtype.is_floating_point and p.dtype != dtype]
    replace_all(model, to_cast, lambda _, parameter: recast(parameter, dtype))


def report_castable_parameters(
    built: Built, computing: torch.dtype, masters: bool, record: Callable[[nn.Parameter, torch.dtype], None]
) -> None:
    """Call ``record`` for each parameter that an engine may cast to ``computing``.

    It skips parameters that the constructor made, or the model keeps, in another dtype than the model's. With
    ``masters``, parameters in ``computing`` become fp32 masters.
    """
    exceptions = built.library.dtype_plan(built.model, computing)

    def may_cast(name: str, parameter: torch.Tensor) -> bool:
        own = built.dtype is not None and parameter.dtype != built.dtype
        return not own and parameter.is_floating_point() and not any(p.search(name) for p, _ in exceptions)

    def make(_: str, old: torch.Tensor) -> torch.Tensor:
        new = recast(old, torch.float32) if masters and old.dtype == computing else old
        assert isinstance(new, nn.Parameter)
        record(new, computing)
        return new

    named = built.model.named_parameters(remove_duplicate=False)
    replace_all(built.model, ((name, p) for name, p in named if may_cast(name, p)), make)


# Models without a checkpoint: programs compute the values of their own initialisation in shards.


def import_model(model: object) -> None:
    """Import the libraries that building ``model`` needs. Raises as ``build_fresh`` does."""
    if not isinstance(model, (nn.Module, Built)):
        find_maker(model, None)


def build_fresh(model: object, requested: torch.dtype | None, dtype: torch.dtype | None) -> Built:
    """Build a model that initialises itself.

    ``model`` is a configuration, class, callable or meta module. ``requested`` is torch's default dtype
    during construction; None for the configuration's or the current one. ``dtype`` is the final dtype of the
    model; None leaves tensors as built. A model that is already ``Built`` is returned. Raises BuildError or
    ConfigError.
    """
    if isinstance(model, Built):
        return model
    # The construction was not logged, so missing values come from the model's own initialiser.
    if isinstance(model, nn.Module):
        return Built(model, OperatorLog(), dtype, False, library_of(model))
    make, own = find_maker(model, requested)
    name, state = getattr(make, "__name__", repr(make)), torch.get_rng_state()
    default = requested or own or torch.get_default_dtype()
    built, log = _run_constructor(make, lambda: without_weights(default, is_initialised=True), name)
    # Draws on meta do not change the generator, so the constructor drew on the CPU or set a seed.
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise BuildError(
            f"{name} draws random numbers with device='cpu', or seeds the CPU's generator, in its "
            "constructor: its weights would differ from the unsharded model's. Let it draw on "
            "torch's default device and seed before the load, or build the module yourself and "
            "pass it"
        )
    return Built(built, log, dtype, True, library_of(built))


def fresh_origins(built: Built, aliases: Aliases) -> Origins:
    """Return programs for parameters and random buffers; compute the other buffers now.

    Raises BuildError, with names, for tensors without a value.
    """
    model = built.model
    if not built.logged:
        return resolve_origins(built, Recipes({}, Coverage()), aliases)
    random_buffers: dict[str, Program] = {}

    def make_real(name: str, buffer: torch.Tensor) -> torch.Tensor:
        random = buffer.is_meta and bool(built.log.draws(buffer))
        if random:
            program = find_program(buffer, built.log)
            assert program is not None, "random buffers have a program"
            random_buffers[name] = program
        # A program fills it later, since draws must keep their order among the parameters'.
        return make_buffer(built, name, buffer, random, [])

    replace_all(model, model.named_buffers(remove_duplicate=False), make_real)
    parameters = {name: require_program(built, name, p) for name, p in model.named_parameters()}
    aliases.follow(model)
    fill_plain_tensors(built, aliases, _refuse_draws(built))
    names = tuple(name for name, _, _ in state_names(model))
    return Origins(dict(parameters), {}, names, 0, random_buffers)


def _refuse_draws(built: Built) -> Callable[[str, torch.Tensor], None]:
    def check(path: str, tensor: torch.Tensor) -> None:
        if built.log.draws(tensor):
            raise BuildError(
                f"{path} is a random tensor that is not registered, so a start without a checkpoint "
                "cannot draw it in the right order; register it as a buffer"
            )

    return check


def has_values(model: object) -> bool:
    """Return True if a parameter (otherwise a buffer) is not on meta."""
    if not isinstance(model, nn.Module):
        return False
    tensors: list[torch.Tensor] = [*model.parameters()] or [*model.buffers()]
    return any(tensor.device.type != "meta" for tensor in tensors)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield ``(name, tensor, is_buffer)`` for each parameter and buffer once."""
    for name, parameter in model.named_parameters():
        yield name, parameter, False
    for name, buffer in model.named_buffers():
        yield name, buffer, True


def move_to_meta(model: nn.Module) -> Callable[[], None]:
    """Replace parameters by meta tensors; return a function that restores them."""
    old = dict(model.named_parameters(remove_duplicate=False))
    replace_all(model, old.items(), lambda _, parameter: recast(parameter, parameter.dtype))

    def restore() -> None:
        for name, parameter in old.items():
            replace_tensor(model, name, parameter)

    return restore


def existing_recipes(built: Built, catalog: Catalog) -> Recipes:
    """Return recipes that load each tensor into a model that already has values."""
    plan = [] if built.dtype is None else built.library.dtype_plan(built.model, built.dtype)
    targets = {}
    for name, tensor, buffer in named_tensors(built.model):
        exceptions = () if buffer or not tensor.is_floating_point() else plan
        dtype = next((other for pattern, other in exceptions if pattern.search(name)), tensor.dtype)
        targets[name] = Target(name, tuple(tensor.shape), dtype, buffer)
    return match_names(CheckpointSymbols(catalog), targets)


def existing_origins(built: Built, recipes: Recipes) -> Origins:
    """Return the origins of the tensors of a model that already has values."""
    keep_dtypes(built.model, recipes)
    found, model = recipes.by_name, built.model
    buffers = {name: found[name] for name, _ in model.named_buffers()}
    return Origins({name: found[name] for name, _ in model.named_parameters()}, buffers, ())
