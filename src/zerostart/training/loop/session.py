"""Hand a loaded model to accelerate: precision, accumulation, trackers and data, on either engine.

The model comes sharded from ``zerostart.load``; nothing here moves, wraps or shards it again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from zerostart.distributed.world import current_world
from zerostart.engines import Engine, full_shape
from zerostart.errors import ConfigError
from zerostart.live.model import get_record
from zerostart.training.adapt.ema import Ema
from zerostart.training.config.configuration import EmaConfig, TrackingConfig, TrainingConfig
from zerostart.training.loop.batches import Buckets, order_of
from zerostart.training.loop.failures import unreported
from zerostart.training.loop.optimizers import optimizer_factory
from zerostart.training.loop.task import Batch, Items, Task
from zerostart.upstream.accelerate.plugins import hidden

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer


@dataclass
class Session:
    """A model in training: what the loop needs of accelerate and the engine."""

    accelerator: Accelerator
    model: nn.Module  # as the engine wraps it: call this
    optimizer: AcceleratedOptimizer
    scheduler: Any
    loader: DataLoaderShard
    task: Task
    engine: Engine  # that the model was loaded for
    buckets: Buckets  # the order of the examples
    position: tuple[int, int] = (0, 0)  # the epoch, and the rounds of it that were had
    ema: Ema | None = None  # the average of the weights

    @property
    def device(self) -> torch.device:
        """Where the batches go."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def items_a_round(self) -> int:
        """Examples in one batch on every rank."""
        return self.buckets.batch_size * int(self.accelerator.num_processes)

    def batches(self, epoch: int = 0, had: int = 0) -> Iterator[Batch]:
        """This rank's batches, epoch after epoch from ``epoch`` on, each in a new order.

        Of the first one ``had`` rounds are passed over without being made.
        """
        self.buckets.pass_over(had * int(self.accelerator.num_processes))
        while True:
            # The order of an epoch is drawn from the seed and its number, so that a resumed run has the order
            # of the one before.
            self.loader.set_epoch(epoch)
            for number, batch in enumerate(self.loader, start=had + 1):
                # Before the batch is handed out: while a step is computed its batches count as had.
                self.position = (epoch, number)
                yield batch
            epoch, had = epoch + 1, 0

    def batches_after(self, epoch: int, items: int) -> Iterator[Batch]:
        """The batches that follow when all ranks together have had ``items`` of ``epoch``.

        The order is the same for any number of ranks; where rounds were of another size, and do not end at
        the same place, some come again.
        """
        had = items // self.items_a_round
        # The epoch was over when the checkpoint was saved: the next one begins as it would have.
        if had >= len(self.loader):
            return self.batches(epoch + 1)
        batches = self.batches(epoch, had)
        return chain([next(batches)], batches)  # begun, before random states are restored: that draws

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean loss of one batch, [], as the task computes it."""
        return self.task.loss(self.model, batch)

    def accumulate(self, batch: Batch, share: float) -> torch.Tensor:
        """Forward and backward of one batch; returns its mean loss, detached, [].

        ``share`` is its part (0 to 1) of the whole step, of all batches on all ranks.
        The gradients of the step come out as those of the sum of all losses times their shares.
        """
        # Every engine averages over ranks, and accelerate or DeepSpeed over the batches of a step.
        alike = self.engine.gradient_divisor * self.accelerator.gradient_accumulation_steps
        # Inside, accelerate has set ``sync_gradients``: gradients are reduced at the last batch of a step
        # alone.
        with self.accelerator.accumulate(self.model):
            self.engine.begin_batch(self.model, self.accelerator.sync_gradients)
            loss = self.forward(batch)
            # In float32: in 16 bits the product would be rounded.
            self.accelerator.backward(loss.float() * (share * alike))
        return loss.detach()

    def clip(self, max_grad_norm: float) -> float | None:
        """Clip the gradients after the last batch of an accumulation; collective.

        Returns their norm before that; None where the engine does not tell (DeepSpeed in fp32 at stage 0).
        """
        # DeepSpeed has clipped and stepped in the backward; accelerate knows that, and asks it. 0 stands for
        # no clipping; accelerate would clip all gradients to nothing by it.
        norm = self.accelerator.clip_grad_norm_(list(self.model.parameters()), max_grad_norm or math.inf)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def update(self) -> bool:
        """The optimizer step, after ``clip``; every rank by itself.

        False where fp16's loss scale was too high, so that the engine has passed over the step.
        """
        self.optimizer.step()
        stepped = not self.optimizer.step_was_skipped
        # Of a step that was passed over the rate stays: the schedule counts steps of the optimizer.
        if stepped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return stepped

    def average(self, step: int) -> None:
        """Let the average of the weights follow, after the update of ``step``; every rank by itself."""
        if self.ema is not None and step % self.ema.config.every == 0:
            self.ema.update()

    def averaged(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside, the weights are their average, if that is ``wanted`` and there is one; collective."""
        if self.ema is None or not wanted:
            return nullcontext()
        return self.ema.applied(self.model, current_world())

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Each value added up over all ranks; collective."""
        # On the host, by the group for small messages, and in float64, which not every accelerator has.
        totals, world = torch.tensor(values, dtype=torch.float64, device="cpu"), current_world()
        if world.size > 1:
            torch.distributed.all_reduce(totals, group=world.group)
        summed: list[float] = totals.tolist()
        return summed

    def end(self) -> None:
        """End the trackers and the process group; the session can't be used afterwards.

        What the engine has wrapped goes first. The reducer of DistributedDataParallel must not be the last to
        hold the group: its destructor keeps the GIL while it joins gloo's threads (torch 2.13), and one of
        these may be waiting for the GIL to release a tensor.
        """
        del self.model, self.optimizer, self.scheduler, self.loader, self.ema
        self.accelerator.free_memory()
        self.accelerator.end_training()


def open_session(
    model: nn.Module,
    task: Task,
    items: Items,
    train: TrainingConfig,
    precision: str,
    tracking: TrackingConfig,
    directory: Path,
    ema: EmaConfig | None = None,
    workers: int = 0,
) -> Session:
    """Make the optimizer, schedule and loader for the loaded ``model`` and let accelerate prepare them.

    Raises :class:`ConfigError` for data that does not fill one step, and a tracker that cannot begin.
    """
    engine = get_record(model).engine
    accelerator = _accelerator(engine, train, precision, tracking, directory)
    # The same on every rank, and before anything that ranks meet in: too few data are an error of all.
    buckets = order_of(items, train, accelerator.num_processes)
    optimizer = optimizer_factory(train)(_parameter_groups(model, train.weight_decay))
    collator = task.collator(train.seed + accelerator.process_index)
    data: Any = items  # which DataLoader takes without it being its Dataset
    loader: Any = DataLoader(data, collate_fn=collator, num_workers=workers, batch_sampler=buckets)
    with current_world().collectives("preparing the training"), unreported():
        if engine.owns_optimizer or engine.replicates_parameters:
            model, prepared = accelerator.prepare(model, optimizer)  # whole ones in DDP
        else:
            # Without the model: accelerate would wrap it in DDP (it knows FSDP2 on accelerators only), and
            # for a module that is sharded already it has nothing to do.
            prepared = accelerator.prepare(optimizer)
        engine.exempt_unreached(model)  # as it is called, so after it is prepared
    loader = accelerator.prepare_data_loader(loader)
    # Not prepared: accelerate steps a prepared scheduler once per rank, ours counts optimizer steps.
    scheduler = learning_rate_schedule(optimizer, train)
    if tracking.trackers:
        _begin_trackers(accelerator, tracking, train)
    opened = Session(accelerator, model, prepared, scheduler, loader, task, engine, buckets)
    if ema is not None:
        # Last: it follows what the optimizer steps, of mixed precision the masters, which are there only now.
        opened.ema = Ema(ema, model, None if engine.owns_optimizer else prepared, current_world())
    return opened


def _begin_trackers(accelerator: Accelerator, tracking: TrackingConfig, train: TrainingConfig) -> None:
    """Raises ConfigError, whatever a tracker fails with: what it is made of is no part of ours."""
    try:
        accelerator.init_trackers(tracking.project, config={"train": train.model_dump_json()})
    except Exception as error:
        raise ConfigError(
            f"tracking.trackers: {' or '.join(tracking.trackers)} cannot start for tracking.project "
            f"{tracking.project!r}: {type(error).__name__}: {error}"
        ) from error


def _accelerator(
    engine: Engine, train: TrainingConfig, precision: str, tracking: TrackingConfig, directory: Path
) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        patch_environment,
    )

    common: dict[str, Any] = {
        "log_with": tracking.trackers or None,
        "project_dir": str(directory),
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=train.seed),
        # A step is `accumulation` batches, also where an epoch ends in between.
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=train.accumulation, sync_with_dataloader=False
        ),
    }
    with hidden():  # what a launcher has set up is in the configuration by now
        setup = engine.accelerate_setup(precision)
        for message, category in setup.ignored:
            warnings.filterwarnings("ignore", message, category)
        with patch_environment(**setup.environment):
            return Accelerator(**setup.options, **common)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for biases and norms."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if len(full_shape(parameter)) > 1 else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate_schedule(optimizer: Optimizer, train: TrainingConfig) -> LambdaLR:
    """``train.schedule`` over all steps of ``optimizer``, to be stepped after each of them.

    Step ``k`` (from 0) of ``train.warmup_steps`` = ``W`` has the rate ``learning_rate * (k + 1) / W``: the
    last of them has the full rate, and none has zero, which would be a batch for nothing. From step ``W``
    on, and without warm-up, the rates are those of ``transformers.get_scheduler``, whose own warm-up is
    ``k / W``.
    """
    from transformers import get_scheduler

    made: Any = get_scheduler(train.schedule, optimizer, train.warmup_steps, train.last_step)
    theirs: Callable[[int], float] = made.lr_lambdas[0]
    warmup = 0 if train.schedule == "constant" else train.warmup_steps  # "constant" takes no notice of it
    return LambdaLR(optimizer, lambda step: (step + 1) / warmup if step < warmup else theirs(step))


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown or not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in installed:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            absent = f"is not installed: pip install {name}, or leave it out"
            what = absent if name in LOGGER_TYPE_TO_CLASS else f"is unknown; known are {known}"
            raise ConfigError(f"tracking.trackers: {name} {what}")
