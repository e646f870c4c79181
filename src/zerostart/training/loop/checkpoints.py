"""Training checkpoints of a run: where they are, what is in them beside the training state, and resuming."""

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
from zerostart.state.resuming.retention import complete, prune
from zerostart.state.resuming.save_state import write_state
from zerostart.state.resuming.training_state import MARKER
from zerostart.state.resuming.values import decoded
from zerostart.training.config.configuration import CheckpointConfig
from zerostart.training.loop.course import changes
from zerostart.training.loop.output_directory import FOLDER, is_run_state, resumable_checkpoints
from zerostart.training.loop.session import Session

logger = logging.getLogger("zerostart")


@dataclass
class History:
    """What a run has seen so far: steps done, losses of the first and the last, and held-out ones by step."""

    steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    held_out: dict[int, float] = field(default_factory=dict)

    def note(self, loss: float) -> None:
        """One more step has been done."""
        self.steps += 1
        if self.steps == 1:
            self.first_loss = loss
        self.last_loss = loss


def checkpoint_to_resume(resume: str | None, directory: Path, world: World) -> Path | None:
    """Find the checkpoint that the run resumes from, the same on every rank; None for a new run.

    Raises :class:`ConfigError` for a ``resume`` that is not a complete checkpoint.
    """

    # Rank 0 looks: other machines may see other files, or see them later.
    def find() -> Path | None:
        if resume is None:
            return None
        if resume == "auto":
            return next(reversed(resumable_checkpoints(directory)), None)
        path = expanded(resume).absolute()
        if path in complete(path.parent):
            return path
        found = _newest_near(path)
        remedy = (
            "no complete one is in it or around it; leave resume out to begin at step 0"
            if found is None
            else f"the newest complete one in it or around it is {found}"
        )
        raise ConfigError(f"resume: {path} is not a complete checkpoint; {remedy}")

    found: Path | None = world.broadcast_object(find, "looking for a checkpoint")
    return found


def _newest_near(path: Path) -> Path | None:
    """The newest complete checkpoint below ``path``, or otherwise around it."""
    for place in (path, *path.parents[:2]):
        if place in complete(place.parent):
            return place
        folders = (place, place / FOLDER, *place.glob(f"*/{FOLDER}"))
        if states := [state for folder in folders for state in complete(folder)]:
            return max(states, key=lambda state: (state / MARKER).stat().st_mtime)
    return None


class Checkpoints:
    """Saves a session every so many steps, and brings one to where a checkpoint was saved."""

    def __init__(
        self,
        config: CheckpointConfig,
        directory: Path,
        session: Session,
        course: Mapping[str, Any],
        adapted: bool,
    ) -> None:
        """``course`` has the values that decide the course of the run; ``adapted``: it trains a LoRA."""
        self._config = config
        self._folder = directory / FOLDER
        self._session = session
        self._course = course
        self._adapted = adapted
        # The save under way or done last, to be waited for in the end; None before the first.
        self._last: Saving | None = None
        self._newest: Path | None = None

    @property
    def recovery_hint(self) -> str:
        """What somebody can do whose run has ended, the same on every rank."""
        if self._newest is None:
            return "There is no checkpoint of this run: start again with a lower train.learning_rate"
        return f"The last checkpoint with finite weights is {self._newest}"

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """None where the engine has it."""
        return None if self._session.engine.owns_optimizer else self._session.optimizer

    @property
    def _averages(self) -> list[StateTensor]:
        return [] if self._session.ema is None else self._session.ema.averages

    def due(self, step: int, stopped: bool) -> bool:
        """Whether to save after ``step``; a run that ends early always does."""
        return bool(self._config.every) and (stopped or step % self._config.every == 0)

    def save(self, history: History) -> None:
        """Save the session and what it has seen; collective. Older checkpoints than asked for go."""
        # In examples, not in batches or steps: a run on another number of ranks, or with batches of another
        # size, has to find the same place.
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
        self._last = write_state(
            path,
            self._session.model,
            self._optimizer,
            extra,
            not self._config.background,
            frozen=not self._adapted,
            beside=self._averages,
        )
        self._newest = path
        world = current_world()
        # Only complete ones count, so that where a save is written in the background as many older ones stay
        # as are asked for until it is whole.
        with world.phase("removing older checkpoints"):
            if world.rank == 0:
                prune(self._folder, self._config.keep, self._config.best, _how_good, is_run_state)

    def resume(self, path: Path) -> tuple[History, Iterator[dict[str, torch.Tensor]]]:
        """Restore ``path``; gives what its run had seen, and the batches that come after; collective.

        Raises :class:`ConfigError` for the checkpoint of another run, saying in what it is another.
        """
        # What makes it another run's is found from its document, before anything of the session changes.
        extra = current_world().broadcast_object(lambda: _extra(path), "reading the checkpoint's document")
        # Keys that only one of the two has are no change: they came with another version.
        if other := changes(extra["course"], self._course):
            model = "" if self._adapted else f", with model.source={path / 'model'}"
            raise ConfigError(
                f"{path} belongs to another run: {'; '.join(other)}. Restore the earlier values, or "
                f"start a new run in another output.directory{model}"
            )
        epoch, had, order = extra["epoch"], extra["sequences"], self._session.buckets.order
        if extra.get("order") not in (None, order) and had:
            logger.warning(
                "%s was saved in an epoch of another order (%s, now %s): of this epoch some examples may "
                "come again, and others not at all",
                path,
                extra["order"],
                order,
            )
        # Before random states are restored: the first batch may draw.
        batches = self._session.batches_after(epoch, had)
        restore_state(path, self._session.model, self._optimizer, self._averages)
        if self._session.ema is not None:
            # The averages themselves are filled by the load; how often they were updated decides the decay of
            # the next one.
            self._session.ema.updates = extra["ema"]
        self._session.scheduler.load_state_dict(extra["schedule"])
        first, last = extra["losses"]
        self._newest = path
        return History(extra["step"], first, last, dict(extra["held_out"])), batches

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Wait in the end for a checkpoint that is being written; raises what it failed with.

        Also where the body fails, which is what the checkpoint is for; its own failure is logged then.
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
        if self._last is not None:
            self._last.wait()


def _extra(path: Path) -> Any:
    extra = open_saved_state(path, (), read_document)[0]["extra"]
    if not is_run_state(extra):
        raise ConfigError(f"resume: {path} was not saved by zerostart train; name a checkpoint that was")
    return decoded(extra, {})


def _how_good(extra: object) -> float | None:
    """The held-out loss of a checkpoint's own step, less being more; None where it was not measured there."""
    known = decoded(extra, {})
    if not isinstance(known, dict) or "held_out" not in known:
        return None  # not saved by a run
    loss = dict(known["held_out"]).get(known["step"])
    return None if loss is None else -float(loss)
