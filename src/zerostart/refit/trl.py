"""TRL's trainers that generate with vLLM: its weights come by ``zerostart.refit``, one for each trainer.

In colocated mode each rank has an engine, or a part of one that ranks share, which the ranks fill among
themselves; in server mode rank 0 alone speaks with the server.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from zerostart.distributed.world import World, current_world
from zerostart.errors import UnsupportedVersionError
from zerostart.integrations import adoption as adoption
from zerostart.integrations.saving import in_shards
from zerostart.refit.pushes import RefitSettings
from zerostart.refit.refitter import Refitter
from zerostart.refit.vllm import BACKEND
from zerostart.upstream.trl.syncing import WeightSyncs, backend_of, wake
from zerostart.upstream.vllm import reload

Original = Callable[[], None]
#: The refit of a ``VLLMGeneration``; None where TRL gathers by itself.
_refitters: weakref.WeakKeyDictionary[object, Refitter | None] = weakref.WeakKeyDictionary()


def sync_weights(original: Original, generation: Any) -> None:
    """Do ``VLLMGeneration.sync_weights``: bring the engine to the weights of now; collective."""
    if generation not in _refitters:
        _refitters[generation] = _begin(generation, current_world())
    refitter = _refitters[generation]
    if refitter is None:
        original()
        return
    wake(generation)
    refitter.push()


def init_communicator(original: Original, client: Any) -> None:
    """Do ``VLLMClient.init_communicator``, on rank 0: nothing if the workers connect with a refit."""
    if backend_of(client) != BACKEND:
        original()


def _begin(generation: Any, world: World) -> Refitter | None:
    """Begin a refit; None if TRL's own way has to do, which is told if the model is sharded."""
    sharded = in_shards(generation.model)
    if generation.mode == "colocate":
        if not sharded:
            return None
        try:
            reload.require()
        except UnsupportedVersionError as error:
            _tell(world, str(error))
            return None
        target = generation.llm
    else:
        backend = world.broadcast_object(
            lambda: backend_of(generation.vllm_client), "asking vLLM's server how it takes weights"
        )
        if backend != BACKEND:
            if sharded:
                remedy = f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
                _tell(world, f"its server takes weights by {backend!r}; {remedy}")
            return None
        target = generation.vllm_client.base_url if world.rank == 0 else None
    wake(generation)  # a sleeping engine has no memory that its loader could be asked about
    refitter = Refitter(generation.model, target, RefitSettings())
    weakref.finalize(generation, refitter.close)  # also at the end of the script
    return refitter


def _tell(world: World, why: str) -> None:
    if world.rank == 0 and sys.stderr is not None:
        print(
            f"zerostart: TRL gathers the weights for vLLM by itself, since {why}", file=sys.stderr, flush=True
        )


syncs = WeightSyncs(sync_weights, init_communicator)
adoption.add_override(syncs)
