"""The training run: data, load, train, evaluate, save; the same on every rank."""

from __future__ import annotations

import functools
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

import zerostart
from zerostart.distributed.failures import beyond_telling
from zerostart.distributed.world import World, current_world
from zerostart.errors import DivergedError, PeerError, WriteError
from zerostart.live.model import record_of
from zerostart.state.saving.hub import check_repository, push
from zerostart.training.adapt.export import check_export, export_model, export_step
from zerostart.training.adapt.trained import choose_trained, round_to
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.engine_config import check_launcher
from zerostart.training.loop.batches import epochs_as_steps
from zerostart.training.loop.checkpoints import Checkpoints, History, checkpoint_to_resume
from zerostart.training.loop.evaluate import HeldOut
from zerostart.training.loop.failures import Divergence, Failures, is_finite, unreported
from zerostart.training.loop.fingerprint import fingerprint_of, read_inputs
from zerostart.training.loop.optimizers import check_optimizer
from zerostart.training.loop.output_directory import (
    METRICS,
    check_room,
    claim_output,
    remove_earlier_run,
    resumable_checkpoints,
)
from zerostart.training.loop.progress import Display, Metrics, peak_memory_bytes, shown_loss
from zerostart.training.loop.session import Session, check_trackers, open_session
from zerostart.training.loop.task import Batch
from zerostart.training.samples.sampler import Sampler, open_sampler

logger = logging.getLogger("zerostart")


@dataclass(frozen=True)
class TrainResult:
    """What came of a run: the same values on every rank.

    ``steps`` were done (fewer than asked for when ``stopped``); ``first_loss`` and ``last_loss`` are the
    training losses of the first and the last of them (None where nothing had a weight); ``held_out`` has the
    loss on held-out examples by step.
    """

    directory: str
    steps: int
    stopped: bool
    first_loss: float | None
    last_loss: float | None
    held_out: dict[int, float]

    def __str__(self) -> str:
        lines = [
            f"{'stopped' if self.stopped else 'trained'} after {self.steps} steps: "
            f"training loss {shown_loss(self.first_loss)} -> {shown_loss(self.last_loss)}"
        ]
        if len(self.held_out) > 1:
            before, *_, after = self.held_out.values()
            lines.append(f"held-out loss {before:.4f} -> {after:.4f}")
        return "\n".join([*lines, f"model saved in {self.directory}"])


def train(config: TrainConfig) -> TrainResult:
    """Load, train and save as ``config`` says; call it in every rank of an initialised process group.

    SIGINT or SIGTERM on any rank ends the run after the step in hand, on all ranks, and the model is
    saved as it is then. Raises :class:`ZerostartError`, with the same text on every rank where all fail.
    """
    world = current_world()
    with world.phase("checking the surroundings"):
        check_trackers(config.tracking.trackers)
        check_launcher(config)
        check_optimizer(config.train, config.engine.chosen())
        if config.output.push_to_hub is not None and world.rank == 0:
            check_repository(
                config.output.push_to_hub, config.output.hub_private
            )  # a mistake is told now, and not after the run
    # Claimed before a checkpoint is looked for: until then another run may be writing or removing here.
    with claim_output(config, world) as directory:
        resumed = checkpoint_to_resume(config.resume, directory, world)
        output = config.output.model_copy(update={"directory": str(directory)})
        return _train(config.model_copy(update={"output": output}), directory, resumed, world)


