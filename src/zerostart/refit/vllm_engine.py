"""Engine that vLLM's ``WeightTransferEngineFactory`` creates for ``{"backend": "zerostart"}``.

vLLM imports this module in its workers; ``vllm.distributed.weight_transfer.base`` documents the calls. Layers
are prepared and packed while they are filled, so an update needs no start and no end.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from zerostart.refit.vllm import JoinInfo, PushInfo, engine_worker


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
