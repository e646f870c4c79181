"""``zerostart.save_state``: each rank writes its own share of a training checkpoint, now or later."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zerostart.checkpoint.manifest import SAVED_AT, sealed
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES
from zerostart.checkpoint.write.folders import check_space
from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError, WriteError
from zerostart.live.training import StateTensor
from zerostart.state.resuming.background import Saving, begin, copied_to_host, finish_last
from zerostart.state.resuming.training_state import MARKER, MODEL, STATE, Content, collected
from zerostart.state.resuming.values import checksum
from zerostart.state.saving.save import save_settings
from zerostart.state.saving.writing import Entry, agreed_place, entry_bytes, publishing, write_tensors

logger = logging.getLogger("zerostart")


def write_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: object,
    wait: bool,
    budget: int | None = None,
    frozen: bool = True,
    beside: Sequence[StateTensor] = (),
) -> Saving:
    """See ``zerostart.save_state``. ``budget``: most bytes of host memory for the copies; None: what is free.

    ``frozen=False`` leaves out parameters that are not trained, which ``load_state`` then leaves as they are.
    ``beside`` are further tensors that are kept for parameters, by a key that nothing else here has.
    Raises InsufficientMemoryError, on every rank, where they do not fit, and ConfigError where ranks save
    other things than each other.
    """
    begun = time.perf_counter()
    world = current_world()
    with world.phase("saving the training state"):
        # One save at a time: the last one reads the memory of its copies until it has ended.
        finish_last(world)
        content = collected(model, optimizer, extra, world, frozen, beside)
        with world.phase("looking at what is saved"):
            check_size(content.document, [*content.model[0], *content.state[0]])
        _check_alike(content, world)
        place = agreed_place(path, world)
        with world.phase("looking at the free space"):
            if world.rank == 0 and isinstance(place, Path):  # a store has room
                parts = [*content.model[0], *content.state[0]]
                check_space(place, sum(entry_bytes(entry) for entry in parts), "the training state")
        if wait:
            _write(place, content, world)
            return Saving.finished(time.perf_counter() - begun)
        # Nothing that the thread writes may lie where training goes on: from here on content has copies.
        content = copied_to_host(content, world, budget)
        return begin(partial(_write, place, content), place, world, begun)


#: Bytes of the document for each tensor beside its name: its digest, quotes, indentation; and for each file.
_PER_TENSOR, _PER_FILE = 48, 4096


def check_size(document: Mapping[str, object], entries: Sequence[Entry]) -> None:
    """Raise ConfigError, before anything is written, for a document that could not be read again.

    ``entries`` are the tensors whose digests come to it.
    """
    size = len(json.dumps(document, indent=1)) + _PER_FILE
    size += sum(len(json.dumps(name)) + _PER_TENSOR for name, _, _ in entries)
    if size > MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"the document of the training state would have {size} bytes for {len(entries)} tensors, but at "
            f"most {MAX_DOCUMENT_BYTES} can be read back: train fewer parameters, join small ones, or pass "
            "less in extra"
        )


def _check_alike(content: Content, world: World) -> None:
    """Raise ConfigError, on every rank, where one saves something else than the others; collective."""
    names = zlib.crc32(repr((content.model[0], content.state[0])).encode())
    groups = [group["parameters"] for group in content.document["optimizer"].get("groups", ())]
    stepped = zlib.crc32(repr((content.document["optimizer"].get("class"), groups)).encode())
    extra = checksum(content.document["extra"], content.whole)
    # Ranks with other tensors (gradients, states) would be at another place, and hear of it.
    place = f"saving the tensors with the checksum {names:08x} and the optimizer with {stepped:08x}"
    told = world.all_gather_object(extra, place)
    other = next((rank for rank, theirs in enumerate(told) if theirs != told[0]), None)
    if other is not None:
        raise ConfigError(
            f"extra (or a schedule) of rank {other} differs from that of rank 0, but only one is "
            "saved: pass the same on every rank, and pass values that differ as one list of all "
            "ranks' values (torch.distributed.all_gather_object)"
        )


def _save_settings(content: Content, folder: Path) -> None:
    try:
        save_settings(content.module, folder, content.root, None)
    except (OSError, WriteError):
        raise
    except Exception as error:  # the library's own checks, of what the model carries
        logger.warning(
            "%s is saved without its full configuration, which %s fails to write: %s",
            folder.parent.name,
            type(content.module).__module__.partition(".")[0],
            error,
        )


def _write(place: Path | str, content: Content, world: World) -> None:
    with publishing(place, world, marker=MARKER) as publication:
        folder = publication.directory / MODEL
        known = write_tensors(publication, *content.model, world, folder=MODEL).digests
        if world.rank == 0:
            _save_settings(content, folder)
        # The model before the state, and the document last: readers go by it.
        state = write_tensors(publication, *content.state, world, folder=STATE, stem=STATE)
        # On all ranks; rank 0's is the one that is written, once the digests of all tensors are in it.
        publication.document.update(content.document, **{SAVED_AT: time.time_ns()})
        publication.add_digests(known, MODEL)
        publication.add_digests(state.digests, STATE)
        if world.rank == 0:
            # The seal is over all that the document has, so it comes last.
            publication.document.update(sealed(publication.document))
