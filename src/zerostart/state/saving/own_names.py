"""A model's tensors as safetensors files under the names of its own state dict, and nothing else."""

from __future__ import annotations

import os

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.live.record import bare_model, kept_record
from zerostart.recipe import spelling
from zerostart.state.saving.contents import held_tensors
from zerostart.state.saving.publishing import publishing
from zerostart.state.saving.writing import plain, write_tensors


def save_own_names(model: nn.Module, path: str | os.PathLike[str], max_shard_size: int | str) -> None:
    """Save the state dict of ``model``, ties once; collective, each rank its own share.

    What ``load_state_dict`` of the unsharded model takes, where ``save`` has the checkpoint's layout. Raises
    as ``save`` does.
    """
    world = current_world()
    with world.phase("saving the state dict"):
        with world.phase("looking at the model"):
            inner = bare_model(model)
            held, _ = held_tensors(inner, kept_record(inner), world)
            entries = [(i.name, spelling(i.shard.storage.dtype, i.name), i.shard.layout.shape) for i in held]
            outgoing = [plain(item.name, item.shard) for item in held]
        with publishing(path, world) as publication:
            written = write_tensors(
                publication.directory, entries, outgoing, world, max_shard_size=max_shard_size
            )
            publication.add_digests(written.digests)
