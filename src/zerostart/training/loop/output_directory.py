"""The output directory of a run: its lock, and what an earlier run has left in it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from zerostart.checkpoint.manifest import MARKER as MODEL_MARKER
from zerostart.checkpoint.paths import expanded, scheme_of, shown_url
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.write.folders import check_space
from zerostart.checkpoint.write.staging import remove
from zerostart.distributed.world import World
from zerostart.engines.shard import full_shape
from zerostart.errors import ConfigError, VerifyError, WriteError
from zerostart.state.resuming.retention import list_complete
from zerostart.state.resuming.training_state import MARKER
from zerostart.training.adapt.export import AVERAGE, EXPORTS
from zerostart.training.data.cached import FOLDER as CACHE
from zerostart.training.loop.locks import hold
from zerostart.training.samples.sampler import FOLDER as SAMPLES
from zerostart.training.samples.sampler import clear_drawn

#: Names in the output directory: the folder of checkpoints, and the figures of each step.
FOLDER, METRICS = "checkpoints", "metrics.jsonl"
_LOCK = ".run.lock"
_STEP = re.compile(r"step-\d{8}")


@contextmanager
def claim_output(
    given: str, source: str, media: Sequence[str], overwrite: bool, resumes: bool, world: World
) -> Iterator[Path]:
    """Make and lock the output directory ``given`` while the body runs; collective.

    ``source`` is where the weights are that are trained, ``media`` where the data are; a run that
    ``resumes`` may find the files of an earlier one. Raises, on every rank, ConfigError where the directory
    has files that the run may not replace or lies within the data, and WriteError where another run has
    locked it.
    """
    stack = contextlib.ExitStack()

    def claim() -> Path:
        if scheme_of(given):
            raise ConfigError(f"output.directory {shown_url(given)}: train to a local directory and copy it")
        directory = expanded(given).absolute()
        _check_outside(media, directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            occupied = not all(one.name in (_LOCK, CACHE) for one in directory.iterdir())
        except OSError as error:
            raise ConfigError(f"output.directory {directory}: {error.strerror}") from error
        # A run writes its metrics before anything else.
        if occupied and not (resumes and (directory / METRICS).is_file()):
            if not overwrite:
                raise ConfigError(
                    f"output.directory {directory} is not empty; name another, continue its run with "
                    "resume=auto, or allow replacing it with output.overwrite=true"
                )
            _check_source(source, directory)
        refusal = f"another run is at work in output.directory {directory}: wait for its end, or name another"
        hold(stack, directory / _LOCK, refusal)
        return directory

    # Rank 0 holds the lock. It ends with that process, also where the process is killed.
    with stack:
        directory: Path = world.broadcast_object(claim, "claiming the output directory")
        with world.phase("making the directory of the run"):
            directory.mkdir(parents=True, exist_ok=True)  # machines need not share a file system
        yield directory


def check_room(model: nn.Module, trained_only: bool, directory: Path) -> None:
    """Raise WriteError where the model that the run ends with does not fit on the disk."""
    counted = (held for held in model.parameters() if held.requires_grad or not trained_only)
    nbytes = sum(full_shape(parameter).numel() * parameter.itemsize for parameter in counted)
    check_space(directory, nbytes, "the trained model")


def _check_source(source: str, directory: Path) -> None:
    """Raise ConfigError if overwriting ``directory`` would delete the weights that are trained."""
    found, place = (Path(os.path.realpath(path)) for path in (resolve_source(source), directory))
    # A directory of an earlier run may lie within the source: only the files of that run are replaced.
    inside = found in place.parents and not (place / METRICS).is_file()
    if inside or found == place or place in found.parents:
        raise ConfigError(
            f"output.overwrite would delete output.directory {directory} and with it model.source "
            f"{source}, which the run trains from; name another directory"
        )


def _check_outside(media: Sequence[str], directory: Path) -> None:
    """Raise ConfigError if the output directory lies in the data, where its files would be trained on."""
    place = Path(os.path.realpath(directory))
    for source in media:
        found = Path(os.path.realpath(expanded(source)))
        if found.is_dir() and (found == place or found in place.parents):
            raise ConfigError(
                f"output.directory {directory} lies inside media.source {source}, so the files of the run "
                "would be read as data; name a directory next to it"
            )


def resumable_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in an output directory that a run can resume, the oldest first."""
    return [Path(path) for path in list_complete(directory / FOLDER, is_run_state)]


def is_run_state(extra: Any) -> bool:
    """Return True if ``extra`` of a checkpoint was written by a run, and not by a user's script."""
    return isinstance(extra, dict) and {"step", "schedule", "sequences"} <= extra.keys()


def remove_earlier_run(directory: Path, resumed: Path | None) -> None:
    """Remove the files that a later resume would take for files of this run; on one rank.

    A new run removes the earlier run's checkpoints, samples, exports and averages. A run that resumes from
    its own checkpoint removes later checkpoints only. Files that no manifest lists stay. Raises WriteError.
    """
    found = resumable_checkpoints(directory)
    own = None if resumed is None else next((path for path in found if path.samefile(resumed)), None)
    try:
        # The newest first, so that a kill leaves a row of checkpoints without a gap.
        for path in reversed(found if own is None else found[found.index(own) + 1 :]):
            remove(path, MARKER)
        if own is not None:
            return
        for entry in (directory / SAMPLES).glob("step-*"):
            if _STEP.fullmatch(entry.name):
                clear_drawn(entry)
        for pattern in (f"{EXPORTS}/step-*/{MODEL_MARKER}", f"{AVERAGE}/{MODEL_MARKER}"):
            for marker in directory.glob(pattern):
                remove(marker.parent, MODEL_MARKER)
    except (OSError, VerifyError) as error:
        raise WriteError(f"{directory}: the files of an earlier run cannot be removed: {error}") from error
