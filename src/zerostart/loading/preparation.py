"""Prepare a load or a plan: catalog, model on meta, recipes and origins."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart import engines, models
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.memory import memory_catalog
from zerostart.checkpoint.source import check_configuration
from zerostart.checkpoint.storage.files import read_small
from zerostart.checkpoint.strict_json import MAX_CONFIG_BYTES
from zerostart.distributed.machine import no_garbage_collection
from zerostart.distributed.world import World
from zerostart.engines import Engine
from zerostart.errors import ConfigError, ZerostartError
from zerostart.geometry.layout import Layout, Parallelism, flat_partition
from zerostart.live.model import find_loaded_models
from zerostart.live.report import Clock
from zerostart.loading.destinations import read_request
from zerostart.loading.request import Request
from zerostart.loading.source import check_model, name_source, open_optional_source
from zerostart.models import Aliases, Built, Origins
from zerostart.recipe import Coverage, Recipe, Recipes, Target, main_dtype, spelling, torch_dtype
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import join
from zerostart.upstream.deepspeed.zero3_partitions import partition_of

#: Mesh axes that all ranks must agree on.
_AXES = ("expert_parallel", "tensor_parallel", "sequence_parallel")
_LISTS = (list, tuple, set, frozenset)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Suspend the engine contexts of the caller (``zero.Init``) and garbage collection."""
    with no_garbage_collection(), engines.suspended_contexts():
        yield


def prepare(
    request: Request,
    engine: Engine,
    world: World,
    clock: Clock,
    strict: bool,
    importing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    fetch: bool = False,
) -> Prepared:
    """Prepare a load for ``engine``; collective over ``world``.

    A plan has a world of one process. Libraries of the model are imported inside ``importing()``. With
    ``fetch``, as in a load, a hub id may be downloaded, and a module with values is emptied.

    Raises CoverageError if ``strict`` and a name is missing or unexpected, and errors that need no weights.
    """
    with clock.phase("plan"):
        catalog = open_optional_source(request.source, world, request.model, fetch)
    if catalog is None:
        return prepare_without_source(request, engine, world, clock, importing, fetch)
    with clock.phase("build"), world.phase("building the model"):
        check_model(request.model, request.source, catalog)
        with importing():
            models.import_code(request.model, catalog.root, _shapes(catalog))
        built, aliases = _build(request, engine, catalog)
        if world.rank == 0:
            check_configuration(catalog)
        parallelism = engine.parallelism(built.model)
    with clock.phase("plan"), world.phase("planning"):
        targets = _cast_targets(built.library.expectations(built), engine.cast_dtype)
        recipes = built.recipes(catalog, targets, request.converter)
        reinitialised: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        if request.reinitialise_mismatched:
            # Initialise them like missing tensors.
            reinitialised = recipes.coverage.mismatched
            recipes = replace(recipes, coverage=replace(recipes.coverage, mismatched={}))
        # Collective if a checkpoint has both tensors of a tie: each rank compares a share of the values.
        coverage = models.tie_names(built, recipes, make_comparison(catalog, world))
        coverage.check(
            name_source(request.source, catalog),
            type(built.model).__name__,
            strict,
            request.converter is not None,
        )
        origins = models.resolve_origins(built, recipes, aliases)
    return Prepared(
        engine,
        catalog,
        built,
        aliases,
        parallelism,
        recipes,
        coverage,
        origins,
        reinitialised=reinitialised,
    )


def check_agreement(request: Request, prepared: Prepared, world: World) -> None:
    """Raise ConfigError if ranks prepared different models or engines; collective.

    Each rank reads its own arguments and configuration files. With different ones the load would succeed, and
    ranks would exchange tensors of different sizes in training.
    """
    if world.size == 1:
        return
    engine, mesh = prepared.engine, prepared.engine.mesh
    # One line for each setting, so that the error can name the first difference.
    own = [f"engine {engine.title}", f"fp32_masters={request.fp32_masters}"]
    own += [f"{name}={getattr(mesh, name)}" for name in _AXES]
    own += [f"engine_config {setting}" for setting in _settings(engine.common_config)]
    own.append(f"a configuration of the model with digest {_configuration(prepared.catalog)}")
    own += [f"{n} ({p.dtype}, {tuple(p.shape)})" for n, p in prepared.built.model.named_parameters()]
    first = world.all_gather_object(own, "planning")[0]
    if first == own:
        return
    # "nothing" if only the order differs.
    theirs = next((line for line in first if line not in set(own)), "nothing")
    ours = next((line for line in own if line not in set(first)), "nothing")
    raise ConfigError(
        f"the ranks do not do the same: this rank has {ours}, but rank 0 has {theirs}; pass "
        "every rank the same arguments, and give every machine the same files"
    )


