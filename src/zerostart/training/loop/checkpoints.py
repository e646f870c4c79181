"""Training checkpoints of a run: find, save and resume them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerostart.checkpoint.formats.saved_state import open_saved_state
from zerostart.checkpoint.paths import expanded
from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError
from zerostart.live.training import StateTensor
from zerostart.state.resuming.background import Saving
from zerostart.state.resuming.load_state import read_document, restore_state
from zerostart.state.resuming.retention import iterate_states, list_complete, prune
from zerostart.state.resuming.save_state import write_state
from zerostart.state.resuming.values import decode
from zerostart.training.config.configuration import CheckpointConfig
from zerostart.training.loop.course import changes
from zerostart.training.loop.output_directory import FOLDER, is_run_state, resumable_checkpoints
from zerostart.training.loop.session import Session

logger = logging.getLogger("zerostart")


@dataclass
class History:
    """Progress of a run."""

    steps: int = 0
    first_loss: float | None = None  # of the first step
    last_loss: float | None = None
    held_out: dict[int, float] = field(default_factory=dict)  # losses by step

    def add_step(self, loss: float) -> None:
        """Add a step."""
        self.steps += 1
        if self.steps == 1:
            self.first_loss = loss
        self.last_loss = loss


def checkpoint_to_resume(resume: str | None, directory: Path, world: World) -> Path | None:
    """Find the checkpoint to resume from, the same on every rank; None for a new run.

    Raises ConfigError if ``resume`` is not a complete checkpoint.
    """

    # Rank 0 looks: other machines may see other files, or see them later.
    def find() -> Path | None:
        if resume is None:
            return None
        if resume == "auto":
            return next(reversed(resumable_checkpoints(directory)), None)
        path = expanded(resume).absolute()
        if path in list_complete(path.parent):
            return path
        newest = _find_newest(path) or "none (leave resume out to begin at step 0)"
        raise ConfigError(f"resume: {path} is not a complete checkpoint; the newest near it is {newest}")

    checkpoint: Path | None = world.broadcast_object(find, "looking for a checkpoint")
    return checkpoint


def _find_newest(path: Path) -> Path | None:
    """Find the newest complete checkpoint below ``path``, or else around it."""
    for place in (path, *path.parents[:2]):
        if place in list_complete(place.parent):
            return place
        folders = (place, place / FOLDER, *place.glob(f"*/{FOLDER}"))
        if states := [state for folder in folders for state in iterate_states(folder)]:
            return max(states, key=lambda state: state[2])[0]
    return None


@dataclass
class Checkpoints:
    """Saves a session at intervals, and restores it from a checkpoint.

    ``course``: the values that determine the course of the run; ``adapted``: it trains a LoRA.
    """

    config: CheckpointConfig
    directory: Path
    session: Session
    course: Mapping[str, Any]
    adapted: bool
    _last_saving: Saving | None = None
    _newest: Path | None = None

    @property
    def recovery_hint(self) -> str:
        """Advice for a run that has failed, the same on every rank."""
        if self._newest is None:
            return "There is no checkpoint of this run: start again with a lower train.learning_rate"
        return f"The last checkpoint with finite weights is {self._newest}"

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.session.engine.owns_optimizer else self.session.optimizer

    @property
    def _averages(self) -> list[StateTensor]:
        return [] if self.session.ema is None else self.session.ema.averages

    def due(self, step: int, stopped: bool) -> bool:
        """Return True if ``step`` is to be saved, or ends a ``stopped`` run."""
        return bool(self.config.every) and (stopped or step % self.config.every == 0)

    def save(self, history: History) -> None:
        """Save the session and its history, and delete older checkpoints; collective."""
        # In examples, not in batches or steps: a run with another number of ranks or another batch size has
        # to find the same place.
        epoch, batches = self.session.position
        extra = {
            "step": history.steps,
            "epoch": epoch,
            "sequences": batches * self.session.items_a_round,
            "course": dict(self.course),
            "order": self.session.buckets.order,
            "schedule": self.session.scheduler.state_dict(),
            "losses": [history.first_loss, history.last_loss],
            "held_out": [list(item) for item in history.held_out.items()],
            "ema": None if self.session.ema is None else self.session.ema.updates,
        }
        # Eight digits, so that names sort as steps do.
        path = self.directory / FOLDER / f"step-{history.steps:08d}"
        self._last_saving = write_state(
            path,
            self.session.model,
            self._optimizer,
            extra,
            not self.config.background,
            frozen=not self.adapted,
            extra_tensors=self._averages,
        )
        self._newest = path
        world = current_world()
        # Only complete ones count: while a save is written in the background, one more old one stays.
        with world.phase("removing older checkpoints"):
            if world.rank == 0:
                prune(self.directory / FOLDER, self.config.keep, self.config.best, _score, is_run_state)

    def resume(self, path: Path) -> tuple[History, Iterator[dict[str, torch.Tensor]]]:
        """Restore ``path``; return its history and the batches that follow; collective.

        Raises ConfigError for the checkpoint of another run, naming the differences.
        """
        # Compared before anything of the session changes.
        extra = current_world().broadcast_object(lambda: _extra(path), "reading the checkpoint's document")
        if other := changes(extra["course"], self.course):
            model = "" if self.adapted else f", with model.source={path / 'model'}"
            raise ConfigError(
                f"{path} belongs to another run: {'; '.join(other)}. Restore the earlier values, or "
                f"start a new run in another output.directory{model}"
            )
        epoch, done, order = extra["epoch"], extra["sequences"], self.session.buckets.order
        if extra.get("order") not in (None, order) and done:
            logger.warning(
                "%s was saved in an epoch of another order (%s, now %s): of this epoch some examples may "
                "come again, and others not at all",
                path,
                extra["order"],
                order,
            )
        # Before random states are restored: the first batch may draw.
        batches = self.session.batches_after(epoch, done)
        restore_state(path, self.session.model, self._optimizer, self._averages)
        if self.session.ema is not None:
            # The number of updates determines the decay of the next one.
            self.session.ema.updates = extra["ema"]
        self.session.scheduler.load_state_dict(extra["schedule"])
        first, last = extra["losses"]
        self._newest = path
        return History(extra["step"], first, last, dict(extra["held_out"])), batches

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Wait at the end of the block for an unfinished checkpoint, and raise its error.

        After an error in the block, that of the checkpoint is only logged.
        """
        try:
            yield
        except Exception:
            try:
                self._wait()
            except Exception as error:
                logger.warning("the checkpoint that was being written was lost: %s", error)
            raise
        self._wait()

    def _wait(self) -> None:
        if self._last_saving is not None:
            self._last_saving.wait()


def _extra(path: Path) -> Any:
    extra = open_saved_state(path, (), read_document)[0]["extra"]
    if not is_run_state(extra):
        raise ConfigError(f"resume: {path} was not saved by zerostart train; name a checkpoint that was")
    return decode(extra, {})


def _score(extra: object) -> float | None:
    """Return the negative held-out loss of a checkpoint's step, if it was measured."""
    run_state = decode(extra, {})
    if not isinstance(run_state, dict) or "held_out" not in run_state:
        return None  # a checkpoint of a script
    loss = dict(run_state["held_out"]).get(run_state["step"])
    return None if loss is None else -float(loss)
