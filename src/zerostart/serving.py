"""The engine's side of a refit: what a worker's process needs to take weights from a trainer.

    from zerostart import serving
    serving.serve(serving.Receiver(model), "unix:///run/trainer/workers")

``model`` is any module with a ``load_weights`` that takes names and tensors as a checkpoint has them.
Importing this loads torch and no other library. See ``docs/refit.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostart.state.refitting.connection import Closed, Connection, serve
    from zerostart.state.refitting.receiver import EngineWeights, Receiver
    from zerostart.state.refitting.targets import Driver, register_target
    from zerostart.state.refitting.transports.base import register_transport

__all__ = [
    "Closed",
    "Connection",
    "Driver",
    "EngineWeights",
    "Receiver",
    "register_target",
    "register_transport",
    "serve",
]

_HOMES = {
    "Closed": "connection",
    "Connection": "connection",
    "Driver": "targets",
    "EngineWeights": "receiver",
    "Receiver": "receiver",
    "register_target": "targets",
    "register_transport": "transports.base",
    "serve": "connection",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"zerostart.state.refitting.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
