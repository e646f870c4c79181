"""Push weights into vLLM for TRL's trainers, with one refit for each trainer.

In colocated mode the ranks fill the engines in their own processes. In server mode only rank 0 talks to the
server.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from zerostart.distributed.world import World, current_world
from zerostart.errors import UnsupportedVersionError
from zerostart.integrations import adoption as adoption
from zerostart.integrations.saving import is_sharded
from zerostart.refit.pushes import RefitSettings
from zerostart.refit.refitter import Refitter
from zerostart.refit.vllm import BACKEND
from zerostart.upstream.trl.syncing import WeightSyncs, backend_of, wake
from zerostart.upstream.vllm import reload

Original = Callable[[], None]
#: Refit of each ``VLLMGeneration``; None if TRL gathers the weights.
_refitters: weakref.WeakKeyDictionary[object, Refitter | None] = weakref.WeakKeyDictionary()


def sync_weights(original: Original, generation: Any) -> None:
    """Replace ``VLLMGeneration.sync_weights``: push the current weights; collective."""
    if generation not in _refitters:
        _refitters[generation] = _begin(generation, current_world())
    refitter = _refitters[generation]
    if refitter is None:
        original()
        return
    wake(generation)
    refitter.push()


def init_communicator(original: Original, client: Any) -> None:
    """Replace ``VLLMClient.init_communicator`` on rank 0; refits need no group."""
    if backend_of(client) != BACKEND:
        original()


def _begin(generation: Any, world: World) -> Refitter | None:
    """Start a refit; return None if TRL must gather, and print why for a sharded model."""
    sharded = is_sharded(generation.model)
    if generation.mode == "colocate":
        if not sharded:
            return None
        try:
            reload.require_version()
        except UnsupportedVersionError as error:
            _print_reason(world, str(error))
            return None
        target = generation.llm
    else:
        backend = world.broadcast_object(
            lambda: backend_of(generation.vllm_client), "asking vLLM's server how it takes weights"
        )
        if backend != BACKEND:
            if sharded:
                remedy = f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
                _print_reason(world, f"its server takes weights by {backend!r}; {remedy}")
            return None
        target = generation.vllm_client.base_url if world.rank == 0 else None
    wake(generation)  # the loader of a sleeping engine cannot be traced
    refitter = Refitter(generation.model, target, RefitSettings())
    weakref.finalize(generation, refitter.close)  # runs at exit, too
    return refitter


def _print_reason(world: World, reason: str) -> None:
    if world.rank == 0 and sys.stderr is not None:
        print(
            f"zerostart: TRL itself gathers the weights for vLLM, since {reason}", file=sys.stderr, flush=True
        )


syncs = WeightSyncs(sync_weights, init_communicator)
adoption.add_override(syncs)
