"""A training checkpoint that is about to be restored: its document, and what its folders hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.finding import state_in, tell_of_newer
from zerostart.checkpoint.manifest import SAVED_AT
from zerostart.checkpoint.source import open_saved_state
from zerostart.distributed.world import World
from zerostart.errors import CheckpointNotFoundError
from zerostart.loading.source import open_source
from zerostart.state.document import read_document
from zerostart.state.foreign import foreign_state
from zerostart.state.linking import check_unchanged
from zerostart.state.training_state import MARKER, MODEL, STATE

__all__ = ["Saved", "opened"]

#: accelerate's and the Trainer's files of an optimizer that one rank has gathered.
_WHOLE_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its document, and the catalogs of its two folders."""

    path: Path
    document: dict[str, Any]
    model: Catalog
    state: Catalog

    @property
    def stored(self) -> dict[str, str]:
        """The dtype of each tensor, those of the model as ``model/NAME``."""
        found = {name: entry.dtype for name, entry in self.state.weights.items()}
        return found | {f"{MODEL}/{name}": entry.dtype for name, entry in self.model.weights.items()}


def opened(path: Path, world: World) -> Saved:
    """The training state at ``path``, which rank 0 finds, on every rank; collective.

    Raises CheckpointNotFoundError where there is none, and CheckpointError for a damaged one.
    """
    found = world.broadcast_object(lambda: _described(path), "reading the checkpoint's document")
    return replace(found, model=open_source(found.model, world), state=open_source(found.state, world))


def _described(path: Path) -> Saved:
    """The training state at ``path``, or in what accelerate or the Trainer has made there."""
    own = state_in(path)
    if own is None:
        foreign = foreign_state(path)
        if foreign is not None:
            return Saved(path, *foreign)
        for name in _WHOLE_OPTIMIZERS:
            if (path / name).is_file():
                raise CheckpointNotFoundError(
                    f"{path / name} has the optimizer of all ranks in one pickle, which is not read in "
                    "parts: resume once by what has saved it, and save by zerostart.save_state, or by "
                    "accelerate with fsdp_state_dict_type: SHARDED_STATE_DICT; the weights alone can be "
                    "loaded (zerostart.load)"
                )
        raise CheckpointNotFoundError(
            f"{path} is not a complete training checkpoint: {MARKER} is not there, which "
            "zerostart.save_state writes last"
        )
    tell_of_newer(path, own)
    path = own
    document, (weights, state) = open_saved_state(path, (MODEL, STATE), read_document)
    check_unchanged(path, MODEL, document.get(SAVED_AT))
    return Saved(path, document, weights, state)