def _train(config: TrainConfig, directory: Path, resumed: Path | None, world: World) -> TrainResult:
    # Data before the model: a mistake in them is told before minutes of loading. Files of an earlier run stay
    # until ``remove_earlier_run``, in the loop; a run that fails by then has cost nobody anything.
    inputs = read_inputs(config, world)
    task = inputs.task
    # Only now: how many steps an epoch is depends on how many examples are held out.
    with world.phase("counting the steps"):
        steps = epochs_as_steps(inputs.items, task, config.train, world.size)
        config = config.model_copy(update={"train": steps})
    with world.phase("looking at the samples"):
        sampler = open_sampler(config, inputs.drawing, task, directory)
    # Parameters that the checkpoint lacks are initialised from the default seed: the same on every rank.
    torch.manual_seed(config.train.seed)
    model = zerostart.load(
        **_arguments(config) | {"source": task.source},
        model=task.builder(),
        engine_config=inputs.engine_config,
        dtype=getattr(torch, config.dtype),
    )
    # What is trained is held in fp32 all the same; without ``fp32_masters`` it starts from the values that a
    # load in bf16 would have given.
    if config.trains_masters and not config.model.fp32_masters and config.lora is None:
        round_to(model, torch.bfloat16)
    if checkpointing := config.train.checkpoint_blocks:
        with world.phase("checkpointing blocks"):
            zerostart.checkpoint_blocks(model, offload=checkpointing == "offload")
    with (
        world.phase("training"),
        Display(
            config.train.last_step,
            directory / METRICS,
            config.logging.every,
            task.counted,
            active=world.rank == 0,
            skip_unwritable=config.checkpoint.skip_unwritable,
        ) as display,
        StopSignal() as stop,
    ):
        # What is trained is chosen before the engine wraps the model: it makes an optimizer of those alone.
        display.say(str(zerostart.report(model)))
        task.begin(model)
        if told := choose_trained(model, config, world):
            display.say(told)
        check_export(model, config)
        with world.phase("looking at the free space"):
            if world.rank == 0:
                check_room(config, model, directory)
        # The engine wraps the model and makes its optimizer; then the course is known, and compared with that
        # of the checkpoint; and only after that anything of an earlier run is removed.
        session = open_session(config, model, task, inputs.items)
        course = fingerprint_of(config, model, inputs.items.digest(), world)
        checkpoints = Checkpoints(config.checkpoint, directory, session, course)
        exports = functools.partial(export_step, model, task, directory, session.ema)
        run = _Run(config, session, inputs.held_out, display, stop, checkpoints, exports, sampler)
        with unreported(), _peers_named(directory), checkpoints.ended():
            run.to_the_end(resumed, directory)
            # Inside, so that when this raises, a checkpoint that is still being written is waited for: it is
            # what the error names.
            run.check_finite()
        display.say("saving the model")
        result = run.result(directory)
        export_model(model, task, directory, result.steps, session.ema)
        run.divergence.check_end(result.directory)
        display.say(str(result))
        if (repository := config.output.push_to_hub) is not None:
            facts = _card_facts(config, session, result, world)
            root = record_of(model).catalog.root
            pushed = push(directory, repository, root, facts, world, config.output.hub_private)
            display.say(f"pushed to {pushed}")
    session.end()
    return result


def _card_facts(
    config: TrainConfig, session: Session, result: TrainResult, world: World
) -> dict[str, object]:
    sources = [] if config.media is None else [one.source for one in config.media.sets]
    facts: dict[str, object] = {
        "task": config.task.name,
        "data": ", ".join(Path(source).name for source in sources),
        "steps": result.steps,
        "training loss": f"{shown_loss(result.first_loss)} to {shown_loss(result.last_loss)}",
        "learning rate": config.train.learning_rate,
        "sharding": f"{session.engine.title} on {world.size} {'rank' if world.size == 1 else 'ranks'}",
    }
    if result.held_out:
        *_, last = result.held_out.values()
        facts["held-out loss"] = f"{last:.4f}"
    return {name: value for name, value in facts.items() if value != ""}


#: The arguments of ``zerostart.load`` that a configuration has, and the key of each.
LOAD_KEYS = {
    "source": "model.source",
    "engine": "engine.given",
    "zero_stage": "engine.zero_stage",
    "strict": "model.strict",
    "fp32_masters": "model.fp32_masters",
}


