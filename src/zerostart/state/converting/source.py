"""Open the source of a conversion, and read parts of its tensors."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.saved_state import open_saved_state
from zerostart.checkpoint.manifest import STATE_MARKER
from zerostart.checkpoint.paths import expanded, scheme_of
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointNotFoundError, ConfigError
from zerostart.geometry import Piece
from zerostart.geometry.layout.layout import flat_run
from zerostart.recipe import Recipe, Target
from zerostart.state.resuming.retention import list_complete
from zerostart.state.resuming.training_state import MODEL
from zerostart.transfer import Progress, execute, tune
from zerostart.transfer.planning import Destination, join

#: Names of the Trainer's checkpoints.
_STEP = re.compile(r"checkpoint-(\d+)")
#: Maximum size of one read, in bytes.
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor to write, with the pieces of the source that it consists of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def open_source(source: str | os.PathLike[str]) -> Catalog:
    """Open a source of ``zerostart.load``, or the newest checkpoint of a run's directory.

    Raises the errors of ``open_catalog``, and ConfigError for a training state without the frozen weights.
    """
    try:
        catalog = open_catalog(source)
    except CheckpointNotFoundError:
        newest = None if scheme_of(source) else _find_newest_checkpoint(expanded(source))
        if newest is None:
            raise
        catalog = open_catalog(newest)
    root = Path(catalog.root or ".")
    state = root.parent if root.name == MODEL else None
    if (
        state is not None
        and (state / STATE_MARKER).is_file()
        and open_saved_state(state, ())[0].get("left_out")
    ):
        raise ConfigError(
            f"{state} holds only the trained tensors, not the whole model: export the output directory of "
            "its run instead, or save a LoRA with adapters_only=True"
        )
    return catalog


def _find_newest_checkpoint(run: Path) -> Path | None:
    states = [state for folder in (run, run / "checkpoints") for state in list_complete(folder)]
    if states:
        return states[-1]
    steps = {int(match[1]): path for path in run.glob("*") if (match := _STEP.fullmatch(path.name))}
    return steps[max(steps)] if steps else None


class SourceReader:
    """Reads elements of tensors from the files of a catalog; threads may share it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        tuned = tune(catalog.storage, False)
        self._options = tuned.options(min(tuned.chunk_size, _READ_BYTES))
        self._cold, self._direct = tuned.cold, tuned.direct

    def read(self, tensor: SourceTensor, first: int, count: int) -> torch.Tensor:
        """Return ``count`` elements of ``tensor`` in row-major order from ``first`` on. Raises ReadError."""
        out = torch.empty(count, dtype=tensor.dtype, device="cpu")
        recipe = Recipe(Target(tensor.name, tensor.shape, tensor.dtype), tensor.pieces)
        layout = flat_run(tensor.shape, first, first + count)
        destination = Destination(tensor.name, count, count, tensor.dtype, True)
        plan = join(self._catalog, [(recipe, layout, destination)], self._options)
        reader = plan.storage.reader(cold=self._cold, direct=self._direct)
        execute(plan, [out], Progress(plan.read_bytes, shown=False), 1, reader)
        return out
