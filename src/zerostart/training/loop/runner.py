"""Run a training: data, load, train, evaluate, save; the same on every rank."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

import zerostart
from zerostart.distributed.failures import mark_lost
from zerostart.distributed.world import World, current_world
from zerostart.errors import DivergedError, PeerError
from zerostart.training.adapt.export import Exporter
from zerostart.training.adapt.trained import round_parameters, select_parameters
from zerostart.training.config.configuration import TrainConfig, TrainingConfig
from zerostart.training.config.engine_config import check_launcher, engine_config
from zerostart.training.loop.batches import convert_epochs
from zerostart.training.loop.checkpoints import Checkpoints, History, checkpoint_to_resume
from zerostart.training.loop.course import agree, comparable, describe_course
from zerostart.training.loop.evaluate import HeldOut
from zerostart.training.loop.failures import Divergence, Failures, is_finite, raised_locally
from zerostart.training.loop.optimizers import check_optimizer
from zerostart.training.loop.output_directory import (
    METRICS,
    check_free_space,
    claim_output,
    remove_earlier_run,
    resumable_checkpoints,
)
from zerostart.training.loop.progress import Display, peak_memory_bytes
from zerostart.training.loop.session import Session, check_trackers, open_session
from zerostart.training.loop.task import Batch, task_class
from zerostart.training.samples.sampler import Sampler, open_sample_pipeline, open_sampler


@dataclass(frozen=True)
class TrainResult:
    """Result of a run, the same on every rank.

    ``steps`` were done (fewer than configured if ``stopped``); ``first_loss`` and ``last_loss`` are the
    training losses of the first and the last of them; ``held_out`` maps steps to held-out losses.
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
            f"training loss {self.first_loss or 0:.4f} -> {self.last_loss or 0:.4f}"
        ]
        if len(self.held_out) > 1:
            before, *_, after = self.held_out.values()
            lines.append(f"held-out loss {before:.4f} -> {after:.4f}")
        return "\n".join([*lines, f"model saved in {self.directory}"])


def train(config: TrainConfig) -> TrainResult:
    """Load, train and save as ``config`` says; called in every rank.

    Several ranks need an initialised process group. SIGINT or SIGTERM on any rank ends the run after the
    current step on all ranks, and the model is saved. Raises ZerostartError; its text is the same on every
    rank if all fail.
    """
    world = current_world()
    with world.phase("checking the environment"):
        check_trackers(config.tracking.trackers)
        check_launcher(config.train.mixed_precision)
        check_optimizer(config.train, config.engine.chosen())
    output, resume = config.output, config.resume
    media = [] if config.media is None else [one.source for one in config.media.sets]
    claimed = claim_output(
        output.directory, config.model.source, media, output.overwrite, resume == "auto", world
    )
    # Claim the directory before searching it: another run may still write or delete checkpoints there.
    with claimed as directory:
        resumed = checkpoint_to_resume(resume, directory, world)
        output = output.model_copy(update={"directory": str(directory)})
        return _train(config.model_copy(update={"output": output}), directory, resumed, world)


