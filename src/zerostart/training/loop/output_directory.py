"""The output directory of a run: its lock, and what an earlier run has left in it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from torch import nn

from zerostart.checkpoint.manifest import MARKER as MODEL_MARKER
from zerostart.checkpoint.paths import expanded, scheme_of, shown_url
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.write.folders import check_space, free_space
from zerostart.checkpoint.write.staging import remove
from zerostart.distributed.world import World
from zerostart.engines.shard import full_shape
from zerostart.errors import ConfigError, VerifyError, WriteError
from zerostart.state.resuming.retention import complete
from zerostart.state.resuming.training_state import MARKER
from zerostart.training.adapt.export import AVERAGE, EXPORTS
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.data.cached import is_of_cache
from zerostart.training.loop.locks import hold
from zerostart.training.samples.sampler import FOLDER as SAMPLES
from zerostart.training.samples.sampler import clear_drawn

logger = logging.getLogger("zerostart")

#: Names in the output directory: the folder of checkpoints, and the figures of each step.
FOLDER, METRICS = "checkpoints", "metrics.jsonl"
_LOCK = ".run.lock"
_STEP = re.compile(r"step-\d{8}")


@contextmanager
def claim_output(config: TrainConfig, world: World) -> Iterator[Path]:
    """Make and lock the output directory while the body runs; collective.

    Raises, on every rank, ConfigError where the directory has files that the run may not replace or lies
    within the data, and WriteError where another run has locked it.
    """
    stack = contextlib.ExitStack()

    def claim() -> Path:
        given = config.output.directory
        if scheme_of(given):
            raise ConfigError(f"output.directory {shown_url(given)}: train to a local directory and copy it")
        directory = expanded(given).absolute()
        _check_outside(config, directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            occupied = not all(_is_free(entry.name) for entry in directory.iterdir())
        except OSError as error:
            raise ConfigError(f"output.directory {directory}: {error.strerror}") from error
        if occupied and not (config.output.overwrite or _continues(config, directory)):
            raise ConfigError(
                f"output.directory {directory} is not empty; name another, continue its run with "
                "resume=auto, or allow replacing it with output.overwrite=true"
            )
        if occupied and not _continues(config, directory):
            _check_source(config.model.source, directory)
        refusal = f"another run is at work in output.directory {directory}: wait for its end, or name another"
        hold(stack, directory / _LOCK, refusal)
        return directory

    # Rank 0 holds the lock. It ends with that process, also where the process is killed.
    with stack:
        directory: Path = world.broadcast_object(claim, "claiming the output directory")
        with world.phase("making the directory of the run"):
            directory.mkdir(parents=True, exist_ok=True)  # machines need not share a file system
        yield directory


def check_room(config: TrainConfig, model: nn.Module, directory: Path) -> None:
    """Raise WriteError if the trained model does not fit on the disk; warn if checkpoints may not.

    ``model`` is the model as it will be trained, with its adapters.
    """
    adapters = config.lora is not None and not config.output.merge
    alone = adapters or config.output.trainable_only or config.output.format == "diffsynth"
    saved = trained = state = 0
    for parameter in model.parameters():
        count = full_shape(parameter).numel()
        saved += count * parameter.itemsize if parameter.requires_grad or not alone else 0
        if parameter.requires_grad:
            # Adam keeps two moments in fp32, and a master in fp32 of a parameter of 16 bits.
            trained += count * parameter.itemsize
            state += count * (8 + (4 if parameter.itemsize < 4 else 0))
    check_space(directory, saved, "the trained model")
    if not config.checkpoint.every:
        return
    kept = config.checkpoint.keep + config.checkpoint.best + 1  # the oldest goes after the newest is whole
    each = (trained if config.lora is not None else max(saved, trained)) + state
    free = free_space(directory)
    if free is not None and saved + kept * each > free:
        logger.warning(
            "%s has %s free, and this run may need %s: %s for the trained model, and %s for each of %d "
            "training checkpoints (checkpoint.keep and checkpoint.best, and the one that is being written)",
            directory,
            *(decimal(nbytes) for nbytes in (free, saved + kept * each, saved, each)),
            kept,
        )


def _is_free(name: str) -> bool:
    return name == _LOCK or is_of_cache(name)


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


def _check_outside(config: TrainConfig, directory: Path) -> None:
    """Raise ConfigError if the output directory lies in the data, where its files would be trained on."""
    named = {} if config.media is None else {"media.source": [one.source for one in config.media.sets]}
    place = Path(os.path.realpath(directory))
    for key, sources in named.items():
        for source in sources:
            found = Path(os.path.realpath(expanded(source)))
            if found.is_dir() and (found == place or found in place.parents):
                raise ConfigError(
                    f"output.directory {directory} lies inside {key} {source}, so the files of the run "
                    "would be read as data; name a directory next to it"
                )


def _continues(config: TrainConfig, directory: Path) -> bool:
    """Return True if this run continues the run that ``directory`` belongs to."""
    # A run writes its metrics before anything else.
    return config.resume == "auto" and (directory / METRICS).is_file()


def resumable_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in an output directory that a run can resume, the oldest first."""
    return [Path(path) for path in complete(directory / FOLDER, is_run_state)]


def is_run_state(extra: Any) -> bool:
    """Return True if ``extra`` of a checkpoint was written by a run, and not by a user's script."""
    return isinstance(extra, dict) and {"step", "schedule", "sequences"} <= extra.keys()


def remove_earlier_run(directory: Path, resumed: Path | None) -> None:
    """Remove the files that a later resume would take for files of this run; on one rank.

    A new run removes the earlier run's checkpoints, samples, exports and averages. A run that resumes from
    its own checkpoint removes later checkpoints only. Files that no manifest lists stay. Raises WriteError.
    """
    checkpoints = directory / FOLDER
    found = [Path(path) for path in complete(checkpoints, is_run_state)]
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
