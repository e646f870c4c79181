"""Models that have no checkpoint: what their own initialisation does, as programs to be run in shards.

The whole construction runs on meta under the log, with everything that it draws: so the programs give what
the unsharded model has after the same ``torch.manual_seed``, and leave the generator as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.errors import BuildError, ConfigError
from zerostart.models.aliases import Aliases
from zerostart.models.build import explained
from zerostart.models.initialise import Program, program_of
from zerostart.models.library import Built
from zerostart.models.operator_log import OperatorLog
from zerostart.models.origins import Origins, fill_plain_tensors, keep_dtypes, program_for, resolve_origins
from zerostart.models.registry import library_of, maker_of
from zerostart.models.tensors import recast, replace_tensor, state_names
from zerostart.recipe import Coverage, Recipes, Target, matched, symbols_of
from zerostart.upstream.transformers.models import initialising


def import_model(model: object) -> None:
    """Import what building ``model`` needs, as far as that is known. Raises as ``build_fresh`` does."""
    if not isinstance(model, (nn.Module, Built)):
        maker_of(model, None)


def build_fresh(model: object, asked: torch.dtype | None, dtype: torch.dtype | None) -> Built:
    """Build ``model``, a configuration, class or callable, as it initialises itself; or a module on meta.

    ``asked`` is torch's default dtype meanwhile, None: the configuration's, else as it is. ``dtype`` is in
    the end that of the model as a whole, None: as built. One that is ``Built`` already is left as it is.
    Raises BuildError or ConfigError.
    """
    if isinstance(model, Built):
        return model
    # No construction to follow: nothing is in its log, and whatever it lacks has to come from its own
    # initialiser.
    if isinstance(model, nn.Module):
        return Built(model, OperatorLog(), dtype, False, library_of(model))
    make, own = maker_of(model, asked)
    name, log, state = getattr(make, "__name__", repr(make)), OperatorLog(), torch.get_rng_state()
    with initialising(asked or own or torch.get_default_dtype()), log, explained(name):
        made = make()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model={name} returned a {type(made).__name__}, not a torch.nn.Module")
    # On meta draws leave the generator alone; so whoever has moved it has drawn real numbers, or seeded.
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise BuildError(
            f"{name} draws random numbers on the CPU by name, or seeds the CPU's generator, in its "
            "constructor: its weights would differ from the unsharded model's. Let it draw on "
            "torch's default device and seed before the load, or build the module yourself and "
            "pass it"
        )
    return Built(made, log, dtype, True, library_of(made))


def fresh_origins(built: Built, aliases: Aliases) -> Origins:
    """A program for each parameter, and for each buffer with a random value; other values are computed.

    Raises BuildError, with the names, for what nothing gives a value.
    """
    model = built.model
    if not built.logged:
        return resolve_origins(built, Recipes({}, Coverage()), aliases)
    drawn: dict[str, Program] = {}
    # By identity: a buffer that is registered twice is one afterwards, too.
    real: dict[int, torch.Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if id(buffer) not in real:
            real[id(buffer)] = _value(built, name, buffer, drawn)
        replace_tensor(model, name, real[id(buffer)])
    parameters = {name: program_for(built, name, p) for name, p in model.named_parameters()}
    aliases.follow(model)
    fill_plain_tensors(built, aliases, _refuse_draws(built))
    names = tuple(name for name, _, _ in state_names(model))
    return Origins(dict(parameters), {}, names, 0, drawn)


def _value(built: Built, name: str, buffer: torch.Tensor, drawn: dict[str, Program]) -> torch.Tensor:
    """A buffer off meta: empty where it has a program, which is added to ``drawn``."""
    if buffer.device.type != "meta":
        return buffer
    if built.log.draws(buffer):
        program = program_of(buffer, built.log)
        assert program is not None, "what draws gives values"
        drawn[name] = program
    elif any(built.log.writers(buffer)):
        (value,) = built.log.values([buffer], torch.device("cpu"))
        return value
    # Empty as far as anybody may ask: its program fills it in its turn among the parameters' draws.
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def _refuse_draws(built: Built) -> Callable[[str, torch.Tensor], None]:
    def check(path: str, tensor: torch.Tensor) -> None:
        if built.log.draws(tensor):
            raise BuildError(
                f"{path} is a random tensor that is not registered, so a start without a checkpoint "
                "cannot draw it in the right order; register it as a buffer"
            )

    return check


def has_values(model: object) -> bool:
    """Whether ``model`` is a module with a parameter, or without any a buffer, that is not on meta."""
    if not isinstance(model, nn.Module):
        return False
    held: list[torch.Tensor] = [*model.parameters()] or [*model.buffers()]
    return any(tensor.device.type != "meta" for tensor in held)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """``(name, tensor, is a buffer)`` of every parameter and buffer once, those not in the state dict too."""
    for name, parameter in model.named_parameters():
        yield name, parameter, False
    for name, buffer in model.named_buffers():
        yield name, buffer, True


class Taken:
    """The parameters of a module, which has others on meta in their place from here on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._old: dict[str, nn.Parameter] = {}
        new: dict[int, torch.Tensor] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            self._old[name] = parameter
            if id(parameter) not in new:
                new[id(parameter)] = recast(parameter, parameter.dtype)
            replace_tensor(model, name, new[id(parameter)])

    def give_back(self) -> None:
        """Put the parameters back, unless they are to be freed by now."""
        for name, parameter in self._old.items():
            replace_tensor(self._model, name, parameter)

    def release(self) -> None:
        """Keep them alive no longer."""
        self._old.clear()


def existing_recipes(built: Built, catalog: Catalog) -> Recipes:
    """Each parameter and buffer as it is, ties once; a dtype that the model is to have is a cast.

    Raises CheckpointError for a dtype that torch does not have, ConversionError as ``matched`` does.
    """
    kept = [] if built.dtype is None else built.library.dtype_plan(built.model, built.dtype)
    targets = {}
    for name, tensor, buffer in named_tensors(built.model):
        held = () if buffer or not tensor.is_floating_point() else kept
        dtype = next((other for pattern, other in held if pattern.search(name)), tensor.dtype)
        targets[name] = Target(name, tuple(tensor.shape), dtype, buffer)
    return matched(symbols_of(catalog), targets)


def existing_origins(built: Built, recipes: Recipes) -> Origins:
    """Everything is there: nothing is tied anew, initialised or computed."""
    keep_dtypes(built.model, recipes)
    found, model = recipes.by_name, built.model
    buffers = {name: found[name] for name, _ in model.named_buffers()}
    return Origins({name: found[name] for name, _ in model.named_parameters()}, buffers, ())
