"""Synchronise weights of TRL with vLLM, within the process or by its server."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from zerostart.upstream.guard import Function, Use, find_misfits, is_first_rank
from zerostart.upstream.patches import RefCountedPatches, enter_on_import, wrap

logger = logging.getLogger("zerostart")

_MODULE = "trl.generation.vllm_generation"
TOUCHED = (
    Use(
        "trl.generation.vllm_generation:VLLMGeneration",
        "sync_weights, _init_vllm, .model, .mode, .llm, .vllm_client, ._llm_weights_sleeping",
        "the weights of a sharded model go to vLLM without a gather",
    ),
    Use(
        "trl.generation.vllm_client:VLLMClient",
        "init_communicator(device), get_server_info, .base_url",
        "a server whose workers zerostart serves needs no group of NCCL",
    ),
)


def backend_of(client: Any) -> str | None:
    """Return the weight transfer engine of a server, or None."""
    transfer = client.get_server_info()["weight_transfer_config"]
    return None if transfer is None else str(transfer["backend"])


def wake(generation: Any) -> None:
    """Wake a sleeping engine, as TRL does before it sends weights."""
    if generation.mode == "colocate" and generation._llm_weights_sleeping:
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        generation.llm.wake_up(tags=["weights"])
        generation._llm_weights_sleeping = False


class WeightSyncs(RefCountedPatches):
    """Replace ``sync_weights`` by ``sync(original, generation)``, ``init_communicator`` by ``connect``."""

    def __init__(
        self,
        sync: Callable[[Callable[[], None], Any], None],
        connect: Callable[[Callable[[], None], Any], None],
    ) -> None:
        super().__init__(lambda stack: enter_on_import(stack, _MODULE, self._imported))
        self._sync, self._connect = sync, connect

    def _imported(self, stack: ExitStack, module: ModuleType) -> None:
        if wrong := find_misfits(TOUCHED):
            if is_first_rank():
                logger.warning("TRL keeps its own synchronisation of weights with vLLM: %s", wrong)
            return
        wrap(stack, module.VLLMGeneration, "sync_weights", _sender(self._sync))
        wrap(stack, module.VLLMClient, "init_communicator", _sender(self._connect))


def _sender(replacement: Callable[[Callable[[], None], Any], None]) -> Function:
    def call(original: Function, owner: object, *args: Any, **kwargs: Any) -> None:
        replacement(functools.partial(original, owner, *args, **kwargs), owner)

    return call
