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
from zerostart.state.resuming.retention import list_complete, prune
from zerostart.state.resuming.save_state import write_state
from zerostart.state.resuming.values import decode
from zerostart.training.config.configuration import CheckpointConfig
from zerostart.training.loop.course import changes
from zerostart.training.loop.output_directory import FOLDER, is_run_state, resumable_checkpoints
from zerostart.training.loop.session import Session

logger = logging.getLogger("zerostart")


@dataclass
class History:
    """Progress of a run: steps done, losses of the first and the last step, and held-out losses by step."""

    steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    held_out: dict[int, float] = field(default_factory=dict)

    def note(self, loss: float) -> None:
        """Add a step."""
        self.steps += 1
        if self.steps == 1:
            self.first_loss = loss
        self.last_loss = loss


def checkpoint_to_resume(resume: str | None, directory: Path, world: World) -> Path | None:
    """Find the checkpoint that the run resumes from, the same on every rank; None for a new run.

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
        raise ConfigError(
            f"resume: {path} is not a complete checkpoint; name a step-... folder in {FOLDER} of a run's "
            "output directory, or set resume=auto"
        )

    found: Path | None = world.broadcast_object(find, "looking for a checkpoint")
    return found


class Checkpoints:
    """Saves a session at intervals, and restores it from a checkpoint."""

    def __init__(
        self,
        config: CheckpointConfig,
        directory: Path,
        session: Session,
        course: Mapping[str, Any],
        adapted: bool,
    ) -> None:
        """``course``: the values that determine the course of the run; ``adapted``: it trains a LoRA."""
        self._config = config
        self._folder = directory / FOLDER
        self._session = session
        self._course = course
        self._adapted = adapted
        self._last_saving: Saving | None = None
        self._newest: Path | None = None

    @property
    def recovery_hint(self) -> str:
        """Advice for a run that has failed, the same on every rank."""
        if self._newest is None:
            return "There is no checkpoint of this run: start again with a lower train.learning_rate"
        return f"The last checkpoint with finite weights is {self._newest}"

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self._session.engine.owns_optimizer else self._session.optimizer

    @property
    def _averages(self) -> list[StateTensor]:
        return [] if self._session.ema is None else self._session.ema.averages

    def due(self, step: int, stopped: bool) -> bool:
        """Return True if ``step`` is to be saved, as the last step of a ``stopped`` run is."""
        return bool(self._config.every) and (stopped or step % self._config.every == 0)

    def save(self, history: History) -> None:
        """Save the session and its history, and delete older checkpoints; collective."""
        # In examples, not in batches or steps: a run with another number of ranks or another batch size has
        # to find the same place.
        epoch, batches = self._session.position
        extra = {
            "step": history.steps,
            "epoch": epoch,
            "sequences": batches * self._session.items_a_round,
            "course": dict(self._course),
            "order": self._session.buckets.order,
            "schedule": self._session.scheduler.state_dict(),
            "losses": [history.first_loss, history.last_loss],
            "held_out": [list(item) for item in history.held_out.items()],
            "ema": None if self._session.ema is None else self._session.ema.updates,
        }
        # Eight digits, so that names sort as steps do.
        path = self._folder / f"step-{history.steps:08d}"
        self._last_saving = write_state(
            path,
            self._session.model,
            self._optimizer,
            extra,
            not self._config.background,
            frozen=not self._adapted,
            extra_tensors=self._averages,
        )
        self._newest = path
        world = current_world()
        # Only complete ones count: while a save is written in the background, one more old one stays.
        with world.phase("removing older checkpoints"):
            if world.rank == 0:
                prune(self._folder, self._config.keep, self._config.best, _score, is_run_state)

    def resume(self, path: Path) -> tuple[History, Iterator[dict[str, torch.Tensor]]]:
        """Restore ``path``; return its history and the batches that follow; collective.

        Raises ConfigError for the checkpoint of another run, naming the differences.
        """
        # Compared before anything of the session changes.
        extra = current_world().broadcast_object(lambda: _extra(path), "reading the checkpoint's document")
        if other := changes(extra["course"], self._course):
            model = "" if self._adapted else f", with model.source={path / 'model'}"
            raise ConfigError(
                f"{path} belongs to another run: {'; '.join(other)}. Restore the earlier values, or "
                f"start a new run in another output.directory{model}"
            )
        epoch, done, order = extra["epoch"], extra["sequences"], self._session.buckets.order
        if extra.get("order") not in (None, order) and done:
            logger.warning(
                "%s was saved in an epoch of another order (%s, now %s): of this epoch some examples may "
                "come again, and others not at all",
                path,
                extra["order"],
                order,
            )
        # Before random states are restored: the first batch may draw.
        batches = self._session.batches_after(epoch, done)
        restore_state(path, self._session.model, self._optimizer, self._averages)
        if self._session.ema is not None:
            # The number of updates determines the decay of the next one.
            self._session.ema.updates = extra["ema"]
        self._session.scheduler.load_state_dict(extra["schedule"])
        first, last = extra["losses"]
        self._newest = path
        return History(extra["step"], first, last, dict(extra["held_out"])), batches

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Wait at the end of the block for a checkpoint that is being written; raise its error.

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
    """Return the negative held-out loss of a checkpoint's own step; None if it was not measured there."""
    known = decode(extra, {})
    if not isinstance(known, dict) or "held_out" not in known:
        return None  # a checkpoint of a script
    loss = dict(known["held_out"]).get(known["step"])
    return None if loss is None else -float(loss)
