"""TRL's synchronisation of weights with vLLM: its ``VLLMGeneration``, and the client of its server mode.

All of TRL's trainers that generate with vLLM have a ``VLLMGeneration``, and call its ``sync_weights`` on
every rank before they generate with weights that an optimizer has changed. By itself it gathers each
parameter on every rank, or all at once where adapters have to be merged, and gives it to each rank's own
engine, or broadcasts it to the workers of a server by NCCL.

TRL is not imported for this: its methods are replaced once it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Protocol

import torch

from zerostart.upstream.on_import import enter_when_imported
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, Otherwise, PatchPoint, is_first_rank, misfit
from zerostart.upstream.shapes import Function, Shape
from zerostart.upstream.versions import TRL

logger = logging.getLogger("zerostart")

_MODULE = "trl.generation.vllm_generation"
_SYNC = PatchPoint(
    library=TRL,
    owner="trl.generation.vllm_generation:VLLMGeneration",
    names=("sync_weights",),
    attributes=("model", "mode", "llm", "vllm_client", "_llm_weights_sleeping"),
    writes=("_llm_weights_sleeping",),
    why="the weights of a sharded model go to vLLM without a gather",
    lasts=Lasts.BLOCK,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            "trl.generation.vllm_generation:VLLMGeneration.sync_weights",
            has=(
                "self.llm.wake_up(tags=['weights'])",
                "self._llm_weights_sleeping = False",
                "self.vllm_client.update_named_params(...)",
                "X.load_weights(...)",
                "self.vllm_client.reset_prefix_cache()",
                "self.llm.reset_prefix_cache()",
            ),
        ),
        Shape(
            "trl.generation.vllm_generation:VLLMGeneration._init_vllm",
            has=(
                "if accelerator.is_main_process: ...",
                "self.vllm_client = VLLMClient(...)",
                "self.vllm_client.init_communicator(...)",
                "self.llm = LLM(...)",
            ),
        ),
    ),
)
_CONNECT = PatchPoint(
    library=TRL,
    owner="trl.generation.vllm_client:VLLMClient",
    names=("init_communicator",),
    attributes=("base_url",),
    why="a server whose workers zerostart serves needs no group of NCCL",
    lasts=Lasts.BLOCK,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            "trl.generation.vllm_client:VLLMClient.init_communicator",
            leads=("device",),
            has=("if self.get_server_info()['weight_transfer_config'] is None: ...",),
        ),
        Shape("trl.generation.vllm_client:VLLMClient.get_server_info", has=("return X['vllm_config']",)),
    ),
)
TOUCHED = (_SYNC, _CONNECT)


class Client(Protocol):
    """``VLLMClient``, of the main process alone."""

    base_url: str

    def get_server_info(self) -> dict[str, Any]:
        """The configuration of the server."""
        ...


class Generation(Protocol):
    """``VLLMGeneration``."""

    model: torch.nn.Module
    #: ``colocate``, with ``llm`` in each rank, or ``server``, with ``vllm_client`` in the main process.
    mode: str
    llm: Any
    vllm_client: Client
    _llm_weights_sleeping: bool


def backend_of(client: Client) -> str | None:
    """By which engine the workers of a server take weights; None where it was started without one."""
    transfer = client.get_server_info()["weight_transfer_config"]
    return None if transfer is None else str(transfer["backend"])


def wake(generation: Generation) -> None:
    """Have an engine that sleeps between generations make room for its weights, as TRL does before a sync."""
    if generation.mode == "colocate" and generation._llm_weights_sleeping:
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        generation.llm.wake_up(tags=["weights"])
        generation._llm_weights_sleeping = False


class WeightSyncs(RefCountedPatches):
    """While it is open, ``sync(original, generation)`` is what ``sync_weights`` does.

    And ``connect(original, client)`` what ``init_communicator`` does; ``original()`` is TRL's own.
    """

    def __init__(
        self,
        sync: Callable[[Callable[[], None], Generation], None],
        connect: Callable[[Callable[[], None], Client], None],
    ) -> None:
        super().__init__(lambda stack: enter_when_imported(stack, _MODULE, self._imported))
        self._sync, self._connect = sync, connect

    def _imported(self, stack: ExitStack, module: ModuleType) -> None:
        if wrong := misfit(TOUCHED):
            if is_first_rank():
                logger.warning("TRL keeps its own synchronisation of weights with vLLM: %s", wrong)
            return
        generation, client = module.VLLMGeneration, module.VLLMClient
        stack.enter_context(
            replaced(_SYNC, generation, "sync_weights", _sent(generation.sync_weights, self._sync))
        )
        stack.enter_context(
            replaced(_CONNECT, client, "init_communicator", _sent(client.init_communicator, self._connect))
        )


def _sent(original: Function, replacement: Callable[[Callable[[], None], Any], None]) -> Function:
    @functools.wraps(original)
    def call(self: object, *args: Any, **kwargs: Any) -> None:
        replacement(functools.partial(original, self, *args, **kwargs), self)

    return call
