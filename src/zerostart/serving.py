"""The engine's side of a refit: what a worker's process needs to take weights from a trainer.

    from zerostart import serving
    serving.serve(serving.Receiver(model), "unix:///run/trainer/workers")

``model`` is any module with a ``load_weights`` that takes names and tensors as a checkpoint has them.
Importing this loads torch and no other library. See ``docs/refit.md``.

vLLM finds its engine under the name ``zerostart`` (``weight_transfer_config={"backend": "zerostart"}``), or
has ``VLLMWorkerExtension`` for its ``worker_extension_cls``. SGLang is given
``custom_weight_loader=["zerostart.serving.sglang_weight_loader"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostart.integrations.sglang.worker import weight_loader as sglang_weight_loader
    from zerostart.integrations.vllm.driver import register as register_with_vllm
    from zerostart.integrations.vllm.worker import WorkerExtension as VLLMWorkerExtension
    from zerostart.state.refitting.connection import Connection, serve
    from zerostart.state.refitting.receiver import EngineWeights, Receiver
    from zerostart.state.refitting.targets import Driver, register_target
    from zerostart.state.refitting.transports.base import Closed, register_transport

__all__ = [
    "Closed",
    "Connection",
    "Driver",
    "EngineWeights",
    "Receiver",
    "VLLMWorkerExtension",
    "register_target",
    "register_transport",
    "register_with_vllm",
    "serve",
    "sglang_weight_loader",
]

_HOMES = {
    "Closed": "state.refitting.transports.base",
    "Connection": "state.refitting.connection",
    "Driver": "state.refitting.targets",
    "EngineWeights": "state.refitting.receiver",
    "Receiver": "state.refitting.receiver",
    "VLLMWorkerExtension": "integrations.vllm.worker:WorkerExtension",
    "register_target": "state.refitting.targets",
    "register_transport": "state.refitting.transports.base",
    "register_with_vllm": "integrations.vllm.driver:register",
    "serve": "state.refitting.connection",
    "sglang_weight_loader": "integrations.sglang.worker:weight_loader",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, there = _HOMES[name].partition(":")
    return getattr(import_module(f"zerostart.{module}"), there or name)


def __dir__() -> list[str]:
    return sorted(__all__)
