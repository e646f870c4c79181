"""Which refitter serves a target."""

from __future__ import annotations

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.state.refitting.directory import directory_of
from zerostart.state.refitting.publisher import NAME, DirectoryRefitter
from zerostart.state.refitting.refitter import RefitSettings, Refitter
from zerostart.state.refitting.resharding import ModelRefitter
from zerostart.state.refitting.targets import Engines, driver_of
from zerostart.state.refitting.within import Within


def begin(
    model: nn.Module, target: object, settings: RefitSettings
) -> Refitter | ModelRefitter | DirectoryRefitter:
    """The refitter of ``model`` for ``target``; collective. Raises as ``zerostart.refit``."""
    world = current_world()
    # An engine's module may be a module, too; a model to train has no loader of its own.
    is_model = isinstance(target, nn.Module) and not hasattr(target, "load_weights")
    # A model may be on some of the ranks alone, and then the others pass None.
    if any(world.all_gather_object(is_model, "beginning a refit")):
        with world.phase("beginning a refit"):
            if not (target is None or isinstance(target, nn.Module)):
                raise ConfigError(
                    f"target is a {type(target).__name__} on rank {world.rank} and a model on others: pass "
                    "the model, or None on ranks that hold nothing of it"
                )
        return ModelRefitter(model, target, settings, world)
    directory = directory_of(target)
    if directory is not None and settings.transport in (None, NAME):
        return DirectoryRefitter(model, directory, settings, world)
    if directory is not None or settings.transport == NAME:
        raise ConfigError(
            f"transport={settings.transport!r} does not go with target={target!r}: versions travel by files "
            "where the target is file:///directory, and nowhere else"
        )
    with world.phase("looking at the target"):
        driver = driver_of(target) or Within.of(target)  # an address of an engine's server is a text
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
