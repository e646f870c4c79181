"""The output directory of a run: one run at a time has it, and what an earlier one has left there goes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from torch import nn

from zerostart.checkpoint.manifest import MARKER as MODEL_MARKER
from zerostart.checkpoint.manifest import is_inside, saved_at
from zerostart.checkpoint.paths import expanded, inside, is_same, name_of, parent_of, scheme_of, shown_url
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, read_json
from zerostart.checkpoint.write.folders import check_space, free_space, sync_directory, write_whole
from zerostart.checkpoint.write.staging import remove
from zerostart.distributed.world import World
from zerostart.engines.shard import full_shape
from zerostart.errors import (
    CheckpointError,
    ConfigError,
    ReadError,
    VerifyError,
    WriteError,
    ZerostartError,
)
from zerostart.state.resuming.retention import complete
from zerostart.state.resuming.training_state import MARKER
from zerostart.state.resuming.values import decoded
from zerostart.training.adapt.export import AVERAGE, EXPORTS
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.data.cached import is_of_cache
from zerostart.training.loop.locks import hold
from zerostart.training.samples.sampler import FOLDER as SAMPLES
from zerostart.training.samples.sampler import clear_drawn

logger = logging.getLogger("zerostart")

#: In the output directory: the checkpoints, what a run writes first, and its page.
FOLDER, METRICS, PAGE = "checkpoints", "metrics.jsonl", "run.html"
# The lock that a run has while it is at work, and the note of checkpoints that a new run replaces.
_LOCK, _NOTE = ".run.lock", f".{FOLDER}.replaced"
#: What a save of an earlier version has left that was killed.
_LEFT = re.compile(r"\.step-\d{8}\.[0-9a-f]{12}\.saving")
_STEP = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class RunPlace:
    """Where a run writes: a directory of this machine, and the same or a URL for what it saves.

    ``directory`` has its metrics, its page and its samples; ``saved`` the model, checkpoints and exports.
    """

    directory: Path
    saved: Path | str

    @property
    def checkpoints(self) -> Path | str:
        """Where its training checkpoints are."""
        return inside(self.saved, FOLDER)


@contextmanager
def claim_output(config: TrainConfig, world: World) -> Iterator[RunPlace]:
    """The output directory, made if need be, and inside no other run's; collective.

    Raises, on every rank, ConfigError where something is in it that may not go, or the model that is trained
    is, and WriteError where another run is at work in it.
    """
    stack = contextlib.ExitStack()

    # On rank 0: one process has the lock, and the others wait for its answer.
    def claim() -> RunPlace:
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
        if occupied and not (config.output.overwrite or _goes_on(config, directory)):
            raise ConfigError(
                f"output.directory {directory} is not empty; name another, continue its run with "
                "resume=auto, or allow replacing it with output.overwrite=true"
            )
        if occupied and not _goes_on(config, directory):
            _check_source(config.model.source, directory)
        refusal = f"another run is at work in output.directory {directory}: wait for its end, or name another"
        hold(stack, directory / _LOCK, refusal)
        return RunPlace(directory, directory)

    # The lock lasts for the body, and ends with rank 0's process where that is killed.
    with stack:
        yield world.broadcast_object(claim, "claiming the output directory")


def check_room(config: TrainConfig, model: nn.Module, place: RunPlace) -> None:
    """Look at the free space before a run: what it ends with, the trained model, has to find room.

    ``model`` is as it will be trained. Raises WriteError where it finds none, and warns where training
    checkpoints will not.
    """
    if not isinstance(place.saved, Path):
        return
    directory = place.saved
    adapters = config.lora is not None and not config.output.merge
    alone = adapters or config.output.trainable_only or config.output.format == "diffsynth"
    saved = trained = state = 0
    for parameter in model.parameters():
        count = full_shape(parameter).numel()
        saved += count * parameter.itemsize if parameter.requires_grad or not alone else 0
        if parameter.requires_grad:
            # A master in fp32 where the parameter is none, and two moments, as Adam has them.
            trained += count * parameter.itemsize
            state += count * (8 + (4 if parameter.itemsize < 4 else 0))
    check_space(directory, saved, "the trained model")
    if not config.checkpoint.every:
        return
    kept = config.checkpoint.keep + config.checkpoint.best + 1  # the newest is whole before the oldest goes
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
    """Whether an entry of this name does not count where a directory has to be empty."""
    return name in (_LOCK, _NOTE) or is_of_cache(name)


def _check_source(source: str, directory: Path) -> None:
    """Raise ConfigError where to overwrite ``directory`` would be to overwrite what is trained from.

    Within a source that is the case of all but what an earlier run has left there.
    """
    found, place = (Path(os.path.realpath(path)) for path in (resolve_source(source), directory))
    inside = found in place.parents and not (place / METRICS).is_file()
    if inside or found == place or place in found.parents:
        raise ConfigError(
            f"output.overwrite would delete output.directory {directory} and with it model.source "
            f"{source}, which the run trains from; name another directory"
        )


def _check_outside(config: TrainConfig, directory: Path) -> None:
    """Raise ConfigError for an output directory in one of data: what a run writes would be trained on."""
    named = {} if config.media is None else {"media.source": [one.source for one in config.media.sets]}
    if config.data is not None:
        given = config.data.source
        named["data.source"] = [given] if isinstance(given, str) else given
    place = Path(os.path.realpath(directory))
    for key, sources in named.items():
        for source in sources:
            found = Path(os.path.realpath(expanded(source)))
            if found.is_dir() and (found == place or found in place.parents):
                raise ConfigError(
                    f"output.directory {directory} lies inside {key} {source}, so the files of the run "
                    "would be read as data; name a directory beside it"
                )


def _goes_on(config: TrainConfig, directory: Path) -> bool:
    """Whether ``directory`` is that of a run which this one continues."""
    auto = config.resume is not None and config.resume.path == "auto"
    # A run writes its metrics before anything else: where there are none no run has begun.
    return auto and (directory / METRICS).is_file()


@contextmanager
def set_aside(place: RunPlace, resumed: Path | str | None, world: World) -> Iterator[None]:
    """Make an earlier run's checkpoints unusable for resuming, in one step and before anything else.

    A note lists them; they are removed by ``remove_earlier_run``, and a run that fails before that takes the
    note back. Where the run resumes from one of them, ``resumed``, all stay. Collective. Raises WriteError.
    """
    directory = place.directory
    note, folder = directory / _NOTE, place.checkpoints

    def write() -> tuple[bool, bytes | None]:
        # Below a URL there are none but those of the run that goes on.
        kept = _is_own(resumed, folder) or not isinstance(folder, Path)
        earlier = [] if kept else complete(folder, is_run_state)
        there = {path.name: _saved(path) for path in earlier if isinstance(path, Path)}
        if not there:
            return False, None
        try:
            # A run that was killed may have left a note of its own: it comes back where this one fails.
            before = note.read_bytes() if note.is_file() else None
            write_whole(note, json.dumps(there).encode(), directory / f"{_NOTE}.part")
            sync_directory(directory)
        except OSError as error:
            raise WriteError(f"the checkpoints in {folder} cannot be renamed: {error.strerror}") from error
        return True, before

    written, before = world.broadcast_object(write, "setting older checkpoints aside")
    try:
        yield
    except BaseException:
        # The run has failed before it removed anything (or has removed them, and with them the note).
        if written and world.rank == 0:
            with contextlib.suppress(OSError):
                if before is None:
                    note.unlink()  # not there any more, if they are removed
                elif note.is_file():
                    write_whole(note, before, directory / f"{_NOTE}.part")
        raise


def resumable_checkpoints(place: RunPlace) -> list[Path | str]:
    """The checkpoints of a run that can be resumed, the oldest first.

    Those are not among them that a run has set aside which was killed before it removed them.
    """
    # By the time of saving, too: under the name of one that was set aside there may be a newer one.
    aside = _noted(place.directory)
    found = complete(place.checkpoints, is_resumable)
    return [
        path
        for path in found
        if not isinstance(path, Path) or path.name not in aside or aside[path.name] != _saved(path)
    ]


def _saved(path: Path) -> int:
    marker = path / MARKER
    return saved_at(read_json(marker, "training state", MAX_DOCUMENT_BYTES), marker)


def _noted(directory: Path) -> dict[str, Any]:
    """When those were saved that are set aside, by name."""
    note = directory / _NOTE
    with contextlib.suppress(ZerostartError):  # damaged, or made up
        found = read_json(note, "note of checkpoints") if note.is_file() else {}
        return {name: saved for name, saved in found.items() if is_inside(name) and "/" not in name}
    return {}


def is_run_state(extra: Any) -> bool:
    """Whether a checkpoint's ``extra``, as it is in the document, is what a run puts there.

    What a script has saved in the same folder by itself is none of a run's, and stays.
    """
    return isinstance(extra, dict) and {"step", "schedule", "sequences"} <= extra.keys()


def is_resumable(extra: Any) -> bool:
    """Whether a run's checkpoint can be resumed, retained or compared: its weights are finite.

    Checkpoints say so since they are looked at; of one from before, a last loss that is not finite says no.
    """
    if not is_run_state(extra):
        return False
    last = decoded(extra.get("losses", [None]), {})[-1]
    return "finite" in extra or not isinstance(last, float) or math.isfinite(last)


def remove_earlier_run(place: RunPlace, resumed: Path | str | None) -> None:
    """Remove what would be taken for a part of the run that begins now, or resumes from ``resumed``.

    Of another run these are checkpoints, samples, exports and averages; of the same one, checkpoints after
    ``resumed``. Of all of them those files go that they name, and whatever else lies there stays. On one
    rank. Raises WriteError.
    """
    directory, folder = place.directory, place.checkpoints
    if not isinstance(folder, Path):
        if resumed is not None and _is_own(resumed, folder):
            _remove_later(folder, resumed)
        return
    try:
        # In this order: what the note lists, then the note. A run that is killed in between leaves the note,
        # and with it the rest stays unusable.
        for name, saved in _noted(directory).items():
            _remove_aside(folder / name, saved, resumed)
        for entry in folder.glob(".step-*"):
            if _LEFT.fullmatch(entry.name):
                shutil.rmtree(entry)
        (directory / _NOTE).unlink(missing_ok=True)
        if resumed is not None and _is_own(resumed, folder):
            _remove_later(folder, resumed)
            return
        for entry in (directory / SAMPLES).glob("step-*"):
            if _STEP.fullmatch(entry.name):
                clear_drawn(entry)
        for pattern in (f"{EXPORTS}/step-*/{MODEL_MARKER}", f"{AVERAGE}/{MODEL_MARKER}"):
            for marker in directory.glob(pattern):
                with contextlib.suppress(VerifyError):  # damaged: nobody knows what is of it
                    remove(marker.parent, MODEL_MARKER)
    except (OSError, VerifyError) as error:
        raise WriteError(f"{directory}: the files of an earlier run cannot be removed: {error}") from error


def _remove_later(folder: Path | str, resumed: Path | str) -> None:
    found = complete(folder, is_run_state)
    # The newest first: a run that is killed here leaves a row of checkpoints without a gap.
    for path in reversed(found[[name_of(one) for one in found].index(name_of(resumed)) + 1 :]):
        remove(path, MARKER)


def _remove_aside(path: Path, saved: int, resumed: Path | str | None) -> None:
    """Remove a checkpoint that was set aside, if it is still the one that was ``saved`` then."""
    if isinstance(resumed, Path) and path.exists() and path.samefile(resumed):
        return
    with contextlib.suppress(CheckpointError, ReadError, VerifyError):  # damaged: what is of it is not known
        if (path / MARKER).is_file() and _saved(path) == saved:
            remove(path, MARKER)


def _is_own(resumed: Path | str | None, folder: Path | str) -> bool:
    return resumed is not None and is_same(parent_of(resumed), folder)
