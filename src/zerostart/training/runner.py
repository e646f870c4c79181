"""The training run: data, load, train, evaluate, save; the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zerostart
from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError, PeerError
from zerostart.training.config import TrainConfig
from zerostart.training.data import Sequences, iter_documents, split_held_out, tokenize
from zerostart.training.engine_config import engine_config
from zerostart.training.evaluate import HeldOut, held_out_batches
from zerostart.training.export import export_model
from zerostart.training.progress import Display, Metrics, peak_memory_bytes
from zerostart.training.session import Session, check_surroundings, open_session
from zerostart.training.stop import StopSignal
from zerostart.training.tasks import load_tokenizer, make_collator, model_builder, read_settings

__all__ = ["TrainResult", "train"]


@dataclass(frozen=True)
class TrainResult:
    """What came of a run: the same values on every rank.

    ``steps`` were done (fewer than asked for when ``stopped``); ``first_loss`` and ``last_loss`` are the
    training losses of the first and the last of them; ``held_out`` has the loss on held-out text by step.
    """

    directory: str
    steps: int
    stopped: bool
    first_loss: float
    last_loss: float
    held_out: dict[int, float]

    def __str__(self) -> str:
        lines = [
            f"{'stopped' if self.stopped else 'trained'} after {self.steps} steps: "
            f"training loss {self.first_loss:.4f} -> {self.last_loss:.4f}"
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
    check_surroundings(config)
    directory = _claim_directory(config, world)
    settings = read_settings(config)
    tokenizer = load_tokenizer(config)
    _check_vocabulary(tokenizer, settings)
    documents = iter_documents(config.data)
    sequences, held_out = split_held_out(tokenize(documents, tokenizer, config.data), config.data.held_out)

    engine_settings = engine_config(config, world.size, getattr(settings, "hidden_size", None))
    torch.manual_seed(config.train.seed)  # for parameters that the checkpoint lacks; the same on every rank
    model = zerostart.load(
        config.model.source,
        model=model_builder(config.task, settings),
        engine=config.engine.name,
        zero_stage=config.engine.zero_stage,
        engine_config=engine_settings,
        dtype=getattr(torch, config.dtype),
        strict=config.model.strict,
        fp32_masters=config.model.fp32_masters,
    )
    display = Display(
        config.train.steps, directory / "metrics.jsonl", config.logging.every, active=world.rank == 0
    )
    with display, StopSignal() as stop:
        display.say(str(zerostart.report(model)))
        # Masks differ from rank to rank in training; held-out ones are the same in every run.
        collator = make_collator(config.task, tokenizer, seed=config.train.seed + world.rank)
        session = open_session(config, model, sequences, collator, engine_settings)
        run = _Run(config, session, _held_out(config, tokenizer, held_out, world), display, stop)
        with _peers_named():
            run.to_the_end()
        display.say("saving the model")
        export_model(model, tokenizer, directory, config.output.max_shard_size)
        result = run.result(directory)
        display.say(str(result))
    session.end()
    return result


@contextmanager
def _peers_named() -> Iterator[None]:
    """Turn what a collective raises when another rank has gone into an error that says so."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception type of its own, but its errors name the source file they come from.
        if isinstance(error, torch.distributed.DistBackendError) or "gloo/" in str(error):
            raise PeerError(
                "another rank died or stopped answering during training; its own output, or the system log "
                "where memory ran out, tells why. Nothing was saved"
            ) from error
        raise


def _claim_directory(config: TrainConfig, world: World) -> Path:
    """The output directory, made if need be; refused on every rank when something is in it."""
    directory = Path(config.output.directory).expanduser().absolute()

    def claim() -> Path:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            occupied = any(directory.iterdir())
        except OSError as error:
            raise ConfigError(f"output.directory {directory}: {error.strerror}") from error
        if occupied and not config.output.overwrite:
            raise ConfigError(
                f"output.directory {directory} is not empty; name another, "
                "or allow it with output.overwrite=true"
            )
        return directory

    return world.broadcast_object(claim, "claiming the output directory")


def _check_vocabulary(tokenizer: Any, settings: Any) -> None:
    size = settings.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, but the model knows only {size}")


def _held_out(
    config: TrainConfig, tokenizer: Any, sequences: Sequences | None, world: World
) -> HeldOut | None:
    if sequences is None:
        return None
    collator = make_collator(config.task, tokenizer, seed=config.train.seed)
    batches = held_out_batches(sequences, collator, config.task, config.train.batch_size)
    return HeldOut(batches, world.rank, world.size)


class _Run:
    """The loop and what it has seen."""

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        held_out: HeldOut | None,
        display: Display,
        stop: StopSignal,
    ) -> None:
        self._config = config.train
        self._tracked = bool(config.tracking.trackers)
        self._session = session
        self._held_out = held_out
        self._display = display
        self._stop = stop
        self._losses: list[float] = []
        self._evaluations: dict[int, float] = {}
        self._stopped = False

    def to_the_end(self) -> None:
        """All steps, or as many as there are before somebody wishes to stop."""
        from accelerate.utils import set_seed

        set_seed(self._config.seed, device_specific=True)  # dropout differs from rank to rank
        self._session.model.train()
        self._evaluate(0)
        batches = self._session.batches()
        for step in range(1, self._config.steps + 1):
            loss, tokens = 0.0, 0.0
            for _ in range(self._config.accumulation):
                batch = next(batches)
                tokens += float(batch["attention_mask"].sum())
                loss += float(self._session.accumulate(batch)) / self._config.accumulation
            rate = self._session.scheduler.get_last_lr()[0]
            self._session.update(self._config.max_grad_norm)
            self._note(step, loss, tokens, rate)
            if self._stopped:
                return
            every = self._config.evaluate_every
            if step == self._config.steps or (every and step % every == 0):
                self._evaluate(step)

    def _note(self, step: int, loss: float, tokens: float, rate: float) -> None:
        """Exchange what all ranks have to know: loss, tokens, and whether anyone has been asked to stop."""
        losses, tokens, wishes = self._session.sum_over_ranks(loss, tokens, float(self._stop.requested))
        mean = losses / self._session.accelerator.num_processes
        self._losses.append(mean)
        self._stopped = wishes > 0
        peak = peak_memory_bytes(self._session.device)
        self._display.step(Metrics(step, mean, rate, int(tokens), peak))
        if self._tracked:
            self._session.accelerator.log({"loss": mean, "learning_rate": rate}, step=step)

    def _evaluate(self, step: int) -> None:
        if self._held_out is not None:
            loss = self._held_out.loss(self._session)
            self._evaluations[step] = loss
            self._display.evaluation(step, loss)
            if self._tracked:
                self._session.accelerator.log({"held_out_loss": loss}, step=step)

    def result(self, directory: Path) -> TrainResult:
        """The figures of the run."""
        return TrainResult(
            str(directory),
            len(self._losses),
            self._stopped,
            self._losses[0],
            self._losses[-1],
            self._evaluations,
        )
