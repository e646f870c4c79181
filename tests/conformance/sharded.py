"""Load every shard of a world in one process, and compare with ``from_pretrained``."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.identity.snapshots import Snapshot, same_bits, ties_of
from zerostart import models
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.source import open_catalog
from zerostart.distributed.world import World
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition, replicated
from zerostart.loading.preparation import make_comparison
from zerostart.models import Built, Origins, Program
from zerostart.recipe import Coverage, Recipe, Recipes, main_dtype, torch_dtype
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, PlanOptions, join
from zerostart.transfer.planning.plan import Plan

WORLDS = (2, 3)
SEED = 7
#: Maximum bytes read per byte owned, without reading through small gaps.
READ_SHARE = 1.05
#: The default options also read one gap if that is cheaper than another call.
EXACT, DEFAULT = PlanOptions(gap_floor=0), PlanOptions()


@dataclass
class Reference:
    """transformers' own load of the checkpoint: the model and its report."""

    model: Any
    missing: list[str]
    unexpected: list[str]
    used: list[Any]


def reference(kind: Any, path: Path) -> Reference:
    """Load by transformers, which also initialises missing tensors."""
    from transformers import PreTrainedModel

    # The library's loader itself, since overrides of single classes do not always return the report.
    load = PreTrainedModel.from_pretrained.__func__
    torch.manual_seed(SEED)
    model, info = load(kind, path, dtype="auto", output_loading_info=True)
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return Reference(
        model, sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), list(model._weight_conversions)
    )


@dataclass
class _Loaded:
    """A model with its recipes, ready for sharding."""

    catalog: Catalog
    built: Built
    recipes: Recipes
    coverage: Coverage
    origins: Origins
    names: dict[str, list[str]]  # all names of each parameter, by the first


def compare(
    kind: Any, path: Path, expected: Reference, built: nn.Module, converter: Any = None
) -> tuple[list[str], int]:
    """Return differences of the sharded load, and the number of compared tensors.

    ``built`` is the model without a load. If ``from_pretrained`` leaves an attribute on meta, the value of
    ``built`` is expected.
    """
    loaded = prepare_model(kind, path, converter)
    lines = [] if loaded.coverage.mismatched == {} else [f"mismatched: {loaded.coverage.mismatched}"]
    if sorted(loaded.coverage.missing) != expected.missing:
        lines.append(f"missing is {sorted(loaded.coverage.missing)[:6]}, not {expected.missing[:6]}")
    if sorted(loaded.coverage.unexpected) != expected.unexpected:
        lines.append(f"unexpected is {sorted(loaded.coverage.unexpected)[:6]}, not {expected.unexpected[:6]}")
    if ties_of(loaded.built.model) != ties_of(expected.model):
        lines.append(f"ties are {ties_of(loaded.built.model)}, not {ties_of(expected.model)}")
    want = Snapshot.of(expected.model)
    real = Snapshot.of(built).attributes
    want.attributes = {n: real[n] if t.device.type == "meta" else t for n, t in want.attributes.items()}
    if list(loaded.origins.parameters) != list(want.parameters):
        return [*lines, "the models have not the same parameters"], 0
    for number, (world, flat) in enumerate((world, flat) for world in WORLDS for flat in (True, False)):
        where = f"world {world}, {'flat' if flat else 'Shard(0)'}"
        options = EXACT if number in (1, 2) else DEFAULT
        lines += [f"{where}: {line}" for line in _compare_world(loaded, world, flat, options, want)]
    lines += _compare_buffers(loaded, want)
    return lines, len(want.state) + len(want.unsaved) + len(want.attributes)


def prepare_model(kind: Any, path: Path, converter: Any) -> _Loaded:
    catalog = open_catalog(path)
    stored = {name: torch_dtype(entry.dtype, name) for name, entry in catalog.tensors.items()}
    first = next((dtype for dtype in stored.values() if dtype.is_floating_point), None)
    built = models.build(kind, catalog.root, None, first, main_dtype(catalog.tensors.values()))
    aliases = models.Aliases.of(built.model, built.library.keeps_views)
    models.set_dtypes(built, stored)
    recipes = built.recipes(catalog, built.library.expectations(built), converter)
    coverage = models.tie_names(built, recipes, make_comparison(catalog, World(0, 1, None)))
    names: dict[int, list[str]] = {}
    for name, parameter in built.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    origins = models.resolve_origins(built, recipes, aliases)
    return _Loaded(catalog, built, recipes, coverage, origins, {own[0]: own for own in names.values()})


def layout_of(shape: tuple[int, ...], flat: bool, rank: int, world: int) -> Layout:
    if flat or not shape:
        return flat_partition(shape, rank, world)
    return dimension_shard(shape, 0, rank, world)


