"""What a model is in files: the names, types and shapes of a checkpoint, and where a rank's share of it goes.

A model that zerostart has loaded goes back into the tensors that it came from, by the recipes of its load
taken backwards. What has no recipe that can be (it was initialised, calculated, or changed since) goes the
way that its library reverts conversions, which is traced like any other; and what has no such way, under
the model's own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zerostart import geometry
from zerostart.distributed.world import World
from zerostart.engines import Shard, first_rank_shard, plain_name
from zerostart.live.parts import live_shards
from zerostart.live.record import LoadRecord
from zerostart.live.shards import with_whole
from zerostart.models import ModelLibrary, library_of, state_names
from zerostart.recipe import Recipe, SymbolicTensor, Target, one_thread, spelling
from zerostart.recipe.inverse import inverted, reversal
from zerostart.state.saving.writing import Entry, Outgoing
from zerostart.transfer.writing import Change


@dataclass(frozen=True)
class Held:
    """One logical tensor of a live model: its name as it was loaded, and this rank's share.

    ``given`` is its name now; ``trained`` says whether it is a ``parameter`` that takes gradients; ``change``
    is as in ``Outgoing``.
    """

    name: str
    given: str
    shard: Shard
    parameter: bool
    trained: bool
    change: Change | None = None


@dataclass
class Contents:
    """The tensors of a checkpoint, and what this rank writes of them.

    ``own_names`` are the tensors that are saved under the model's own names, and why; ``tied`` the names that
    are not saved, since another has the same tensor; ``before`` the number of the file that a tensor was in.
    """

    entries: list[Entry] = field(default_factory=list)
    outgoing: list[Outgoing] = field(default_factory=list)
    own_names: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)


def held_tensors(
    model: nn.Module, record: LoadRecord | None, world: World
) -> tuple[list[Held], dict[str, str]]:
    """The parameters and persistent buffers of ``model``, ties once, and which name follows which.

    In the order of the state dict. Raises EngineError for what is no one tensor, or lies as nobody knows.
    """
    shards = with_whole(model, live_shards(model, world), world)
    recipes = record.recipes if record is not None else {}
    followers = set(library_of(model).ties(model))
    chosen: dict[int, str] = {}
    named = list(state_names(model))
    for given, tensor, _ in named:
        before = chosen.get(id(tensor))
        # The name that it was loaded under, then one that follows no other, then the first.
        if (
            before is None
            or (plain_name(before) not in recipes and plain_name(given) in recipes)
            or (before in followers and given not in followers and plain_name(before) not in recipes)
        ):
            chosen[id(tensor)] = given
    found, tied = [], {}
    for given, tensor, _ in named:
        kept = chosen[id(tensor)]
        if kept != given:
            tied[plain_name(given)] = plain_name(kept)
        else:
            parameter = isinstance(tensor, nn.Parameter)
            trained = parameter and tensor.requires_grad
            # Ranks may have buffers with other values (statistics of their batches): the first's count.
            shard = shards[given] if parameter else first_rank_shard(given, tensor, world)
            found.append(Held(plain_name(given), given, shard, parameter, trained))
    return found, tied


def contents_of(
    model: nn.Module, held: Iterable[Held], record: LoadRecord | None, dtype: torch.dtype | None
) -> Contents:
    """The checkpoint that ``held`` of ``model`` makes, its floating tensors in ``dtype`` (None: as held)."""
    left_out = set(library_of(model).unsaved(model))
    wanted = {item.name: item for item in held if item.name not in left_out}
    contents = Contents()
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
    held: Iterable[Held], renamed: Callable[[str], str], dtype: torch.dtype | None
) -> Contents:
    """``held`` as it lies in the model, under the names that ``renamed`` gives for the model's own."""
    contents = Contents()
    for item in held:
        name, kind = renamed(item.name), _out(item.shard.storage.dtype, dtype)
        shape = item.shard.layout.shape
        contents.entries.append((name, spelling(kind, item.name), shape))
        recipe = Recipe(Target(name, shape, kind), geometry.whole(name, shape))
        contents.outgoing.append(Outgoing(recipe, item.shard, item.change))
    return contents


def _as_loaded(
    contents: Contents,
    done: set[str],
    wanted: Mapping[str, Held],
    record: LoadRecord,
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Put back what the recipes of the load can be taken backwards for; gives why the others cannot."""
    catalog, recipes = record.catalog, record.recipes
    same = {}
    for name, item in wanted.items():
        recipe = recipes.get(name)
        if recipe is not None and recipe.target.shape == item.shard.layout.shape:
            same[name] = recipe
    found = reversal(same, catalog.tensors)
    # An elementwise name is as good as it was: only what was converted can be said to have lost its layout.
    reasons = {n: why for n, why in found.reasons.items() if recipes[n].converted or recipes[n].computed}
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
    rest: Mapping[str, Held],
    dtype: torch.dtype | None,
) -> None:
    """Name and lay out the ``rest`` as the library's ``save_pretrained`` would, where that is known."""
    library = library_of(model)
    if not rest or type(library).revert is ModelLibrary.revert:  # it has no way back of its own
        return
    shapes = {name: item.shard.layout.shape for name, item in rest.items()}
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
    back = inverted(files, shapes)
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
    """The dtype in the files of a tensor that is held in another."""
    return dtype if dtype is not None and held.is_floating_point else held
