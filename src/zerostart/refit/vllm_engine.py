"""Both sides of the engine ``zerostart`` for vLLM's weight transfer.

vLLM imports this module on first use; ``vllm.distributed.weight_transfer.base`` documents the calls. A worker
prepares and packs layers while they are filled, so an update needs no start and no end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
)
from vllm.distributed.weight_transfer.base import WeightSource as BaseSource

from zerostart.errors import ConfigError
from zerostart.refit.refitter import Refitter
from zerostart.refit.vllm import BACKEND, ClientDriver, JoinInfo, PushInfo, engine_worker
from zerostart.refit.within import WeightSource


class WeightTransfer(WeightTransferEngine):  # type: ignore[misc]  # the base is untyped
    """Receives weights from a trainer that called ``zerostart.refit``."""

    init_info_cls = JoinInfo
    update_info_cls = PushInfo
    # A draft model needs another refit.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._worker = engine_worker(model, vllm_config, int(vllm_config.parallel_config.rank))

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Connect with the trainer."""
        self._worker.join(init_info.address, init_info.timeout)

    def start_weight_update(self) -> None:
        """Do nothing; see the module's docstring."""

    def receive_weights(self, update_info: PushInfo) -> None:
        """Take part in a push."""
        self._worker.follow(update_info.version)

    def finish_weight_update(self) -> None:
        """Do nothing; see the module's docstring."""

    def shutdown(self) -> None:
        """Close the connection."""
        self._worker.leave()


class VLLMSource(WeightSource, BaseSource):  # type: ignore[misc]  # the base is untyped
    """Weights of a model for any of vLLM's trainer engines."""


@dataclass
class TrainerInit(TrainerInitInfo):  # type: ignore[misc]  # the base is untyped
    """Arguments of the trainer side: ``rank``, of the process group of all trainer ranks."""

    backend: ClassVar[str] = BACKEND


class TrainerTransfer(TrainerWeightTransferEngine):  # type: ignore[misc]  # the base is untyped
    """Pushes the weights of a ``zerostart.weight_source`` to vLLM's workers on this machine."""

    init_info_cls = TrainerInit

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> TrainerTransfer:
        """Connect with the workers; collective. Raises ZerostartError."""
        if not isinstance(source, WeightSource):
            raise ConfigError(
                f"source is a {type(source).__name__}: the backend {BACKEND!r} sends the shards of a model; "
                "pass source=zerostart.weight_source(model)"
            )
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        target = ClientDriver(client) if init_info.is_sender else None
        engine._refitter = Refitter(source.model, target, source.settings)
        return engine

    def send_weights(self) -> None:
        """Push the current weights; collective. Raises the errors of ``Refitter.push``."""
        self._refitter.push()

    def shutdown(self) -> None:
        """Close the connection with the workers."""
        self._refitter.close()
