"""In a vLLM worker's process: its connection with a trainer, and the three ways in which vLLM lets us in.

- ``WeightTransfer``: an engine of vLLM's ``WeightTransferEngineFactory``, under the name ``zerostart``;
- ``WorkerExtension``: for ``worker_extension_cls``, where no weight transfer is configured;
- ``join``, ``follow`` and ``leave``: functions of a worker, for ``collective_rpc`` in one process.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerostart.errors import ConfigError
from zerostart.integrations.vllm.weights import VLLMWeights
from zerostart.state.refitting.connection import Connection
from zerostart.state.refitting.receiver import Receiver

_ATTRIBUTE = "_zerostart_participant"


class Participant:
    """A worker's model, and its connection with a trainer while there is one."""

    def __init__(self, model: nn.Module, config: Any, rank: int) -> None:
        kind = type(model).__name__
        name = f"{socket.gethostname()}-{os.getpid()}-vllm-{rank}"
        # Kept from trainer to trainer: it knows which version the model has.
        self._receiver = Receiver(VLLMWeights(model, config, f"vLLM's {kind}"), name=name)
        self._connection: Connection | None = None

    def join(self, address: str, secret: str | None = None, timeout: float = 300.0) -> None:
        """Connect with a trainer, in the place of the one before; raises what ``Connection`` raises."""
        self.leave()
        self._connection = Connection(self._receiver, address, secret=secret, timeout=timeout)

    def follow(self, version: int) -> int:
        """Take part in the push of ``version``; raises what it failed with."""
        if self._connection is None:
            raise ConfigError(f"version {version} cannot be taken: this worker has not joined a trainer")
        return self._connection.follow(version=version)

    def leave(self) -> None:
        """Close the connection; raises nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def participant(model: nn.Module, config: Any, rank: int) -> Participant:
    """That of a model, the same at each call; it lives as long as the model."""
    found = vars(model).get(_ATTRIBUTE)
    if found is None:
        found = vars(model)[_ATTRIBUTE] = Participant(model, config, rank)
    assert isinstance(found, Participant), "the attribute is ours"
    return found


def _of(worker: Any) -> Participant:
    return participant(worker.model_runner.get_model(), worker.vllm_config, int(worker.rank))


def join(worker: Any, address: str, secret: str | None = None, timeout: float = 300.0) -> None:
    """Have vLLM's ``worker`` connect with a trainer."""
    _of(worker).join(address, secret, timeout)


def follow(worker: Any, version: int) -> int:
    """Have vLLM's ``worker`` take part in the push of ``version``."""
    return _of(worker).follow(version)


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
