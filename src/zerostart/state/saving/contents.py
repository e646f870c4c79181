"""Describe the tensors of a saved model, and map a rank's shards to them.

A loaded model is saved as the tensors that it came from, by the inverse of the recipes of its load. Tensors
without an inverse are saved as the model's library reverts its conversions, or under the model's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zerostart import geometry
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.geometry.layout import Layout
from zerostart.live.model import LiveModel, LoadRecord, LogicalTensor
from zerostart.models import ModelLibrary, library_of
from zerostart.recipe import Recipe, SymbolicTensor, Target, one_thread, spelling
from zerostart.recipe.inverse import find_reversible, invert_pieces
from zerostart.state.saving.writing import Entry, Outgoing


@dataclass
class Contents:
    """The tensors of a checkpoint, and the shards that this rank writes."""

    entries: list[Entry] = field(default_factory=list)
    outgoing: list[Outgoing] = field(default_factory=list)
    #: Tensors saved under the model's own names, and why.
    own_names: dict[str, str] = field(default_factory=dict)
    #: Names that are not saved, since another has the same tensor.
    tied: dict[str, str] = field(default_factory=dict)
    #: Number of the file that a tensor was in.
    before: dict[str, int] = field(default_factory=dict)


def describe_contents(
    live: LiveModel, tensors: Iterable[LogicalTensor], dtype: torch.dtype | None
) -> Contents:
    """Return the checkpoint of ``tensors``, with floating ones in ``dtype`` (None: unchanged)."""
    model, record = live.module, live.record
    left_out = set(library_of(model).unsaved(model))
    by_name = {item.name: item for item in tensors if item.name not in left_out}
    contents = Contents()
    # Three ways, each for the tensors that the ways before it could not map.
    mapped: set[str] = set()
    reasons: dict[str, str] = {}
    # A checkpoint assembled from the shares of ranks has no layout to restore.
    if record is not None and record.catalog.assembled is None:
        reasons = _add_by_recipes(contents, mapped, by_name, record, dtype)
    unmapped = {name: item for name, item in by_name.items() if name not in mapped}
    _add_reverted(contents, mapped, model, unmapped, dtype)
    written_names = {name for name, _, _ in contents.entries}
    for name, item in by_name.items():
        if name in mapped:
            continue
        _add_whole(contents, name, item, dtype)
        if name in reasons or name in written_names:
            contents.own_names[name] = reasons.get(name, "another tensor has its name in the checkpoint")
    return contents


def rename_contents(
    tensors: Iterable[LogicalTensor], renamed: Callable[[str], str], dtype: torch.dtype | None
) -> Contents:
    """Return ``tensors`` in the model's layout, under the names that ``renamed`` gives."""
    contents = Contents()
    for item in tensors:
        _add_whole(contents, renamed(item.name), item, dtype)
    return contents


def _add_whole(contents: Contents, name: str, item: LogicalTensor, dtype: torch.dtype | None) -> None:
    shape, kind = item.shard.layout.shape, _written_dtype(item.shard.storage.dtype, dtype)
    recipe = Recipe(Target(name, shape, kind), geometry.whole(name, shape))
    contents.entries.append((name, spelling(kind, name), shape))
    contents.outgoing.append(Outgoing(recipe, item.shard, item.change))


