"""Which refitter serves a target."""

from __future__ import annotations

from torch import nn

from zerostart.errors import ConfigError

# Registers itself.
from zerostart.state.refitting.refitter import RefitSettings, Refitter
from zerostart.state.refitting.targets import driver_of


def begin(model: nn.Module, target: object, settings: RefitSettings) -> Refitter:
    """The refitter of ``model`` for ``target``; collective. Raises as ``zerostart.refit``."""
    # An address of an engine's server is a text, too.
    if (driver := driver_of(target)) is not None:
        return Refitter(model, driver, settings)
    if target is None or isinstance(target, str):
        return Refitter(model, target, settings)
    raise ConfigError(
        f"target is a {type(target).__name__}, which no engine is known by: pass an address for its "
        f"workers to "
        "connect with by zerostart.serving.serve, or register it with zerostart.serving.register_target"
    )
