"""Which refitter serves a target."""

from __future__ import annotations

from dataclasses import fields

from torch import nn

from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError
from zerostart.state.refitting.directory import directory_of
from zerostart.state.refitting.local import NAME as LOCAL
from zerostart.state.refitting.local import LocalRefitter
from zerostart.state.refitting.publisher import NAME, DirectoryRefitter
from zerostart.state.refitting.pushes import RefitSettings
from zerostart.state.refitting.receiver import Receiver
from zerostart.state.refitting.refitter import Refitter
from zerostart.state.refitting.targets import Driver, Engines, driver_of


def begin(
    model: nn.Module, target: object, settings: RefitSettings
) -> Refitter | LocalRefitter | DirectoryRefitter:
    """The refitter of ``model`` for ``target``; collective. Raises as ``zerostart.refit``."""
    world = current_world()
    _compare(settings, world)
    directory = directory_of(target)
    if directory is not None and settings.transport in (None, NAME):
        return DirectoryRefitter(model, directory, settings, world)
    if directory is not None or settings.transport == NAME:
        raise ConfigError(
            f"transport={settings.transport!r} does not go with target={target!r}: versions travel by files "
            "where the target is file:///directory, and nowhere else"
        )
    with world.phase("looking at the target"):
        driver = driver_of(target)  # an address of an engine's server is a text
        within = _within(target, driver, settings)
    # A part of the target may be in some of the ranks alone, and then the others pass None.
    kinds = world.all_gather_object(
        "none" if target is None else "other" if within is None else type(within).__name__, "a target"
    )
    if any(kind not in ("none", "other") for kind in kinds):
        with world.phase("beginning a refit"):
            if kinds[world.rank] == "other":
                raise ConfigError(
                    f"target is a {type(target).__name__} on rank {world.rank}, and a model, or an engine "
                    "within the rank, on others: pass that, or None on ranks that have nothing of it"
                )
        return LocalRefitter(model, within, driver, settings, world)
    with world.phase("looking at the target"):
        engines = Engines.of(target, driver, world)
    if engines is not None:
        return Refitter(model, engines, settings)
    if target is None or isinstance(target, str):
        return Refitter(model, target, settings)
    raise ConfigError(
        f"target is a {type(target).__name__}, which no engine is known by: pass an address for its workers "
        "to connect with by zerostart.serving.serve, register it with zerostart.serving.register_target, or "
        "pass a module with load_weights, a zerostart.serving.Receiver of it, or another sharded model"
    )


def _compare(settings: RefitSettings, world: World) -> None:
    """Raise ConfigError where ranks were given different arguments; collective."""
    # The secret is rank 0's affair, and told nobody.
    names = [field.name for field in fields(settings) if field.name != "secret"]
    ranks = world.all_gather_object([getattr(settings, name) for name in names], "comparing the arguments")
    for rank, given in enumerate(ranks):
        for name, first, other in zip(names, ranks[0], given, strict=True):
            if first != other:
                raise ConfigError(
                    f"{name}={first!r} on rank 0, but {name}={other!r} on rank {rank}: call zerostart.refit "
                    "with the same arguments on every rank"
                )


def _within(target: object, driver: Driver | None, settings: RefitSettings) -> nn.Module | Receiver | None:
    """What lives in this very rank: a model, or the worker of an engine; None for any other target."""
    if isinstance(target, Receiver):
        return target
    if driver is None and isinstance(target, nn.Module):
        # An engine's module has a loader of its own; a model to train has none.
        return Receiver(target) if callable(getattr(target, "load_weights", None)) else target
    # Its workers can be told to connect, too, where that is what is asked for.
    worker = getattr(driver, "worker", None)
    return worker() if worker is not None and settings.transport in (None, LOCAL) else None