def _arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of the load that have a key in the configuration."""
    given = {name: attrgetter(key)(config) for name, key in LOAD_KEYS.items()}
    if config.trains_masters and config.lora is not None:
        given["fp32_masters"] = False  # of what is frozen nobody steps any
    return given


@contextmanager
def _peers_named(directory: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception type of its own, but its errors name the source file they come from.
        if isinstance(error, torch.distributed.DistBackendError) or "gloo/" in str(error):
            raise beyond_telling(
                PeerError(
                    "another rank died or stopped answering during training; its own output, or the "
                    f"system log if memory ran out, says why. {_saved_in(directory)}"
                )
            ) from error
        raise


def _saved_in(directory: Path) -> str:
    found = resumable_checkpoints(directory)
    return f"The last checkpoint is {found[-1]}: continue with resume=auto" if found else "Nothing was saved"


class _Run:
    """The loop and what it has seen."""

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        held_out: HeldOut | None,
        display: Display,
        stop: StopSignal,
        checkpoints: Checkpoints,
        exports: Callable[[int], None],
        sampler: Sampler | None,
    ) -> None:
        self._config = config.train
        self._task = session.task
        self._tracked = bool(config.tracking.trackers)
        self._skips, self._told = config.checkpoint.skip_unwritable, False
        self._session = session
        self._held_out = held_out
        self._averaged = config.ema is not None and config.ema.evaluate
        self._display = display
        self._stop = stop
        self._checkpoints = checkpoints
        self._export, self._export_every = exports, config.output.every
        self._sampler = sampler
        self._history = History()
        self._stopped = False
        self._failures = Failures(current_world(), session.sum_over_ranks)
        self.divergence = Divergence(config.train.patience_nonfinite, current_world())

    def to_the_end(self, resumed: Path | None, directory: Path) -> None:
        from accelerate.utils import set_seed

        # An error that a rank still holds back is told here, and not in the first collective of the engine.
        self._failures.raise_together()  # all ranks have got here
        # Dropout differs from rank to rank. Before a checkpoint restores random states, which replace these.
        set_seed(self._config.seed, device_specific=True)
        self._session.model.train()
        if resumed is None:
            with self._failures.deferred():
                self._begin(directory, None)
            self._evaluate(0)
            self._draw(0)
            batches = self._session.batches()
        else:
            self._history, batches = self._checkpoints.resume(resumed)
            if not self._finite():
                raise DivergedError(
                    f"resume: {resumed} has weights that are not finite; name an earlier checkpoint"
                )
            with self._failures.deferred():
                self._begin(directory, resumed)
            self._display.say(f"resuming after step {self._history.steps}, from {resumed}")
        self._display.start()
        # After each step in this order: evaluate, draw samples, save. So a checkpoint has the held-out loss
        # of its own step, by which the best are known, and a run that resumes begins with the next step. A
        # wish to stop skips the first two, for whoever asked may not wait long.
        for step in range(self._history.steps + 1, self._config.last_step + 1):
            self._step(step, batches)
            every = self._config.evaluate_every
            if not self._stopped and (step == self._config.last_step or (every and step % every == 0)):
                self._evaluate(step)
                self._display.start()
            if not self._stopped:
                self._draw(step)
            due = self._checkpoints.due(step, self._stopped)
            exported = bool(self._export_every) and step % self._export_every == 0
            if due or exported:
                self._save(due, exported)
                self._display.start()
            if self._stopped:
                break
        self._failures.raise_together()

    def _save(self, due: bool, exported: bool) -> None:
        self._failures.raise_together()
        step = self._history.steps
        if not self._finite():
            self._display.say(f"the weights after step {step} are not finite: nothing is saved of them")
            return
        if due:
            self._checkpoints.save(self._history)
        if exported:
            with self._checkpoints.skipped(f"the export of step {step}"):
                self._export(step)

    def _finite(self) -> bool:
        finite = True
        with self._failures.deferred():
            finite = is_finite(self._session.model, self._session.optimizer)
        # All ranks have the same sum, so that all save or none.
        return self._failures.sum_over_ranks(float(not finite)) == [0.0]

    def check_finite(self) -> None:
        """Raise DivergedError, on every rank, for weights that are not worth saving; collective."""
        if not self._finite():
            raise DivergedError(
                f"after step {self._history.steps} the weights are not finite: no model was saved. "
                f"{self._checkpoints.recovery_hint}"
            )

    def _begin(self, directory: Path, resumed: Path | None) -> None:
        if self._session.accelerator.is_main_process:
            remove_earlier_run(directory, resumed)
        self._display.begin(self._history.steps)

    def _step(self, step: int, source: Iterator[Batch]) -> None:
        # Ranks meet in this order: the sum of weights, forwards and backwards (gradients are reduced in the
        # last one), the norm, the sum of losses and wishes. In between a rank may fail by itself; it carries
        # on to the next sum, where all hear of it.
        session, summed = self._session, self._failures.sum_over_ranks
        # All batches of the step first: the share of each in the step's loss is only known with the last.
        parts: list[tuple[Batch, int]] = []
        with self._failures.deferred():
            parts = [self._taken(source) for _ in range(self._config.accumulation)]
        whole_weight, seen = summed(
            sum(weight for _, weight in parts), sum(self._task.seen(batch) for batch, _ in parts)
        )
        loss = 0.0
        for batch, weight in parts:
            # A step may predict nothing at all: all its weights are 0 then, and so is each share.
            share = weight / max(whole_weight, 1.0)
            # The sum of the shares' losses over batches here, and over ranks below, is the mean loss of the
            # step by its whole weight.
            loss += float(session.accumulate(batch, share)) * share
        rate = session.scheduler.get_last_lr()[0]  # of this step; ``update`` sets that of the next
        norm = session.clip(self._config.max_grad_norm)
        stepped = True
        with self._failures.deferred():  # the first step makes the optimizer's state
            stepped = session.update()
            session.average(step)
        # One sum tells all ranks whether any of them has failed, was asked to stop, or is not finite.
        searching = not stepped and self._config.mixed_precision == "fp16"
        if not (stepped or searching):
            norm = math.nan  # DeepSpeed has passed over gradients that are not finite; it tells an older norm
        # Kept from before the sum, for a message that names the rank; the sum itself may not be finite
        # because of another rank.
        own, bad = loss, Divergence.is_in(loss, norm, searching)
        loss, wishes, diverging = summed(loss, float(self._stop.requested), float(bad))
        self._stopped = wishes > 0
        with self._failures.deferred():
            self._note(Metrics(step, loss if whole_weight else None, norm, rate, int(seen), self._peak()))
        # ``diverging`` is a sum over the ranks, so all of them go into the collective that ``note`` then is,
        # or none.
        figures = (own, norm, bad) if diverging else None
        if told := self.divergence.note(step, figures, self._checkpoints.recovery_hint):
            self._display.say(told)

    def _taken(self, source: Iterator[Batch]) -> tuple[Batch, int]:
        batch = next(source)
        # What is drawn follows from the epoch and the example: the same for any number of ranks, and when
        # resumed.
        return self._task.weighed(self._task.drawn(batch, self._session.position[0]))

    def _peak(self) -> int:
        return peak_memory_bytes(self._session.device)

    def _note(self, metrics: Metrics) -> None:
        self._history.note(metrics.loss)
        self._display.step(metrics)
        if self._tracked:
            values = {name: getattr(metrics, name) for name in ("loss", "gradient_norm", "learning_rate")}
            self._track({name: value for name, value in values.items() if value is not None}, metrics.step)

    def _track(self, values: dict[str, float], step: int) -> None:
        """Hand figures to the trackers. Raises what one fails with, unless the run goes on without."""
        try:
            self._session.accelerator.log(values, step=step)
        except (WriteError, OSError) as error:
            if not self._skips:
                raise
            if not self._told:
                logger.warning(
                    "the trackers miss the figures of step %s, and the run goes on: %s", step, error
                )
            self._told = True

    def _evaluate(self, step: int) -> None:
        if self._held_out is not None:
            # The weights are replaced together: no rank may stay away with an error that it holds back.
            if self._averaged:
                self._failures.raise_together()
            with self._session.averaged(self._averaged):
                loss = self._held_out.loss(self._session, self._failures)
            self._history.held_out[step] = loss
            with self._failures.deferred():
                self._display.evaluation(step, loss)
                if self._tracked:
                    self._track({"held_out_loss": loss}, step)

    def _draw(self, step: int) -> None:
        """The samples that are due after ``step`` steps; collective."""
        # That follows from the step alone: all ranks go in, or none.
        if self._sampler is not None and self._sampler.due(step):
            with self._checkpoints.skipped(f"a part of the samples after step {step}"):
                folder = self._sampler.take(self._session, self._failures, step)
                self._display.say(f"samples after step {step}: {folder}")
            self._display.start()

    def result(self, directory: Path) -> TrainResult:
        """The figures of the run."""
        return TrainResult(
            str(directory),
            self._history.steps,
            self._stopped,
            self._history.first_loss,
            self._history.last_loss,
            self._history.held_out,
        )


class StopSignal:
    """While entered, the first SIGINT or SIGTERM only sets :attr:`requested`; the next one interrupts.

    A rank must not act on :attr:`requested` alone: the others would wait for it in their next collective.
    The training loop adds up the wishes of all ranks in every step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Put back, for a run inside of a longer program: after it an interrupt ends that at once again.
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned
        self._previous.clear()
