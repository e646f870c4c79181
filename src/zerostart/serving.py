"""The engine's side of a refit: what a worker's process needs to take weights from a trainer.

    from zerostart import serving
    serving.serve(serving.Receiver(model), "unix:///run/trainer/workers")

``model`` is any module with a ``load_weights`` that takes names and tensors as a checkpoint has them.
Importing this loads torch and no other library. See ``docs/refit.md``.

vLLM finds its engine under the name ``zerostart`` (``weight_transfer_config={"backend": "zerostart"}``).
SGLang gets ``custom_weight_loader=["zerostart.serving.sglang_weight_loader"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostart.refit.connection import Closed, Connection, serve
    from zerostart.refit.drivers import Driver
    from zerostart.refit.receiver import EngineWeights, Receiver
    from zerostart.refit.sglang import weight_loader as sglang_weight_loader
    from zerostart.refit.vllm import register as register_with_vllm

__all__ = [
    "Closed",
    "Connection",
    "Driver",
    "EngineWeights",
    "Receiver",
    "register_with_vllm",
    "serve",
    "sglang_weight_loader",
]

_HOMES = {
    "Closed": "connection",
    "Connection": "connection",
    "Driver": "drivers",
    "EngineWeights": "receiver",
    "Receiver": "receiver",
    "register_with_vllm": "vllm:register",
    "serve": "connection",
    "sglang_weight_loader": "sglang:weight_loader",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, there = _HOMES[name].partition(":")
    return getattr(import_module(f"zerostart.refit.{module}"), there or name)


def __dir__() -> list[str]:
    return sorted(__all__)
