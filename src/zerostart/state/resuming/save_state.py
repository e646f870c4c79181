"""Write a training checkpoint, at once or in the background."""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zerostart.checkpoint.manifest import SAVED_AT, sealed
from zerostart.checkpoint.write.folders import check_space
from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError, WriteError
from zerostart.live.training import StateTensor
from zerostart.state.resuming.background import Saving, begin, copy_to_host, finish_last
from zerostart.state.resuming.training_state import MARKER, MODEL, STATE, Content, collect_content
from zerostart.state.resuming.values import checksum
from zerostart.state.saving.save import save_settings
from zerostart.state.saving.writing import agree_on_place, open_publication, size_of_entry, write_tensors

logger = logging.getLogger("zerostart")


def write_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: object,
    wait: bool,
    budget: int | None = None,
    frozen: bool = True,
    extra_tensors: Sequence[StateTensor] = (),
) -> Saving:
    """Save a training state as ``zerostart.save_state`` documents it.

    ``budget``: maximum size of the host copies, in bytes; None: the free memory. ``frozen=False`` leaves out
    frozen parameters, which ``load_state`` then leaves unchanged. ``extra_tensors`` are further tensors of
    parameters, under unused keys. Raises InsufficientMemoryError, on every rank, if the copies do not fit,
    and ConfigError if ranks save different things.
    """
    start = time.perf_counter()
    world = current_world()
    with world.phase("saving the training state"):
        # One save at a time: the last one uses the buffers of its copies until its end.
        finish_last(world)
        content = collect_content(model, optimizer, extra, world, frozen, extra_tensors)
        _check_alike(content, world)
        place = agree_on_place(path, world)
        with world.phase("checking the free space"):
            if world.rank == 0 and isinstance(place, Path):  # a store has room
                parts = [*content.model[0], *content.state[0]]
                check_space(place, sum(size_of_entry(entry) for entry in parts), "the training state")
        if wait:
            _write(place, content, world)
            return Saving(dict.fromkeys(("blocked", "written"), time.perf_counter() - start))
        # Copy first, since training changes the tensors while the thread writes.
        content = copy_to_host(content, world, budget)
        return begin(partial(_write, place, content), place, world, start)


def _check_alike(content: Content, world: World) -> None:
    """Raise ConfigError, on every rank, if ranks save different things; collective."""
    names = zlib.crc32(repr((content.model[0], content.state[0])).encode())
    groups = [group["parameters"] for group in content.document["optimizer"].get("groups", ())]
    optimizer_sum = zlib.crc32(repr((content.document["optimizer"].get("class"), groups)).encode())
    extra = checksum(content.document["extra"], content.whole)
    # The name of the collective differs on ranks with other tensors, which is an error.
    place = f"saving the tensors with the checksum {names:08x} and the optimizer with {optimizer_sum:08x}"
    checksums = world.all_gather_object(extra, place)
    different = next((rank for rank, theirs in enumerate(checksums) if theirs != checksums[0]), None)
    if different is not None:
        raise ConfigError(
            f"extra (or a schedule) of rank {different} differs from that of rank 0, but only one is "
            "saved: pass the same on every rank, and pass values that differ as one list of all "
            "ranks' values (torch.distributed.all_gather_object)"
        )


def _save_settings(content: Content, folder: Path) -> None:
    try:
        save_settings(content.module, folder, content.root, None)
    except (OSError, WriteError):
        raise
    except Exception as error:  # the library's checks of the model's configuration
        logger.warning(
            "%s is saved without its full configuration, which %s fails to write: %s",
            folder.parent.name,
            type(content.module).__module__.partition(".")[0],
            error,
        )


def _write(place: Path | str, content: Content, world: World) -> None:
    with open_publication(place, world, marker=MARKER) as publication:
        folder = publication.directory / MODEL
        weights = write_tensors(publication, *content.model, world, folder=MODEL)
        if world.rank == 0:
            _save_settings(content, folder)
        state = write_tensors(publication, *content.state, world, folder=STATE, stem=STATE)
        publication.document.update(content.document, **{SAVED_AT: time.time_ns()})
        publication.add_digests(weights.digests, MODEL)
        publication.add_digests(state.digests, STATE)
        if world.rank == 0:
            # Last, since the seal covers all entries.
            publication.document.update(sealed(publication.document))
