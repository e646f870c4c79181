"""The tensors of a saved model: their names, dtypes and shapes, and where a rank's shards go in them.

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


def contents_of(live: LiveModel, tensors: Iterable[LogicalTensor], dtype: torch.dtype | None) -> Contents:
    """Return the checkpoint of ``tensors`` of a model, floating ones in ``dtype`` (None: their own)."""
    model, record = live.module, live.record
    left_out = set(library_of(model).unsaved(model))
    wanted = {item.name: item for item in tensors if item.name not in left_out}
    contents = Contents()
    # Three ways, each for the rest of the one before.
    done: set[str] = set()
    reasons: dict[str, str] = {}
    # The shares of a training checkpoint are no layout to go back to.
    if record is not None and record.catalog.assembled is None:
        reasons = _as_loaded(contents, done, wanted, record, dtype)
    rest = {name: item for name, item in wanted.items() if name not in done}
    _as_reverted(contents, done, model, rest, dtype)
    taken = {name for name, _, _ in contents.entries}
    for name, item in wanted.items():
        if name in done:
            continue
        shape = item.shard.layout.shape
        kind = _out(item.shard.storage.dtype, dtype)
        recipe = Recipe(Target(name, shape, kind), geometry.whole(name, shape))
        contents.entries.append((name, spelling(kind, name), shape))
        contents.outgoing.append(Outgoing(recipe, item.shard, item.change))
        if name in reasons or name in taken:
            contents.own_names[name] = reasons.get(name, "its name in the checkpoint is taken")
    return contents


def renamed_contents(
    tensors: Iterable[LogicalTensor], renamed: Callable[[str], str], dtype: torch.dtype | None
) -> Contents:
    """Return ``tensors`` in the model's layout, under the names that ``renamed`` gives."""
    contents = Contents()
    for item in tensors:
        name, kind = renamed(item.name), _out(item.shard.storage.dtype, dtype)
        shape = item.shard.layout.shape
        contents.entries.append((name, spelling(kind, item.name), shape))
        recipe = Recipe(Target(name, shape, kind), geometry.whole(name, shape))
        contents.outgoing.append(Outgoing(recipe, item.shard, item.change))
    return contents


def _as_loaded(
    contents: Contents,
    done: set[str],
    wanted: Mapping[str, LogicalTensor],
    record: LoadRecord,
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Add the tensors whose recipes have an inverse; return why the others have none."""
    catalog, recipes = record.catalog, record.recipes
    same = {}
    for name, item in wanted.items():
        recipe = recipes.get(name)
        if recipe is not None and recipe.target.shape == item.shard.layout.shape:
            same[name] = recipe
    found = find_reversible(same, catalog.tensors)
    # What was loaded under its own name needs no recipe backwards; only a converted one can lose its layout.
    reasons = {n: why for n, why in found.reasons.items() if recipes[n].converted or recipes[n].computed}
    # One tensor of the files may be put together of several parameters: it has the dtype that holds them all.
    kinds: dict[str, torch.dtype] = {}
    done.update(found.recipes)
    for name, recipe in found.recipes.items():
        kind = _out(wanted[name].shard.storage.dtype, dtype)
        for source in dict.fromkeys(str(s) for piece in recipe.pieces for s in piece.source):
            before = kinds.get(source, kind)
            kinds[source] = kind if before == kind else torch.promote_types(before, kind)
        contents.outgoing.append(Outgoing(recipe, wanted[name].shard, wanted[name].change))
    # What has no elements is in no piece, and yet a tensor of the checkpoint.
    empty = [n for n, recipe in found.recipes.items() if not recipe.pieces]
    # In the checkpoint's own order, so that all ranks have the entries in one order, and files come out as
    # they were.
    for name in catalog.tensors:
        if name in kinds:
            contents.entries.append((name, spelling(kinds[name], name), catalog.tensors[name].shape))
            contents.before[name] = catalog.tensors[name].file
    for name in empty:
        item = wanted[name]
        kind = _out(item.shard.storage.dtype, dtype)
        contents.entries.append((name, spelling(kind, name), item.shard.layout.shape))
    return reasons


def _as_reverted(
    contents: Contents,
    done: set[str],
    model: nn.Module,
    rest: Mapping[str, LogicalTensor],
    dtype: torch.dtype | None,
) -> None:
    """Add those of the ``rest`` that the library's ``save_pretrained`` would convert."""
    library = library_of(model)
    if not rest or type(library).revert is ModelLibrary.revert:  # it has no way back of its own
        return
    shapes = {name: item.shard.layout.shape for name, item in rest.items()}
    # The library's own code is run on symbols instead of values: what comes out says which element went
    # where, and taken backwards that is the recipe.
    with one_thread():
        symbols: dict[str, torch.Tensor] = {
            name: SymbolicTensor.of(name, shape, _out(rest[name].shard.storage.dtype, dtype))
            for name, shape in shapes.items()
        }
        try:
            made = library.revert(model, symbols)
        except Exception:  # the conversions are the library's and the model's: whatever they raise
            return
    taken = {name for name, _, _ in contents.entries}
    files = {
        name: (tuple(tensor.shape), tensor.value.pieces)
        for name, tensor in made.items()
        if isinstance(tensor, SymbolicTensor) and name not in taken
    }
    # Only what is a plain arrangement of elements can be inverted: where the library calculates, the tensor
    # is left to the third way.
    back = invert_pieces(files, shapes)
    used: set[str] = set()
    done.update(back)
    for name, pieces in back.items():
        item = rest[name]
        kind = _out(item.shard.storage.dtype, dtype)
        recipe = Recipe(Target(name, shapes[name], kind), pieces)
        contents.outgoing.append(Outgoing(recipe, item.shard, item.change))
        used.update(str(s) for piece in pieces for s in piece.source)
    contents.entries += [
        (n, spelling(made[n].dtype, n), shape) for n, (shape, _) in files.items() if n in used
    ]


def _out(held: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and held.is_floating_point else held


@dataclass(frozen=True)
class TensorOverrides:
    """Values that stand for those of parameters."""

    #: This rank's share of each, by its first name.
    shards: Mapping[str, Shard]
    #: The first name of every other one.
    ties: Mapping[str, str]


def overridden(
    tensors: Sequence[LogicalTensor], overrides: TensorOverrides, world: World
) -> list[LogicalTensor]:
    """Replace the shards of tensors that any rank has an override for; collective."""
    firsts = [overrides.ties.get(item.name, item.name) for item in tensors]
    # A rank may have no element of a master of which others have all.
    mine = torch.tensor([name in overrides.shards for name in firsts], dtype=torch.int64, device="cpu")
    holders = world.all_reduce_sum(mine, "looking for what is saved instead").tolist()
    return [
        replace(item, shard=overrides.shards.get(name, _nothing(item.shard))) if count else item
        for item, name, count in zip(tensors, firsts, holders, strict=True)
    ]


def _nothing(shard: Shard) -> Shard:
    layout = Layout(shard.layout.shape, 0, 0, ())
    return Shard(shard.name, layout, torch.empty(0, dtype=torch.float32, device="cpu"), lambda _: layout)