def _configuration(catalog: Catalog) -> str:
    if not catalog.root:
        return "none"
    try:
        # The file on this machine, from which this rank built its model.
        raw = read_small(str(Path(catalog.root) / "config.json"), MAX_CONFIG_BYTES, "configuration")
    # Building the model has already raised if it needs the file.
    except ZerostartError:
        return "none"
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _settings(config: Mapping[str, Any], under: str = "") -> Iterator[str]:
    for key in sorted(config, key=str):
        value, name = config[key], f"{under}{key}"
        if isinstance(value, Mapping):
            yield from _settings(value, f"{name}.")
        elif isinstance(value, str | int | float | None):
            yield f"{name}={value!r}"
        else:
            words = sorted(map(_word, value)) if isinstance(value, _LISTS) else ""
            yield f"{name}: {type(value).__name__}{words}"


def _word(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def _build(request: Request, engine: Engine, catalog: Catalog) -> tuple[Built, Aliases]:
    dtype = engine.parameter_dtype if request.dtype is None else request.dtype
    stored = {name: torch_dtype(entry.dtype, name) for name, entry in catalog.weights.items()}
    # Skip 8-bit dtypes: a model does not compute in the dtype of quantised weights.
    first = next((d for d in stored.values() if d.is_floating_point and d.itemsize > 1), None)
    main = main_dtype(catalog.weights.values())
    trusted, shapes = request.trust_remote_code, _shapes(catalog)
    built = models.build(request.model, catalog.root, dtype, first, main, trusted, shapes)
    # Before casts, which make new tensors that share no memory.
    aliases = Aliases.of(built.model, built.library.keeps_views)
    models.set_dtypes(built, stored)
    computing = engine.compute_dtype
    if computing is not None:
        masters = request.fp32_masters and computing == built.dtype and _stored_wider(catalog, computing)
        models.report_castable_parameters(built, computing, masters, engine.allow_cast)
    return built, aliases


def _shapes(catalog: Catalog) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in catalog.weights.items()}


def _cast_targets(targets: dict[str, Target], dtype: torch.dtype | None) -> dict[str, Target]:
    if dtype is None:
        return targets
    return {
        name: t if t.buffer or not t.dtype.is_floating_point else replace(t, dtype=dtype, as_stored=False)
        for name, t in targets.items()
    }


def _stored_wider(catalog: Catalog, dtype: torch.dtype) -> bool:
    count = {True: 0, False: 0}
    for entry in catalog.weights.values():
        stored = torch_dtype(entry.dtype, entry.name)
        count[stored.is_floating_point and stored.itemsize > dtype.itemsize] += entry.numel
    return count[True] > count[False]


@dataclass(frozen=True)
class Prepared:
    """Everything that a load knows before it shards the model; equal on all ranks."""

    engine: Engine
    catalog: Catalog
    built: Built
    aliases: Aliases
    parallelism: Parallelism
    recipes: Recipes
    coverage: Coverage
    origins: Origins
    from_checkpoint: bool = True
    #: Shapes in the checkpoint and in the model of tensors that are initialised because the shapes differ.
    reinitialised: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: Restore the values of the caller's module after a failure; valid until the first value is read.
    restore_model: Callable[[], None] = lambda: None


#: Number of elements compared at a time.
COMPARED_ELEMENTS = 1 << 20