def _train(config: TrainConfig, directory: Path, resumed: Path | None, world: World) -> TrainResult:
    # Read the data first, so that bad data fail before the model is loaded, which takes minutes. Files of an
    # earlier run are kept until ``remove_earlier_run`` in the loop, in case this run fails before.
    lora, output, adapted = config.lora, config.output, config.lora is not None
    with world.phase("reading the settings of the task and its model"):
        task = task_class(config.task.name)(config)
        task.open()
        # Reject sample settings before the data are encoded, which may take long.
        sample_pipeline = open_sample_pipeline(config.samples, config.model)
        engine = engine_config(config.engine, config.train, config.precision, world.size, task.hidden_size)
    # Compare settings before preparing data: ranks with different settings call different collectives.
    agree(comparable(dict(config)) | {"engine.config": engine}, world)
    with world.phase("preparing the data"):
        all_items = task.items(world)
    with world.phase("computing the digest of the data"):
        digest = all_items.digest()
    agree({"the data": digest}, world)
    dtype = getattr(torch, config.dtype)
    with world.phase("counting the steps"):
        items, rest = task.split(all_items)
        held_out = None
        if rest is not None:
            held_out = HeldOut(task, rest, config.train.batch_size, config.train.seed, world.rank, world.size)
        # The number of steps in an epoch depends on how many examples are held out.
        train = convert_epochs(items, config.train, world.size)
        config = config.model_copy(update={"train": train})
        compute_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision, dtype)
        sampler = open_sampler(sample_pipeline, task, compute_dtype, train.last_step, directory)
    # Parameters that the checkpoint lacks are initialised from the default seed: the same on every rank.
    torch.manual_seed(train.seed)
    model = zerostart.load(
        task.source,
        task.builder(),
        engine=config.engine.name,
        zero_stage=config.engine.zero_stage,
        engine_config=engine,
        dtype=dtype,
        strict=config.model.strict,
        # Only trained weights need masters, and a LoRA freezes the model's.
        fp32_masters=config.model.fp32_masters and not (config.trains_masters and adapted),
    )
    # Weights are trained in fp32; without ``fp32_masters`` they start from values rounded to bf16.
    if config.trains_masters and not config.model.fp32_masters and not adapted:
        round_parameters(model, torch.bfloat16)
    if checkpointing := train.checkpoint_blocks:
        with world.phase("checkpointing blocks"):
            zerostart.checkpoint_blocks(model, offload=checkpointing == "offload")
    shown = Display(train.last_step, directory / METRICS, config.logging.every, active=world.rank == 0)
    with world.phase("training"), shown as display, stop_on_signals() as stop:
        display.say(str(zerostart.report(model)))
        task.begin(model)
        # Select before the engine wraps the model and makes an optimizer for the trained parameters.
        if summary := select_parameters(model, train, lora, config.precision, world):
            display.say(summary)
        exporter = Exporter(model, output, adapted, task, directory)
        with world.phase("checking the free space"):
            if world.rank == 0:
                check_free_space(model, (adapted and not output.merge) or output.trainable_only, directory)
        # In this order: the engine makes the optimizer, the settings are compared with the checkpoint's, and
        # files of an earlier run are deleted.
        workers = config.media.workers if config.media else 0
        session = open_session(
            model, task, items, train, config.precision, config.tracking, directory, config.ema, workers
        )
        course = describe_course(dict(config), model, items.digest(), world)
        checkpoints = Checkpoints(config.checkpoint, directory, session, course, adapted)
        averaged = config.ema is not None and config.ema.evaluate
        run = _Run(train, averaged, session, held_out, display, stop, checkpoints, exporter, sampler)
        if config.resume == "auto" and resumed is None:
            display.say(f"resume auto: {directory} has no complete checkpoint, so the run begins at step 0")
        with raised_locally(), _explain_lost_peers(directory), checkpoints.finished():
            run.train(resumed, directory)
            # Inside `finished`, which waits for the checkpoint that an error names.
            run.check_finite()
        display.say("saving the model")
        history, stopped = run.history, run.stopped
        result = TrainResult(
            str(directory), history.steps, stopped, history.first_loss, history.last_loss, history.held_out
        )
        exporter.save_final(result.steps, session.ema)
        run.divergence.check_end()
        display.say(str(result))
    session.end()
    return result


