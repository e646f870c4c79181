"""``zerostart.save_state``: each rank writes its own share of a training checkpoint, now or later."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from zerostart.distributed.world import World, current_world
from zerostart.state.background import Saving, begin, finish_last
from zerostart.state.host_copies import kept_on_host
from zerostart.state.publishing import publishing
from zerostart.state.settings import save_settings
from zerostart.state.training_state import MARKER, MODEL, STATE, Content, collected
from zerostart.state.writing import write_tensors

__all__ = ["save_state"]


def save_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    extra: Any,
    wait: bool,
    budget: int | None = None,
    frozen: bool = True,
) -> Saving:
    """See ``zerostart.save_state``. ``budget``: most bytes of host memory for the copies; None: what is free.

    ``frozen=False`` leaves out parameters that are not trained, which ``load_state`` then leaves as they are.
    Raises InsufficientMemoryError, on every rank, where they do not fit.
    """
    begun = time.perf_counter()
    finish_last()
    world = current_world()
    with world.phase("saving the training state"):
        with world.phase("looking at what is saved"):
            content = collected(model, optimizer, extra, world, frozen)
            names = repr((content.model[0], content.state[0])).encode()
        # Ranks with other tensors (gradients, states) would be at another place, and hear of it.
        world.raise_together(None, f"saving the tensors with the checksum {zlib.crc32(names):08x}")
        if wait:
            _write(path, content, world)
            return Saving.finished(time.perf_counter() - begun)
        content = kept_on_host(content, world, budget)
        return begin(_writer(path, content), world, begun)


def _writer(path: str | os.PathLike[str], content: Content) -> Callable[[World], None]:
    return lambda world: _write(path, content, world)


def _write(path: str | os.PathLike[str], content: Content, world: World) -> None:
    with publishing(path, world, marker=MARKER) as publication:
        folder = Path(publication.directory)
        model = write_tensors(folder / MODEL, *content.model, world)
        with world.phase("writing the model's configuration"):
            if world.rank == 0:
                save_settings(content.module, folder / MODEL, content.root, None)
        state = write_tensors(folder / STATE, *content.state, world, stem=STATE)
        publication.document.update(content.document)
        publication.add_digests(model.digests, MODEL)
        publication.add_digests(state.digests, STATE)
