"""The engine's side of a refit: what a worker's process needs to take weights from a trainer.

    from zerostart import serving
    serving.serve(serving.Receiver(model), "unix:///run/trainer/workers")

``model`` is any module with a ``load_weights`` that takes names and tensors as a checkpoint has them.
Importing this loads torch and no other library. See ``docs/refit.md``.

vLLM finds its engine under the name ``zerostart`` (``weight_transfer_config={"backend": "zerostart"}``).
SGLang gets ``custom_weight_loader=["zerostart.serving.sglang_weight_loader"]``.
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
