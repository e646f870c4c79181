"""Build models without weights: meta parameters in the dtype of the load."""

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
from zerostart.models.library import Built, ModelLibrary, Stored
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
from zerostart.recipe import Coverage, Recipes, Target, make_symbols, match_names
from zerostart.upstream.transformers.models import (
    check_built,
    is_imported,
    is_pretrained,
    without_weights,
)

ModelLike = nn.Module | type[nn.Module] | Callable[[], nn.Module] | Built | None


def from_config(model: ModelLike) -> bool:
    """Return True if the configuration next to the weights is needed."""
    return model is None or (isinstance(model, type) and library_of(model).from_config)


def require(model: ModelLike, root: str | None, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Import the model's library and class. Raises BuildError.

    ``shapes`` of the tensors identify a checkpoint without configuration.
    """
    if model is None:
        if root and shapes and config_path(root) is None and recognise_tensors(shapes) is not None:
            return
        library_in(root).require(None, root)
    elif isinstance(model, type):
        library_of(model).require(model, root)


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

    ``stored`` is the dtype of the first floating tensor, ``main`` the dtype of most elements; ``trusted`` and
    ``shapes`` are as in ``Stored``. A model that is already ``Built`` is returned. Raises BuildError or
    ConfigError.
    """
    if isinstance(model, Built):
        return model
    # In this order: a module, a configuration, a class with a configuration, a callable.
    facts = Stored(root, dtype, stored, main, trusted, shapes or {})
    if isinstance(model, nn.Module):
        built = _wrap_module(model, facts)
    elif model is None:
        built = _build_configured(None, facts)
    elif isinstance(model, type) and library_of(model).from_config:
        built = _build_configured(model, facts)
    else:
        built = _build_by_call(model, facts)
    return replace(built, quantizer=built.library.quantizer(built.model, root, built.dtype))


def _build_configured(kind: type[nn.Module] | None, stored: Stored) -> Built:
    library = library_of(kind) if kind is not None else _find_library(stored)
    how, log = library.construction(kind, stored), OperatorLog()
    with without_weights(how.building), log, explain_errors(how.name):
        model = how.make()
    check_built(model)
    return Built(model, log, how.dtype, True, library)


def _find_library(stored: Stored) -> ModelLibrary:
    bare = stored.root and stored.shapes and config_path(stored.root) is None
    description = recognise_tensors(stored.shapes) if bare else None
    return library_in(stored.root) if description is None else description[0]


def _build_by_call(make: type[nn.Module] | Callable[[], nn.Module], stored: Stored) -> Built:
    if not callable(make):
        raise ConfigError(
            f"model={make!r} is a {type(make).__name__}; pass a class, a callable that builds the model, or "
            "a module whose parameters are on the meta device"
        )
    name = getattr(make, "__name__", repr(make))
    model, log = _run_constructor(make, lambda: without_weights(torch.get_default_dtype()), name)
    check_built(model)
    library = library_of(model)
    return Built(model, log, library.whole_dtype(model, stored, False), True, library)


def _wrap_module(model: nn.Module, stored: Stored) -> Built:
    real = [name for name, p in model.named_parameters() if p.device.type != "meta"]
    if real:
        raise ConfigError(
            f"model has {len(real)} parameters that are not on the meta device ({real[0]}, ...). "
            "Build it inside `with torch.device('meta'):`, or pass the class or a callable that "
            "builds it"
        )
    library = library_of(model)
    return Built(model, OperatorLog(), library.whole_dtype(model, stored, True), False, library)


def _run_constructor(
    make: Callable[[], Any], context: Callable[[], AbstractContextManager[None]], name: str
) -> tuple[nn.Module, OperatorLog]:
    """Call ``make`` inside ``context``, and log its operators.

    If it imports transformers first and builds one of its models, it runs again: these models need contexts
    that the import provides.
    """
    before, log = is_imported(), OperatorLog()
    try:
        with context(), log, explain_errors(name):
            model = make()
    except BuildError:
        if before or not is_imported():
            raise
    else:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={name} returned a {type(model).__name__}, not a torch.nn.Module")
        if before or not any(map(is_pretrained, model.modules())):
            return model, log
    return _run_constructor(make, context, name)


@contextlib.contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Explain errors of constructors that need data. Raises BuildError."""
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

    With a dtype for the model, floating tensors of its main dtype change; those that the constructor made in
    another dtype do not. Without one (a plain module), each tensor takes the dtype of the checkpoint.
    """
    model = built.model
    floating = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    # Constructors make most tensors in one dtype, the first one included.
    main = floating[0] if floating else None
    new_dtypes: dict[str, torch.dtype] = {}
    waiting: list[tuple[str, torch.Tensor]] = []
    for name, tensor, _ in state_names(model):
        want = built.dtype if built.dtype is not None and tensor.dtype == main else tensor.dtype
        if built.dtype is None and tensor.dtype.is_floating_point:
            want = stored.get(name, tensor.dtype)
        if want != tensor.dtype and tensor.device.type == "meta":
            new_dtypes[name] = want
            waiting.append((name, tensor))
    replace_all(model, waiting, lambda name, tensor: recast(tensor, new_dtypes[name]))


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating parameter on meta, as an engine would."""
    named = model.named_parameters(remove_duplicate=False)
    to_cast = [(name, p) for name, p in named if p.dtype.is_floating_point and p.dtype != dtype]
    replace_all(model, to_cast, lambda _, parameter: recast(parameter, dtype))


def let_cast(
    built: Built, computing: torch.dtype, masters: bool, note: Callable[[nn.Parameter, torch.dtype], None]
) -> None:
    """Report, through ``note``, parameters that an engine may cast to ``computing``.

    Parameters that the constructor made in another dtype, or that the model keeps in another, are excluded.
    With ``masters``, parameters in ``computing`` become fp32 masters.
    """
    exceptions = built.library.dtype_plan(built.model, computing)

    def casts(name: str, parameter: torch.Tensor) -> bool:
        own = built.dtype is not None and parameter.dtype != built.dtype
        return not own and parameter.is_floating_point() and not any(p.search(name) for p, _ in exceptions)

    def make(_: str, old: torch.Tensor) -> torch.Tensor:
        new = recast(old, torch.float32) if masters and old.dtype == computing else old
        assert isinstance(new, nn.Parameter)
        note(new, computing)
        return new

    named = built.model.named_parameters(remove_duplicate=False)
    replace_all(built.model, ((name, p) for name, p in named if casts(name, p)), make)


# Models without a checkpoint: their own initialisation becomes programs that run in shards.


def import_model(model: object) -> None:
    """Import libraries for building ``model``. Raises as ``build_fresh`` does."""
    if not isinstance(model, (nn.Module, Built)):
        find_maker(model, None)


def build_fresh(model: object, requested: torch.dtype | None, dtype: torch.dtype | None) -> Built:
    """Build a model that initialises itself.

    ``model`` is a configuration, class, callable or meta module. ``requested`` is torch's default dtype
    during construction; None for the configuration's or present one. ``dtype`` is the final dtype of the
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
    # Draws on meta do not move the generator, so the constructor drew real numbers or seeded.
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise BuildError(
            f"{name} draws random numbers on the CPU by name, or seeds the CPU's generator, in its "
            "constructor: its weights would differ from the unsharded model's. Let it draw on "
            "torch's default device and seed before the load, or build the module yourself and "
            "pass it"
        )
    return Built(built, log, dtype, True, library_of(built))


def fresh_origins(built: Built, aliases: Aliases) -> Origins:
    """Return programs for parameters and random buffers; compute other buffers.

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
            assert program is not None, "what draws gives values"
            random_buffers[name] = program
        # A program fills it later, in turn with the parameters' draws.
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
    """Return True if the module's parameters, or else buffers, are real."""
    if not isinstance(model, nn.Module):
        return False
    tensors: list[torch.Tensor] = [*model.parameters()] or [*model.buffers()]
    return any(tensor.device.type != "meta" for tensor in tensors)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield ``(name, tensor, is a buffer)`` of each tensor once."""
    for name, parameter in model.named_parameters():
        yield name, parameter, False
    for name, buffer in model.named_buffers():
        yield name, buffer, True


def move_to_meta(model: nn.Module) -> Callable[[], None]:
    """Replace parameters by meta tensors; return an undo function."""
    old = dict(model.named_parameters(remove_duplicate=False))
    replace_all(model, old.items(), lambda _, parameter: recast(parameter, parameter.dtype))

    def put_back() -> None:
        for name, parameter in old.items():
            replace_tensor(model, name, parameter)

    return put_back


def existing_recipes(built: Built, catalog: Catalog) -> Recipes:
    """Return recipes that copy each tensor in the model's dtype."""
    plan = [] if built.dtype is None else built.library.dtype_plan(built.model, built.dtype)
    targets = {}
    for name, tensor, buffer in named_tensors(built.model):
        exceptions = () if buffer or not tensor.is_floating_point() else plan
        dtype = next((other for pattern, other in exceptions if pattern.search(name)), tensor.dtype)
        targets[name] = Target(name, tuple(tensor.shape), dtype, buffer)
    return match_names(make_symbols(catalog), targets)


def existing_origins(built: Built, recipes: Recipes) -> Origins:
    """Return the origins of a model with values."""
    keep_dtypes(built.model, recipes)
    found, model = recipes.by_name, built.model
    buffers = {name: found[name] for name, _ in model.named_buffers()}
    return Origins({name: found[name] for name, _ in model.named_parameters()}, buffers, ())