def make_comparison(catalog: Catalog, world: World) -> Callable[[Recipe, Recipe], bool]:
    """Return a collective function that compares the values of two recipes.

    Each rank reads and compares a share.
    """

    def equal(a: Recipe, b: Recipe) -> bool:
        if a.target.shape != b.target.shape or a.target.dtype != b.target.dtype:
            return False
        total = prod(a.target.shape)
        steps = -(-total // COMPARED_ELEMENTS)
        same = all(
            _equal_part(catalog, a, b, flat_partition(a.target.shape, step, steps))
            for step in range(world.rank, steps, world.size)
        )
        return all(world.all_gather_object(same, "comparing tied weights"))

    return equal


def _equal_part(catalog: Catalog, a: Recipe, b: Recipe, layout: Layout) -> bool:
    left, right = (torch.empty(layout.numel, dtype=a.target.dtype, device="cpu") for _ in range(2))
    pairs = ((a, left), (b, right))
    plan = join(catalog, [read_request(r.target.name, r, layout, storage) for r, storage in pairs])
    execute(plan, [left, right], Progress(plan.read_bytes, shown=False))
    return torch.equal(left, right)


def prepare_without_source(
    request: Request,
    engine: Engine,
    world: World,
    clock: Clock,
    importing: Callable[[], AbstractContextManager[None]],
    may_empty: bool,
) -> Prepared:
    """Prepare a load without a checkpoint; collective.

    A module with values is emptied if ``may_empty``. Raises ConfigError, and errors of building a model.
    """
    with clock.phase("build"), world.phase("arguments"):
        _check(request, may_empty)
        values = _values(request.model) if models.has_values(request.model) else None
        digest = "" if values is None else _digest(values)
    with clock.phase("plan"):
        digests = world.all_gather_object(digest, "comparing the modules")
        differing = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
        if differing is not None:
            raise ConfigError(
                f"the modules of ranks 0 and {differing} differ in their tensors: build the same with the "
                "same seed on every rank, or pass model=lambda: Class(...), which gives all ranks the values "
                "of rank 0"
            )
    if values is not None:
        with clock.phase("plan"), world.phase("planning"):
            return _existing(request, engine, memory_catalog(values))
    with clock.phase("build"), world.phase("building the model"):
        with importing():
            models.import_model(request.model)
        return _fresh(request, engine, world)


def _check(request: Request, may_empty: bool) -> None:
    model = request.model
    if model is None:
        raise ConfigError(
            "source is None on every rank; pass a path, a hub id or a mapping of tensors, or model= to start "
            "without a checkpoint"
        )
    if request.converter is not None:
        raise ConfigError(
            "converter transforms the tensors of a checkpoint, but source is None; leave it out"
        )
    if models.has_values(model) and not may_empty:
        raise ConfigError(
            "model has values, which a plan would not change; pass it on the meta device, or a "
            "callable that builds it"
        )
    if isinstance(model, nn.Module) and (
        next(find_loaded_models(model), None) is not None
        or any(partition_of(parameter) is not None for parameter in model.parameters())
    ):
        raise ConfigError(
            f"{type(model).__name__} or a part of it is sharded already; load its other parts one by one"
        )


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    values = {name: tensor.detach() for name, tensor, _ in models.named_tensors(model)}
    on_meta = next((name for name, tensor in values.items() if tensor.is_meta), None)
    if on_meta is not None:
        raise ConfigError(f"{on_meta} is on the meta device, but others have values; give all of them values")
    return values


def _digest(values: Mapping[str, torch.Tensor]) -> str:
    digests = Digests((name, spelling(t.dtype, name), t.shape) for name, t in values.items())
    for name, tensor in values.items():
        digests.add(name, 0, tensor.contiguous().view(-1))
    return hashlib.sha256(repr(list(digests.summed().items())).encode()).hexdigest()


def _existing(request: Request, engine: Engine, catalog: Catalog) -> Prepared:
    """Move the parameters of a module to meta, and use their values as the source."""
    dtype = engine.parameter_dtype if request.dtype is None else request.dtype
    model = request.model
    aliases = Aliases.of(model)
    undo = models.move_to_meta(model)

    def restore_model() -> None:
        undo()
        aliases.follow(model)

    try:
        aliases.follow(model)
        built = Built(model, models.OperatorLog(), dtype, False, models.library_of(model))
        _set_dtypes(built, engine)
        parallelism = engine.parallelism(model)
        recipes = models.existing_recipes(built, catalog)
        origins = models.existing_origins(built, recipes)
        # Again, as casts of dtypes replace tensors.
        aliases.follow(model)
    except BaseException:
        restore_model()
        raise
    return Prepared(
        engine,
        catalog,
        built,
        aliases,
        parallelism,
        recipes,
        recipes.coverage,
        origins,
        from_checkpoint=False,
        restore_model=restore_model,
    )


def _fresh(request: Request, engine: Engine, world: World) -> Prepared:
    dtype = engine.parameter_dtype if request.dtype is None else request.dtype
    built = models.build_fresh(request.model, request.dtype, dtype)
    aliases = Aliases.of(built.model, built.library.keeps_views)
    parallelism = engine.parallelism(built.model)
    origins = models.fresh_origins(built, aliases)
    _set_dtypes(built, engine)
    aliases.follow(built.model)
    # Planning and reading find nothing to read in an empty mapping.
    catalog = memory_catalog({})
    recipes = Recipes({}, Coverage())
    return Prepared(
        engine,
        catalog,
        built,
        aliases,
        parallelism,
        recipes,
        recipes.coverage,
        origins,
        from_checkpoint=False,
    )


def _set_dtypes(built: Built, engine: Engine) -> None:
    models.set_dtypes(built, {})
    if engine.cast_dtype is not None:
        models.cast_parameters(built.model, engine.cast_dtype)
    if engine.compute_dtype is not None:
        models.report_castable_parameters(built, engine.compute_dtype, False, engine.allow_cast)
