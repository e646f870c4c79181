"""A load of a checkpoint into every shard of a world, in one process, compared with ``from_pretrained``."""

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
#: Most bytes read for each byte owned, where reads are never joined over a gap for being small.
READ_SHARE = 1.05
#: With the default options, a read may also take in one gap that is cheaper to read than a call of its own.
EXACT, DEFAULT = PlanOptions(gap_floor=0), PlanOptions()


@dataclass
class Reference:
    """What transformers makes of the checkpoint: the model, and its report."""

    model: Any
    missing: list[str]
    unexpected: list[str]
    used: list[Any]


def reference(kind: Any, path: Path) -> Reference:
    """Transformers' own load, which also initialises what is missing."""
    from transformers import PreTrainedModel

    # The library's loader itself: what single classes put around it does not always pass on the report.
    load = PreTrainedModel.from_pretrained.__func__
    torch.manual_seed(SEED)
    model, info = load(kind, path, dtype="auto", output_loading_info=True)
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return Reference(
        model, sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), list(model._weight_conversions)
    )


@dataclass
class _Loaded:
    """A model with its recipes, ready to be cut."""

    catalog: Catalog
    built: Built
    recipes: Recipes
    coverage: Coverage
    origins: Origins
    names: dict[str, list[str]]  # all names of each parameter, by the first


def compare(
    kind: Any, path: Path, expected: Reference, built: nn.Module, converter: Any = None
) -> tuple[list[str], int]:
    """One line for each thing in which the sharded load differs, and the number of tensors compared.

    ``built`` is the model without a load. Where ``from_pretrained`` leaves a plain attribute on meta, the
    value that ``built`` has is expected.
    """
    loaded = prepare_model(kind, path, converter)
    found = [] if loaded.coverage.mismatched == {} else [f"mismatched: {loaded.coverage.mismatched}"]
    if sorted(loaded.coverage.missing) != expected.missing:
        found.append(f"missing is {sorted(loaded.coverage.missing)[:6]}, not {expected.missing[:6]}")
    if sorted(loaded.coverage.unexpected) != expected.unexpected:
        found.append(f"unexpected is {sorted(loaded.coverage.unexpected)[:6]}, not {expected.unexpected[:6]}")
    if ties_of(loaded.built.model) != ties_of(expected.model):
        found.append(f"ties are {ties_of(loaded.built.model)}, not {ties_of(expected.model)}")
    want = Snapshot.of(expected.model)
    real = Snapshot.of(built).attributes
    want.attributes = {n: real[n] if t.device.type == "meta" else t for n, t in want.attributes.items()}
    if list(loaded.origins.parameters) != list(want.parameters):
        return [*found, "the models have not the same parameters"], 0
    for number, (world, flat) in enumerate((world, flat) for world in WORLDS for flat in (True, False)):
        where = f"world {world}, {'flat' if flat else 'Shard(0)'}"
        options = EXACT if number in (1, 2) else DEFAULT
        found += [f"{where}: {line}" for line in _compare_world(loaded, world, flat, options, want)]
    found += _compare_buffers(loaded, want)
    return found, len(want.state) + len(want.unsaved) + len(want.attributes)


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
    """Read and initialise one rank's shards; yields a line if the reads take too many bytes."""
    parameters = loaded.origins.parameters
    wanted = []
    owned = 0
    for name, layout in layouts.items():
        recipe = parameters[name]
        if isinstance(recipe, Recipe):
            shard = shards[name]
            destination = Destination(name, layout.numel, layout.owned, shard.dtype, direct=True)
            wanted.append((recipe, layout, destination))
            owned += layout.owned * _width(loaded.catalog, recipe)
    plan = join(loaded.catalog, wanted, options)
    _execute(plan, [shards[destination.name] for _, _, destination in wanted])
    allowance = options.gap_floor * sum(read.rows for read in plan.reads)
    if plan.read_bytes > READ_SHARE * owned + allowance:
        yield f"{plan.read_bytes} bytes are read for {owned} owned"
    torch.manual_seed(SEED)
    programs = {name: program for name, program in parameters.items() if isinstance(program, Program)}
    missing = [(program, layouts[name], shards[name]) for name, program in programs.items()]
    models.fill_missing(missing, loaded.origins.start)


def filled(loaded: _Loaded) -> dict[str, torch.Tensor]:
    """Every parameter of a model, whole; its buffers are put in their places."""
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
    """Bytes of an element of the recipe's sources."""
    sources = {str(name) for piece in recipe.pieces for name in piece.source}
    return max((torch_dtype(catalog.tensors[name].dtype).itemsize for name in sources), default=0)


def _execute(plan: Plan, storages: list[torch.Tensor]) -> None:
    done = execute(plan, storages, Progress(plan.read_bytes, shown=False), threads=1)
    assert done == plan.read_bytes


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
    found = dict(model.named_buffers(remove_duplicate=False))
    persistent = {name: tensor for name, tensor in want.state.items() if name in found}
    for name, tensor in {**persistent, **want.unsaved}.items():
        if name not in found:
            yield f"buffer {name} is lacking"
        else:
            yield from _unlike(f"buffer {name}", found[name], tensor)
    for name in found.keys() - persistent.keys() - want.unsaved.keys():
        yield f"buffer {name} is not in the reference"
    attributes = Snapshot.of(model).attributes
    for name, tensor in want.attributes.items():
        if name not in attributes:
            yield f"attribute {name} is lacking"
        else:
            yield from _unlike(f"attribute {name}", attributes[name], tensor)


def _unlike(name: str, got: torch.Tensor, want: torch.Tensor) -> Iterator[str]:
    if got.dtype != want.dtype or got.shape != want.shape or got.device != want.device:
        yield (
            f"{name} is {got.dtype} {tuple(got.shape)} on {got.device}, "
            f"not {want.dtype} {tuple(want.shape)} on {want.device}"
        )
    elif not same_bits(got, want):
        yield f"{name} has {int((got != want).sum())} of {want.numel()} elements wrong"