def _add_by_recipes(
    contents: Contents,
    mapped: set[str],
    by_name: Mapping[str, LogicalTensor],
    record: LoadRecord,
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Add the tensors whose recipes have an inverse; return why the others have none."""
    catalog, recipes = record.catalog, record.recipes
    same = {}
    for name, item in by_name.items():
        recipe = recipes.get(name)
        if recipe is not None and recipe.target.shape == item.shard.layout.shape:
            same[name] = recipe
    backward = find_reversible(same, catalog.tensors)
    # A tensor that was loaded unconverted keeps its name without a reason to report.
    reasons = {n: why for n, why in backward.reasons.items() if recipes[n].converted or recipes[n].computed}
    # A tensor of the files may hold several parameters: its dtype must represent all of them.
    kinds: dict[str, torch.dtype] = {}
    mapped.update(backward.recipes)
    for name, recipe in backward.recipes.items():
        kind = _written_dtype(by_name[name].shard.storage.dtype, dtype)
        for source in dict.fromkeys(str(s) for piece in recipe.pieces for s in piece.source):
            before = kinds.get(source, kind)
            kinds[source] = kind if before == kind else torch.promote_types(before, kind)
        contents.outgoing.append(Outgoing(recipe, by_name[name].shard, by_name[name].change))
    # Recipes of empty tensors have no pieces.
    empty = [n for n, recipe in backward.recipes.items() if not recipe.pieces]
    # In the checkpoint's order, so that all ranks agree and files keep their tensors.
    for name in catalog.tensors:
        if name in kinds:
            contents.entries.append((name, spelling(kinds[name], name), catalog.tensors[name].shape))
            contents.before[name] = catalog.tensors[name].file
    for name in empty:
        item = by_name[name]
        kind = _written_dtype(item.shard.storage.dtype, dtype)
        contents.entries.append((name, spelling(kind, name), item.shard.layout.shape))
    return reasons


def _add_reverted(
    contents: Contents,
    mapped: set[str],
    model: nn.Module,
    unmapped: Mapping[str, LogicalTensor],
    dtype: torch.dtype | None,
) -> None:
    """Add the tensors of ``rest`` that the library's ``save_pretrained`` would convert."""
    library = library_of(model)
    if not unmapped or type(library).revert is ModelLibrary.revert:  # the library reverts nothing
        return
    shapes = {name: item.shard.layout.shape for name, item in unmapped.items()}
    # The library's code runs on symbols instead of values; the result records where each element went.
    with one_thread():
        symbols: dict[str, torch.Tensor] = {
            name: SymbolicTensor.of(name, shape, _written_dtype(unmapped[name].shard.storage.dtype, dtype))
            for name, shape in shapes.items()
        }
        try:
            reverted = library.revert(model, symbols)
        except Exception:  # conversions are third-party code and may raise anything
            return
    written_names = {name for name, _, _ in contents.entries}
    files = {
        name: (tuple(tensor.shape), tensor.value.pieces)
        for name, tensor in reverted.items()
        if isinstance(tensor, SymbolicTensor) and name not in written_names
    }
    # Only arrangements of elements have an inverse; computed tensors are saved under the model's names.
    back = invert_pieces(files, shapes)
    used: set[str] = set()
    mapped.update(back)
    for name, pieces in back.items():
        item = unmapped[name]
        kind = _written_dtype(item.shard.storage.dtype, dtype)
        recipe = Recipe(Target(name, shapes[name], kind), pieces)
        contents.outgoing.append(Outgoing(recipe, item.shard, item.change))
        used.update(str(s) for piece in pieces for s in piece.source)
    contents.entries += [
        (n, spelling(reverted[n].dtype, n), shape) for n, (shape, _) in files.items() if n in used
    ]


def _written_dtype(current: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and current.is_floating_point else current


@dataclass(frozen=True)
class TensorOverrides:
    """Values that are saved instead of those of parameters."""

    #: This rank's share of each value, by the parameter's first name.
    shards: Mapping[str, Shard]
    #: First name of each tied name.
    ties: Mapping[str, str]


def apply_overrides(
    tensors: Sequence[LogicalTensor], overrides: TensorOverrides, world: World
) -> list[LogicalTensor]:
    """Replace the shards of tensors that any rank has an override for; collective."""
    firsts = [overrides.ties.get(item.name, item.name) for item in tensors]
    # A rank may hold no element of a master that another rank holds whole.
    mine = torch.tensor([name in overrides.shards for name in firsts], dtype=torch.int64, device="cpu")
    holders = world.all_reduce_sum(mine, "collecting the overrides").tolist()
    return [
        replace(item, shard=overrides.shards.get(name, _empty_shard(item.shard))) if count else item
        for item, name, count in zip(tensors, firsts, holders, strict=True)
    ]


def _empty_shard(shard: Shard) -> Shard:
    layout = Layout(shard.layout.shape, 0, 0, ())
    return Shard(shard.name, layout, torch.empty(0, dtype=torch.float32, device="cpu"), lambda _: layout)
