"""The start without a checkpoint: of a module that has values, or of a model that initialises itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from zerostart import models
from zerostart.checkpoint.memory import memory_catalog
from zerostart.distributed.world import World
from zerostart.engines import Engine
from zerostart.errors import ConfigError
from zerostart.loading.prepared import Prepared
from zerostart.loading.report import Clock
from zerostart.loading.request import Request
from zerostart.loading.values import Values
from zerostart.models import Aliases, Built
from zerostart.recipe import Coverage, Recipes


def start(
    request: Request,
    engine: Engine,
    world: World,
    clock: Clock,
    importing: Callable[[], AbstractContextManager[None]],
    taking: bool,
) -> Prepared:
    """What ``prepare`` gives where no rank has a source; collective.

    A module with values is emptied if ``taking``. Raises ConfigError, and what building a model raises.
    """
    with clock.phase("build"), world.phase("arguments"):
        _check(request)
    if any(world.all_gather_object(models.has_values(request.model), "arguments")):
        with clock.phase("plan"):
            values = Values.of(request.model, world, taking)
        try:
            with clock.phase("plan"), world.phase("planning"):
                return _existing(request, engine, values)
        except BaseException:
            values.give_back()
            raise
    with clock.phase("build"), world.phase("building the model"):
        with importing():
            models.import_model(request.model)
        return _fresh(request, engine, world)


def _check(request: Request) -> None:
    """Raise ConfigError for arguments that say nothing without a checkpoint."""
    if request.model is None:
        raise ConfigError(
            "source is None on every rank; pass a path, a hub id or a mapping of tensors, or model= to start "
            "without a checkpoint"
        )
    if request.converter is not None:
        raise ConfigError("converter is for the tensors of a checkpoint, and source is None; leave it out")


def _fresh(request: Request, engine: Engine, world: World) -> Prepared:
    dtype = engine.parameter_dtype if request.dtype is None else request.dtype
    built = models.build_fresh(request.model, request.dtype, dtype)
    aliases = Aliases.of(built.model, built.library.keeps_views)
    parallelism = engine.parallelism(built.model)
    origins = models.fresh_origins(built, aliases)
    _set_dtypes(built, engine)
    aliases.follow(built.model)
    catalog = memory_catalog({}, tuple(range(world.size)))
    recipes = Recipes({}, Coverage())
    return Prepared(
        engine, catalog, built, aliases, parallelism, recipes, recipes.coverage, origins, stored=False
    )


def _existing(request: Request, engine: Engine, values: Values) -> Prepared:
    dtype = engine.parameter_dtype if request.dtype is None else request.dtype
    model, aliases = values.model, values.aliases
    built = Built(model, models.OperatorLog(), dtype, False, models.library_of(model))
    _set_dtypes(built, engine)
    parallelism = engine.parallelism(model)
    recipes = models.existing_recipes(built, values.catalog)
    origins = models.existing_origins(built, recipes)
    aliases.follow(model)
    return Prepared(
        engine,
        values.catalog,
        built,
        aliases,
        parallelism,
        recipes,
        recipes.coverage,
        origins,
        stored=False,
        values=values,
    )


def _set_dtypes(built: Built, engine: Engine) -> None:
    """The dtypes of a load, of a model that has no checkpoint: its own where nobody asks for another."""
    models.set_dtypes(built, {})
    if engine.cast_dtype is not None:
        models.cast_parameters(built.model, engine.cast_dtype)
    if engine.compute_dtype is not None:
        models.let_cast(built, engine.compute_dtype, False, engine.allow_cast)