def _compare_world(
    loaded: _Loaded, world: int, flat: bool, options: PlanOptions, want: Snapshot
) -> Iterator[str]:
    dtypes = {name: p.dtype for name, p in loaded.built.model.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in loaded.built.model.named_parameters()}
    whole = {name: torch.empty(p.numel(), dtype=p.dtype) for name, p in loaded.built.model.named_parameters()}
    for rank in range(world):
        layouts = {name: layout_of(shape, flat, rank, world) for name, shape in shapes.items()}
        shards = {name: torch.empty(layout.numel, dtype=dtypes[name]) for name, layout in layouts.items()}
        yield from (f"rank {rank}: {line}" for line in _fill(loaded, layouts, shards, options))
        for name, layout in layouts.items():
            for first, count, to in layout.runs():
                whole[name][first : first + count] = shards[name][to : to + count]
    for name, values in whole.items():
        for alias in loaded.names[name]:
            yield from _unlike(alias, values.view(shapes[name]), want.state[alias])


def _fill(
    loaded: _Loaded, layouts: dict[str, Layout], shards: dict[str, torch.Tensor], options: PlanOptions
) -> Iterator[str]:
    """Read and initialise one rank's shards; yield a line if reads take too many bytes."""
    parameters = loaded.origins.parameters
    expected = []
    owned = 0
    for name, layout in layouts.items():
        recipe = parameters[name]
        if isinstance(recipe, Recipe):
            shard = shards[name]
            destination = Destination(name, layout.numel, layout.owned, shard.dtype, direct=True)
            expected.append((recipe, layout, destination))
            owned += layout.owned * _width(loaded.catalog, recipe)
    plan = join(loaded.catalog, expected, options)
    _execute(plan, [shards[destination.name] for _, _, destination in expected])
    allowance = options.gap_floor * sum(read.rows for read in plan.reads)
    if plan.read_bytes > READ_SHARE * owned + allowance:
        yield f"{plan.read_bytes} bytes are read for {owned} owned"
    torch.manual_seed(SEED)
    programs = {name: program for name, program in parameters.items() if isinstance(program, Program)}
    missing = [(program, layouts[name], shards[name]) for name, program in programs.items()]
    models.fill_missing(missing, loaded.origins.start)


def filled(loaded: _Loaded) -> dict[str, torch.Tensor]:
    """Return every parameter whole, and put buffers into the model."""
    parameters = dict(loaded.built.model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    whole = {name: torch.empty(prod(shape), dtype=parameters[name].dtype) for name, shape in shapes.items()}
    layouts = {name: layout_of(shape, True, 0, 1) for name, shape in shapes.items()}
    list(_fill(loaded, layouts, whole, DEFAULT))
    for name, recipe in loaded.origins.buffers.items():
        buffer = torch.empty(recipe.target.shape, dtype=recipe.target.dtype)
        destination = Destination(name, buffer.numel(), buffer.numel(), buffer.dtype, direct=True)
        _execute(join(loaded.catalog, [(recipe, replicated(buffer.shape), destination)]), [buffer.view(-1)])
        models.replace_tensor(loaded.built.model, name, buffer)
    return {name: values.view(shapes[name]) for name, values in whole.items()}


def _width(catalog: Catalog, recipe: Recipe) -> int:
    """Return the bytes of an element of the recipe's sources."""
    sources = {str(name) for piece in recipe.pieces for name in piece.source}
    return max((torch_dtype(catalog.tensors[name].dtype).itemsize for name in sources), default=0)


def _execute(plan: Plan, storages: list[torch.Tensor]) -> None:
    finished = execute(plan, storages, Progress(plan.read_bytes, shown=False), threads=1)
    assert finished == plan.read_bytes


def _compare_buffers(loaded: _Loaded, want: Snapshot) -> Iterator[str]:
    model = loaded.built.model
    for name, recipe in loaded.origins.buffers.items():
        buffer = torch.empty(recipe.target.shape, dtype=recipe.target.dtype)
        destination = Destination(name, buffer.numel(), buffer.numel(), buffer.dtype, direct=True)
        plan = join(loaded.catalog, [(recipe, replicated(buffer.shape), destination)], EXACT)
        if plan.read_bytes > READ_SHARE * buffer.numel() * _width(loaded.catalog, recipe):
            yield f"buffer {name}: {plan.read_bytes} bytes are read"
        _execute(plan, [buffer.view(-1)])
        models.replace_tensor(model, name, buffer)
    actual = dict(model.named_buffers(remove_duplicate=False))
    persistent = {name: tensor for name, tensor in want.state.items() if name in actual}
    for name, tensor in {**persistent, **want.unsaved}.items():
        if name not in actual:
            yield f"buffer {name} is lacking"
        else:
            yield from _unlike(f"buffer {name}", actual[name], tensor)
    for name in actual.keys() - persistent.keys() - want.unsaved.keys():
        yield f"buffer {name} is not in the reference"
    attributes = Snapshot.of(model).attributes
    for name, tensor in want.attributes.items():
        if name not in attributes:
            yield f"attribute {name} is lacking"
        else:
            yield from _unlike(f"attribute {name}", attributes[name], tensor)


def _unlike(name: str, actual: torch.Tensor, want: torch.Tensor) -> Iterator[str]:
    if actual.dtype != want.dtype or actual.shape != want.shape or actual.device != want.device:
        yield (
            f"{name} is {actual.dtype} {tuple(actual.shape)} on {actual.device}, "
            f"not {want.dtype} {tuple(want.shape)} on {want.device}"
        )
    elif not same_bits(actual, want):
        yield f"{name} has {int((actual != want).sum())} of {want.numel()} elements wrong"
