"""What a load, a plan and a rehearsal start from: found out before anything is sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from zerostart import engines, models
from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import World
from zerostart.engines.deepspeed.settings import configured_dtype
from zerostart.engines.fsdp2.units import let_cast
from zerostart.layout import Mesh, Parallelism
from zerostart.loading.collection import uncollected
from zerostart.loading.equality import equal_in
from zerostart.loading.report import Clock
from zerostart.loading.request import Request
from zerostart.loading.source import check_model, described, open_source
from zerostart.models import Built, Origins
from zerostart.recipe import Coverage, Recipes, Target, main_dtype, torch_dtype, trace

__all__ = ["Prepared", "prepare", "undisturbed"]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without contexts of engines that a caller has opened, and without garbage collection."""
    with uncollected(), engines.contexts_aside():
        yield


@dataclass(frozen=True)
class Prepared:
    """All that is known of a load before anything is sharded; the same on every rank."""

    catalog: Catalog
    built: Built
    parallelism: Parallelism
    recipes: Recipes
    coverage: Coverage
    origins: Origins


def prepare(
    request: Request,
    world: World,
    mesh: Mesh,
    clock: Clock,
    strict: bool,
    importing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Prepared:
    """The start of a load over ``mesh``; collective over ``world``, which is one process in a plan.

    Libraries that the model needs are imported inside ``importing()``. Raises CoverageError where ``strict``
    and a name is missing or too much, and every error that can be told before weights are read.
    """
    with clock.phase("plan"):
        catalog = open_source(request.source, world, request.model)
    with clock.phase("build"), world.phase("building the model"):
        check_model(request.model, catalog)
        with importing():
            models.require(request.model, catalog.root)
        built = _build(request, catalog)
        parallelism = engines.resolve(built.model, request.engine, mesh, request.engine_config)
    with clock.phase("plan"), world.phase("planning"):
        recipes = _recipes(request, catalog, built)
        coverage = models.tie_names(built.model, recipes, equal_in(catalog, world))
        coverage.check(described(request.source, catalog), type(built.model).__name__, strict)
        origins = models.resolve_origins(built, recipes)
    return Prepared(catalog, built, parallelism, recipes, coverage, origins)


def _build(request: Request, catalog: Catalog) -> Built:
    """The model on meta, with the dtypes of the load."""
    dtype = request.dtype
    if dtype is None and request.engine == "deepspeed":
        dtype = configured_dtype(request.engine_config)
    stored = {name: torch_dtype(entry.dtype, name) for name, entry in catalog.tensors.items()}
    # Not of eight bits: a quantised checkpoint's weights are not what the model computes in.
    first = next((d for d in stored.values() if d.is_floating_point and d.itemsize > 1), None)
    built = models.build(request.model, catalog.root, dtype, first, main_dtype(catalog.tensors.values()))
    models.set_dtypes(built, stored)
    computing = engines.computing_dtype(request.engine, request.engine_config)
    if computing is not None:
        masters = request.fp32_masters and computing == built.dtype and _stored_wider(catalog, computing)
        models.let_cast(built, computing, masters, let_cast)
    return built


def _recipes(request: Request, catalog: Catalog, built: Built) -> Recipes:
    targets = models.expectations(built)
    if request.flat:
        targets = _as_cast(targets, configured_dtype(request.engine_config))
    recipes = trace(catalog, built.model, targets, request.converter, built.quantizer)
    if request.reinitialised is not None:
        request.reinitialised.update(recipes.coverage.mismatched)
        recipes = replace(recipes, coverage=replace(recipes.coverage, mismatched={}))
    return recipes


def _as_cast(targets: dict[str, Target], dtype: torch.dtype | None) -> dict[str, Target]:
    """Parameters in the dtype that DeepSpeed's stages 1 and 2 would cast all of them to."""
    if dtype is None:
        return targets
    return {
        name: t if t.buffer or not t.dtype.is_floating_point else replace(t, dtype=dtype, as_stored=False)
        for name, t in targets.items()
    }


def _stored_wider(catalog: Catalog, dtype: torch.dtype) -> bool:
    """Whether most elements of the checkpoint are stored in a floating dtype of more bytes than ``dtype``."""
    count = {True: 0, False: 0}
    for entry in catalog.tensors.values():
        stored = torch_dtype(entry.dtype, entry.name)
        count[stored.is_floating_point and stored.itemsize > dtype.itemsize] += entry.numel
    return count[True] > count[False]
