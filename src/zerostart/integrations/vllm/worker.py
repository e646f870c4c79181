"""In a vLLM worker's process: its connection with a trainer, and the three ways in which vLLM lets us in.

- ``WeightTransfer``: an engine of vLLM's ``WeightTransferEngineFactory``, under the name ``zerostart``;
- ``WorkerExtension``: for ``worker_extension_cls``, where no weight transfer is configured;
- ``join``, ``follow``, ``leave`` and ``receiver``: functions of a worker, for ``collective_rpc`` in one
  process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerostart.integrations.participant import Participant, participant_of
from zerostart.integrations.vllm.weights import VLLMWeights
from zerostart.state.refitting.receiver import Receiver


def participant(model: nn.Module, config: Any, rank: int) -> Participant:
    """That of a model, the same at each call; it lives as long as the model."""
    weights = VLLMWeights(model, config, f"vLLM's {type(model).__name__}")
    return participant_of(model, weights, f"vllm-{rank}")


def _of(worker: Any) -> Participant:
    return participant(worker.model_runner.get_model(), worker.vllm_config, int(worker.rank))


def join(worker: Any, address: str, secret: str | None = None, timeout: float = 300.0) -> None:
    """Have vLLM's ``worker`` connect with a trainer."""
    _of(worker).join(address, secret, timeout)


def follow(worker: Any, version: int) -> int:
    """Have vLLM's ``worker`` take part in the push of ``version``."""
    return _of(worker).follow(version)


def receiver(worker: Any, process: int) -> Receiver | None:
    """That of vLLM's ``worker``, where it runs in the ``process`` that asks; None elsewhere."""
    return _of(worker).receiver if os.getpid() == process else None


def leave(worker: Any) -> None:
    """Have vLLM's ``worker`` close its connection."""
    _of(worker).leave()


class WorkerExtension:
    """For ``LLM(worker_extension_cls="zerostart.serving.VLLMWorkerExtension")``: methods of each worker."""

    def zerostart_join(self, address: str, secret: str | None = None, timeout: float = 300.0) -> None:
        """Connect with a trainer."""
        join(self, address, secret, timeout)

    def zerostart_follow(self, version: int) -> int:
        """Take part in the push of ``version``."""
        return follow(self, version)

    def zerostart_leave(self) -> None:
        """Close the connection."""
        leave(self)


@dataclass
class JoinInfo:
    """What ``init_weight_transfer_engine`` is given."""

    address: str
    secret: str | None = None
    timeout: float = 300.0


@dataclass
class PushInfo:
    """What ``update_weights`` is given."""

    version: int
