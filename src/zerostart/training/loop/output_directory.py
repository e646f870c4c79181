"""Lock the output directory of a run, and delete an earlier run's files."""

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
from zerostart.training.data.cached import hold_lock
from zerostart.training.samples.sampler import FOLDER as SAMPLES
from zerostart.training.samples.sampler import delete_samples

#: Names in the output directory: the folder of checkpoints, and the file with figures of each step.
FOLDER, METRICS = "checkpoints", "metrics.jsonl"
_LOCK = ".run.lock"
_STEP = re.compile(r"step-\d{8}")


@contextmanager
def claim_output(
    output: str, source: str, media: Sequence[str], overwrite: bool, resumes: bool, world: World
) -> Iterator[Path]:
    """Create and lock the directory ``output`` while the block runs; collective.

    ``source`` and ``media`` are the places of weights and data; a run that ``resumes`` may find files of an
    earlier one. Raises ConfigError on every rank if the directory has files that the run may not replace, or
    is in the data, and WriteError if another run has locked it.
    """
    stack = contextlib.ExitStack()

    def claim() -> Path:
        if scheme_of(output):
            raise ConfigError(f"output.directory {shown_url(output)}: train to a local directory and copy it")
        directory = expanded(output).absolute()
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
        refusal = f"another run uses output.directory {directory}: wait for its end, or name another"
        hold_lock(stack, directory / _LOCK, refusal)
        return directory

    # Rank 0 holds the lock, which ends with its process.
    with stack:
        directory: Path = world.broadcast_object(claim, "claiming the output directory")
        with world.phase("making the directory of the run"):
            directory.mkdir(parents=True, exist_ok=True)  # machines need not share a file system
        yield directory


def check_free_space(model: nn.Module, trained_only: bool, directory: Path) -> None:
    """Raise WriteError if the trained model does not fit on the disk."""
    counted = (held for held in model.parameters() if held.requires_grad or not trained_only)
    nbytes = sum(full_shape(parameter).numel() * parameter.itemsize for parameter in counted)
    check_space(directory, nbytes, "the trained model")


def _check_source(source: str, directory: Path) -> None:
    """Raise ConfigError if overwriting ``directory`` would delete the weights to train."""
    real_source, place = (Path(os.path.realpath(path)) for path in (resolve_source(source), directory))
    # Only the files of an earlier run are replaced, so its directory may lie within the source.
    inside = real_source in place.parents and not (place / METRICS).is_file()
    if inside or real_source == place or place in real_source.parents:
        raise ConfigError(
            f"output.overwrite would delete output.directory {directory} and with it model.source "
            f"{source}, which the run trains from; name another directory"
        )


def _check_outside(media: Sequence[str], directory: Path) -> None:
    """Raise ConfigError if the output directory is in the data: its files would be read."""
    place = Path(os.path.realpath(directory))
    for source in media:
        real_media = Path(os.path.realpath(expanded(source)))
        if real_media.is_dir() and (real_media == place or real_media in place.parents):
            raise ConfigError(
                f"output.directory {directory} lies inside media.source {source}, so the files of the run "
                "would be read as data; name a directory next to it"
            )


def resumable_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in an output directory that a run can resume, oldest first."""
    return [Path(path) for path in list_complete(directory / FOLDER, is_run_state)]


def is_run_state(extra: Any) -> bool:
    """Return True if ``extra`` of a checkpoint was written by a run, not a script."""
    return isinstance(extra, dict) and {"step", "schedule", "sequences"} <= extra.keys()


def remove_earlier_run(directory: Path, resumed: Path | None) -> None:
    """Delete an earlier run's files that a later resume would use; on one rank.

    A new run deletes checkpoints, samples, exports and averages; a run that resumes its own checkpoint
    deletes only later checkpoints. Files that no manifest lists stay. Raises WriteError.
    """
    checkpoints = resumable_checkpoints(directory)
    own = None if resumed is None else next((path for path in checkpoints if path.samefile(resumed)), None)
    try:
        # Newest first, so that a kill leaves no gap.
        for path in reversed(checkpoints if own is None else checkpoints[checkpoints.index(own) + 1 :]):
            remove(path, MARKER)
        if own is not None:
            return
        for entry in (directory / SAMPLES).glob("step-*"):
            if _STEP.fullmatch(entry.name):
                delete_samples(entry)
        for pattern in (f"{EXPORTS}/step-*/{MODEL_MARKER}", f"{AVERAGE}/{MODEL_MARKER}"):
            for marker in directory.glob(pattern):
                remove(marker.parent, MODEL_MARKER)
    except (OSError, VerifyError) as error:
        raise WriteError(f"{directory}: the files of an earlier run cannot be removed: {error}") from error