@contextmanager
def _explain_lost_peers(directory: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors; only the source file in the message identifies them.
        if isinstance(error, torch.distributed.DistBackendError) or "gloo/" in str(error):
            checkpoints = resumable_checkpoints(directory)
            saved = f"The last checkpoint is {checkpoints[-1]}: continue with resume=auto"
            raise mark_lost(
                PeerError(
                    "another rank died or stopped answering during training; its own output, or the "
                    f"system log if memory ran out, says why. {saved if checkpoints else 'Nothing was saved'}"
                )
            ) from error
        raise


@dataclass
class _Run:
    """Training loop and its history."""

    config: TrainingConfig
    averaged: bool  # True to evaluate the averaged weights (EMA)
    session: Session
    held_out: HeldOut | None
    display: Display
    stop: StopRequest
    checkpoints: Checkpoints
    exporter: Exporter
    sampler: Sampler | None
    history: History = field(default_factory=History)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.failures = Failures(current_world(), self.session.sum_over_ranks)
        self.divergence = Divergence(self.config.patience_nonfinite, current_world())

    def train(self, resumed: Path | None, directory: Path) -> None:
        """Do all steps, from the checkpoint ``resumed`` if there is one; collective."""
        from accelerate.utils import set_seed

        # Raise a deferred error here, not in the engine's first collective.
        self.failures.raise_together()
        # Each rank needs its own dropout. A checkpoint replaces these random states below.
        set_seed(self.config.seed, device_specific=True)
        self.session.model.train()
        if resumed is not None:
            self.history, batches = self.checkpoints.resume(resumed)
            if not self._all_finite():
                raise DivergedError(
                    f"resume: {resumed} has weights that are not finite; name an earlier checkpoint"
                )
        with self.failures.deferred():
            if self.session.accelerator.is_main_process:
                remove_earlier_run(directory, resumed)
            self.display.begin(self.history.steps)
        if resumed is None:
            self._evaluate()
            self._draw_samples()
            batches = self.session.batches()
        else:
            self.display.say(f"resuming after step {self.history.steps}, from {resumed}")
        # After each step in this order: evaluate, draw samples, save. So a checkpoint has the held-out loss
        # of its step, and a resumed run begins with the next step. A stop request skips the first two.
        every, last = self.config.evaluate_every, self.config.last_step
        while self.history.steps < last and not self.stopped:
            self._step(self.history.steps + 1, batches)
            steps = self.history.steps
            if not self.stopped and (steps == last or (every and steps % every == 0)):
                self._evaluate()
            if not self.stopped:
                self._draw_samples()
            self._save()
        self.failures.raise_together()

    def _save(self) -> None:
        step = self.history.steps
        saved, exported = self.checkpoints.due(step, self.stopped), self.exporter.due(step)
        if not (saved or exported):
            return
        self.failures.raise_together()
        if not self._all_finite():
            self.display.say(f"the weights after step {step} are not finite: they are not saved")
            return
        if saved:
            self.checkpoints.save(self.history)
        if exported:
            self.exporter.save_step(step, self.session.ema)

    def _all_finite(self) -> bool:
        finite = True
        with self.failures.deferred():
            finite = is_finite(self.session.model, self.session.optimizer)
        # All ranks have the same sum, so all of them save or none.
        return self.failures.sum_over_ranks(float(not finite)) == [0.0]

    def check_finite(self) -> None:
        """Raise DivergedError on every rank if the weights are not finite; collective."""
        if not self._all_finite():
            raise DivergedError(
                f"after step {self.history.steps} the weights are not finite: no model was saved. "
                f"{self.checkpoints.recovery_hint}"
            )

    def _step(self, step: int, source: Iterator[Batch]) -> None:
        # All ranks meet in these collectives: after reading batches, in forwards and backwards (the
        # last one reduces gradients), the norm, and the sum of losses and stop requests. A rank that fails in
        # between continues to the next collective, which reports the failure to all ranks.
        begun, session, sum_over_ranks = time.monotonic(), self.session, self.failures.sum_over_ranks
        parts: list[Batch] = []
        with self.failures.deferred():
            for _ in range(self.config.accumulation):
                batch = next(source)
                # Random draws depend only on the epoch and the example, not on the number of ranks.
                parts.append(session.task.drawn(batch, session.position[0]))
        sum_over_ranks()
        # All batches have the same size, so the loss of the step is the mean of their losses.
        count = self.config.accumulation * int(session.accelerator.num_processes)
        loss, share = 0.0, 1 / count
        for batch in parts:
            loss += float(session.accumulate(batch, share)) * share
        rate = session.scheduler.get_last_lr()[0]  # of this step; ``update`` sets that of the next
        norm = session.clip(self.config.max_grad_norm)
        has_stepped = True
        with self.failures.deferred():  # the first step makes the optimizer's state
            has_stepped = session.update()
            session.average(step)
        searching = not has_stepped and self.config.mixed_precision == "fp16"
        if not (has_stepped or searching):
            norm = math.nan  # DeepSpeed skips gradients that are not finite, and reports an older norm
        # While fp16 searches its loss scale, a norm that is not finite is no divergence.
        bad = not math.isfinite(loss) or not (searching or norm is None or math.isfinite(norm))
        # One sum shows all ranks if one has failed, has a stop request, or diverges.
        own, (loss, stops, diverging) = loss, sum_over_ranks(loss, float(self.stop.requested), float(bad))
        self.stopped = stops > 0
        with self.failures.deferred():
            self.history.add_step(loss)
            figures = {"loss": loss, "gradient_norm": norm, "learning_rate": rate}
            more = {
                "items": count * self.config.batch_size,
                "seconds": round(time.monotonic() - begun, 6),
                "peak_bytes": peak_memory_bytes(session.device),
            }
            self.display.step(step, figures | more)
            numbers = {name: value for name, value in figures.items() if value is not None}
            session.accelerator.log(numbers, step=step)
        hint = self.checkpoints.recovery_hint
        if warning := self.divergence.check(step, own, norm, diverging > 0, hint):
            self.display.say(warning)

    def _evaluate(self) -> None:
        step = self.history.steps
        if self.held_out is not None:
            # All ranks must swap the weights together, so raise deferred errors before.
            if self.averaged:
                self.failures.raise_together()
            with self.session.averaged(self.averaged):
                loss = self.held_out.loss(self.session, self.failures)
            self.history.held_out[step] = loss
            with self.failures.deferred():
                self.display.evaluation(step, loss)
                self.session.accelerator.log({"held_out_loss": loss}, step=step)

    def _draw_samples(self) -> None:
        step = self.history.steps
        if self.sampler is not None and self.sampler.due(step):
            folder = self.sampler.take(self.session, self.failures, step)
            self.display.say(f"samples after step {step}: {folder}")


class StopRequest:
    """Stop request of this rank.

    The ranks sum their requests in every step, and stop together.
    """

    requested = False

    def set(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one requests a stop, the next one interrupts."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Yield a request that SIGINT or SIGTERM sets inside the block."""
    request, previous = StopRequest(), {}
    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
        previous = {number: signal.signal(number, request.set) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
