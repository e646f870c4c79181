"""TRL's trainers that generate with vLLM: its weights come by ``zerostart.refit``, one for each trainer.

In colocated mode each rank has an engine, or a part of one that ranks share, which the ranks fill among
themselves; in server mode rank 0 alone speaks with the server.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

from zerostart.distributed.world import World, current_world
from zerostart.errors import UnsupportedVersionError
from zerostart.integrations.saving import in_shards
from zerostart.integrations.vllm.driver import BACKEND
from zerostart.state.refitting.begin import begin
from zerostart.state.refitting.local import LocalRefitter
from zerostart.state.refitting.publisher import DirectoryRefitter
from zerostart.state.refitting.pushes import RefitSettings
from zerostart.state.refitting.refitter import Refitter
from zerostart.upstream.trl.syncing import Client, Generation, WeightSyncs, backend_of, wake
from zerostart.upstream.vllm import reload

Original = Callable[[], None]
#: What serves a ``VLLMGeneration``; None where TRL does by itself.
_refitters: weakref.WeakKeyDictionary[object, Refitter | LocalRefitter | None] = weakref.WeakKeyDictionary()


def sync_weights(original: Original, generation: Generation) -> None:
    """``VLLMGeneration.sync_weights``: the engine has the weights of now when it returns; collective.

    Raises what ``zerostart.refit`` and ``push`` raise.
    """
    if generation not in _refitters:
        _refitters[generation] = _begun(generation, current_world())
    refitter = _refitters[generation]
    if refitter is None:
        original()
        return
    wake(generation)
    refitter.push()


def init_communicator(original: Original, client: Client) -> None:
    """``VLLMClient.init_communicator``, on rank 0: nothing where the workers connect with a refit."""
    if backend_of(client) != BACKEND:
        original()


def _begun(generation: Generation, world: World) -> Refitter | LocalRefitter | None:
    """What serves it; None where TRL's own way does, which is told if the model is sharded."""
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
    refitter = begin(generation.model, target, RefitSettings())
    assert not isinstance(refitter, DirectoryRefitter), "an engine is no directory"
    weakref.finalize(generation, refitter.close).atexit = False
    return refitter


@atexit.register
def _close() -> None:
    """Leave no socket behind; TRL's trainers have no call that ends them."""
    for refitter in list(_refitters.values()):
        if refitter is not None:
            refitter.close()


def _tell(world: World, why: str) -> None:
    # As a progress bar is shown; a stream that is closed ends no script.
    with suppress(OSError, ValueError):
        if world.rank == 0 and sys.stderr is not None:
            text = f"zerostart: TRL gathers the weights for vLLM by itself, since {why}"
            print(text, file=sys.stderr, flush=True)


syncs = WeightSyncs(sync_weights, init_communicator)
