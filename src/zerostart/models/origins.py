"""Find a source for every tensor: the checkpoint, a tie, or an initialiser.

This happens on meta before sharding. The log has the calls of constructors and initialisers, so buffers get
values here, and missing parameters get programs that run in shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from zerostart.errors import BuildError
from zerostart.models.aliases import (
    Aliases,
    find_owner,
    find_tensor_slots,
    recast,
    replace_all,
    replace_tensor,
    state_names,
)
from zerostart.models.initialise import Program, find_program
from zerostart.models.library import Built
from zerostart.recipe import Coverage, Recipe, Recipes, SymbolicTensor

#: True if two state-dict names hold equal bytes in the checkpoint, equal on every rank.
Equal = Callable[[Recipe, Recipe], bool]


@dataclass(frozen=True)
class Origins:
    """Sources of each unique parameter and each loaded buffer."""

    #: In the order of ``named_parameters``.
    parameters: dict[str, Recipe | Program]
    #: Buffers from the checkpoint; the others already have values on the CPU.
    buffers: dict[str, Recipe]
    initialised: tuple[str, ...]
    #: Position in the log where the model's initialiser starts; None without one.
    start: int | None = None
    #: Buffers with random values, drawn in turn with the parameters.
    random_buffers: dict[str, Program] = field(default_factory=dict)


def tie_names(built: Built, recipes: Recipes, equal: Equal) -> Coverage:
    """Tie the model's names, and return what is still missing.

    As in transformers, the name in the checkpoint keeps its tensor. If both names are there, they are tied
    only if their tensors are equal. Recipes that a tie makes superfluous are dropped.
    """
    model, library, present = built.model, built.library, recipes.by_name
    # Both names are in the checkpoint: tie them only if they are equal.
    for name, source in list(library.ties(model).items()):
        if name in present and source in present:
            if equal(present[name], present[source]):
                del present[name]
            else:
                library.untie(model, name, source)
    library.tie(model, {name for name, _, _ in state_names(model)} - present.keys())
    tensors = {name: tensor for name, tensor, _ in state_names(model)}
    supplied = {id(tensor) for name, tensor in tensors.items() if name in present}
    before = recipes.coverage
    lacking = tuple(
        name
        for name in library.lacking(model, before)
        if name not in present and name not in before.mismatched and id(tensors.get(name)) not in supplied
    )
    coverage = Coverage(lacking, before.unexpected, before.mismatched, before.ignored)
    return coverage.ignoring(*library.ignorable(model))


def resolve_origins(built: Built, recipes: Recipes, aliases: Aliases) -> Origins:
    """Give buffers values, and missing parameters programs.

    ``aliases`` are updated with them. Raises BuildError, with names, for values that cannot be computed.
    """
    model = built.model
    keep_dtypes(model, recipes)
    sources: dict[int, Recipe] = {}
    for name, tensor, _ in state_names(model):
        if name in recipes.by_name:
            # A tied tensor is filled once, by its first name.
            sources.setdefault(id(tensor), recipes.by_name[name])
    loaded_buffers = _prepare_buffers(built, recipes)
    missing = {name: p for name, p in model.named_parameters() if id(p) not in sources}
    for parameter in model.parameters():
        if id(parameter) in sources:
            built.library.mark_loaded(parameter)
    # Calls logged from here on are the initialiser's.
    start = len(built.log.ops) if built.library.initialiser(model) is not None else None
    aliases.follow(model)  # An initialiser may use them.
    _run_initialiser(built, missing)
    parameters: dict[str, Recipe | Program] = {}
    for name, parameter in model.named_parameters():
        recipe = sources.get(id(parameter))
        parameters[name] = recipe if recipe is not None else require_program(built, name, parameter)
    aliases.follow(model)
    # Last: attributes may be computed from parameters and buffers.
    fill_plain_tensors(built, aliases)
    filled = {id(dict(model.named_buffers())[name]) for name in loaded_buffers}
    initialised = (
        *missing,
        *(n for n, t, buffer in state_names(model) if buffer and id(t) not in filled),
    )
    return Origins(parameters, loaded_buffers, initialised, start)


def keep_dtypes(model: nn.Module, recipes: Recipes) -> None:
    """Give loaded parameters the dtypes of their recipes."""
    candidates = [(t, recipes.by_name.get(n)) for n, t, buffer in state_names(model) if not buffer]
    dtypes = {id(t): recipe.target.dtype for t, recipe in reversed(candidates) if recipe is not None}
    named = model.named_parameters(remove_duplicate=False)
    to_cast = [(name, p) for name, p in named if dtypes.get(id(p), p.dtype) != p.dtype]
    replace_all(model, to_cast, lambda _, parameter: recast(parameter, dtypes[id(parameter)]))


def _prepare_buffers(built: Built, recipes: Recipes) -> dict[str, Recipe]:
    """Take buffers off meta; return the recipes of filled ones.

    Buffers without recipe get the constructor's values. A buffer with several names is filled if the
    checkpoint has any of them.
    """
    model = built.model
    named = list(model.named_buffers(remove_duplicate=False))
    sources = {id(t): recipes.by_name[name] for name, t in named if name in recipes.by_name}
    loaded: dict[str, Recipe] = {}
    unknown: list[str] = []

    def make_real(name: str, buffer: torch.Tensor) -> torch.Tensor:
        recipe = sources.get(id(buffer))
        value = make_buffer(built, name, buffer, recipe is not None, unknown)
        if recipe is not None:
            loaded[name] = recipe
            built.library.mark_loaded(value)
        return value

    replace_all(model, named, make_real)
    if unknown:
        raise BuildError(
            f"the values of {len(unknown)} buffers are lost, since the module was built on the meta device: "
            f"{', '.join(unknown[:8])}. Pass model= as a class or a callable, so that they can be computed"
        )
    return loaded


def make_buffer(
    built: Built, name: str, buffer: torch.Tensor, filled: bool, unknown: list[str]
) -> torch.Tensor:
    """Return a real buffer; ``filled`` ones have no values yet."""
    if buffer.device.type != "meta":
        return buffer
    if not filled and any(built.log.writers(buffer)):
        (value,) = built.log.values([buffer], torch.device("cpu"))
        return value
    if not filled and built.library.initialiser(built.model) is None:
        unknown.append(name)
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def _run_initialiser(built: Built, missing: dict[str, nn.Parameter]) -> None:
    initialise = built.library.initialiser(built.model)
    if initialise is not None:
        with _set_aliases_aside(built), built.log:
            initialise()
    elif not built.logged:
        for owner in dict.fromkeys(find_owner(built.model, name)[0] for name in missing):
            reset = getattr(owner, "reset_parameters", None)
            if callable(reset):
                with torch.no_grad(), built.log:
                    reset()


@contextlib.contextmanager
def _set_aliases_aside(built: Built) -> Iterator[None]:
    aside: dict[str, nn.Parameter] = {}
    model, library = built.model, built.library
    for name in library.ties(model):
        owner, leaf = find_owner(model, name)
        parameter = owner._parameters.get(leaf)
        if parameter is not None:
            aside[name] = parameter
            # Marked as loaded, so that the initialiser skips it and draws nothing for it.
            stand_in = recast(parameter, parameter.dtype)
            library.mark_loaded(stand_in)
            replace_tensor(model, name, stand_in)
    try:
        yield
    finally:
        for name, parameter in aside.items():
            replace_tensor(model, name, parameter)


def require_program(built: Built, name: str, parameter: nn.Parameter) -> Program:
    """Return the program of a parameter without recipe.

    Raises BuildError, with the name, if there is none.
    """
    if not parameter.numel():
        return Program(parameter, parameter.detach(), built.log, ())
    program = find_program(parameter, built.log)
    if program is None:
        owner = type(find_owner(built.model, name)[0]).__name__
        raise BuildError(
            f"{name} is not in the checkpoint and cannot be initialised: {owner} has no "
            "initialiser that sets it. Pass model= as a class or a callable, or supply the tensor"
        )
    return program


def fill_plain_tensors(
    built: Built, aliases: Aliases, check: Callable[[str, torch.Tensor], None] = lambda path, tensor: None
) -> None:
    """Give unregistered meta tensors the values that the constructor computed.

    ``check`` receives each with its path. Raises BuildError, with names, for lost values.
    """
    followers = aliases.without_values()
    places = [(slot, slot.get()) for slot in find_tensor_slots(built.model)]
    symbolic = [slot.path for slot, t in places if isinstance(t, SymbolicTensor)]
    if symbolic:
        raise BuildError(
            f"while loading, {type(built.model).__name__} stores tensors of the checkpoint in "
            f"{', '.join(symbolic[:8])}, whose values are not there yet. Register them as buffers, or "
            "leave them out of the source and set them after the load"
        )
    waiting = [(slot, t) for slot, t in places if t.is_meta and id(t) not in followers and not slot.hidden]
    unknown = [slot.path for slot, t in waiting if not any(built.log.writers(t))]
    if unknown:
        raise BuildError(
            f"{len(unknown)} tensor attributes lost their values on the meta device: {', '.join(unknown[:8])}"
            ". Pass model= as a class or a callable, so that they can be computed"
        )
    for slot, t in waiting:
        check(slot.path, t)
    values = built.log.values([t for _, t in waiting], torch.device("cpu"))
    value_of = {id(t): value for (_, t), value in zip(waiting, values, strict=True)}
    for slot, t in waiting:
        slot.set(value_of[id(t)])
