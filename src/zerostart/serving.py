"""Receive weights from a trainer in the worker process of an inference engine.

    from zerostart import serving
    serving.serve(serving.Receiver(model), "unix:///run/trainer/workers")

``model`` is any module with a ``load_weights`` that takes names and tensors of a checkpoint. Importing this
module imports torch and no other library. See ``docs/refit.md``.

vLLM finds the engine by the name ``zerostart`` (``weight_transfer_config={"backend": "zerostart"}``).
SGLang takes ``custom_weight_loader=["zerostart.serving.sglang_weight_loader"]``.
"""

from zerostart.refit.connection import Closed, Connection, serve
from zerostart.refit.receiver import EngineWeights, Receiver
from zerostart.refit.sglang import weight_loader as sglang_weight_loader
from zerostart.refit.vllm import register as register_with_vllm
from zerostart.refit.wire import Driver

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
