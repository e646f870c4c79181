"""Prepare a loaded model for training by accelerate: precision, accumulation, trackers and data.

The model comes sharded from ``zerostart.load``; nothing here moves or shards it again.
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
from zerostart.training.loop.batches import Buckets, make_buckets
from zerostart.training.loop.failures import raised_locally
from zerostart.training.loop.optimizers import optimizer_factory
from zerostart.training.loop.task import Batch, Items, Task
from zerostart.upstream.accelerate.plugins import hidden

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer


@dataclass
class Session:
    """A model in training, with its optimizer and data."""

    accelerator: Accelerator
    model: nn.Module  # wrapped by the engine
    optimizer: AcceleratedOptimizer
    scheduler: Any
    loader: DataLoaderShard
    task: Task
    engine: Engine
    buckets: Buckets  # the order of the examples
    position: tuple[int, int] = (0, 0)  # the epoch, and its rounds so far (one batch on every rank)
    ema: Ema | None = None

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def items_a_round(self) -> int:
        """Examples in one batch on every rank."""
        return self.buckets.batch_size * int(self.accelerator.num_processes)

    def batches(self, epoch: int = 0, skipped: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches from ``epoch`` on, without its first ``skipped`` rounds."""
        self.buckets.skip(skipped * int(self.accelerator.num_processes))
        while True:
            # The order of an epoch follows from the seed and its number, also in a resumed run.
            self.loader.set_epoch(epoch)
            for number, batch in enumerate(self.loader, start=skipped + 1):
                # A batch counts as soon as its step begins.
                self.position = (epoch, number)
                yield batch
            epoch, skipped = epoch + 1, 0

    def batches_after(self, epoch: int, items: int) -> Iterator[Batch]:
        """Return the batches after the first ``items`` examples of ``epoch`` on all ranks together.

        If rounds had another size and do not end at the same place, some examples come again.
        """
        skipped = items // self.items_a_round
        if skipped >= len(self.loader):
            return self.batches(epoch + 1)
        batches = self.batches(epoch, skipped)
        # The first batch draws, so it is made before random states are restored.
        return chain([next(batches)], batches)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of one batch, []."""
        return self.task.loss(self.model, batch)

    def accumulate(self, batch: Batch, share: float) -> torch.Tensor:
        """Run forward and backward of one batch; return its mean loss, detached, [].

        ``share`` (0 to 1) weighs the loss in the gradients of the step, of all batches on all ranks.
        """
        # Engines average over ranks, and accelerate or DeepSpeed over the batches of a step.
        divisor = self.engine.gradient_divisor * self.accelerator.gradient_accumulation_steps
        # accelerate sets ``sync_gradients`` inside: gradients are reduced at the last batch of a step.
        with self.accelerator.accumulate(self.model):
            self.engine.begin_batch(self.model, self.accelerator.sync_gradients)
            loss = self.forward(batch)
            # In float32: in 16 bits the product would be rounded.
            self.accelerator.backward(loss.float() * (share * divisor))
        return loss.detach()

    def clip(self, max_grad_norm: float) -> float | None:
        """Clip the gradients of a step, and return their norm before that; collective.

        None if the engine does not report it (DeepSpeed in fp32 at stage 0).
        """
        # DeepSpeed has clipped and stepped in the backward; accelerate asks it for the norm.
        norm = self.accelerator.clip_grad_norm_(list(self.model.parameters()), max_grad_norm or math.inf)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def update(self) -> bool:
        """Step the optimizer after ``clip``; return False if the engine skipped an fp16 overflow."""
        self.optimizer.step()
        has_stepped = not self.optimizer.step_was_skipped
        # The schedule counts steps of the optimizer.
        if has_stepped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return has_stepped

    def average(self, step: int) -> None:
        """Update the average of the weights after ``step``, if it is due."""
        if self.ema is not None and step % self.ema.config.every == 0:
            self.ema.update()

    def averaged(self, enabled: bool) -> AbstractContextManager[None]:
        """Replace the weights by their average inside the block, if ``enabled``; collective."""
        if self.ema is None or not enabled:
            return nullcontext()
        return self.ema.applied(self.model, current_world())

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks; collective."""
        # On the host, for float64, which not every accelerator has.
        totals, world = torch.tensor(values, dtype=torch.float64, device="cpu"), current_world()
        if world.size > 1:
            torch.distributed.all_reduce(totals, group=world.group)
        summed: list[float] = totals.tolist()
        return summed

    def end(self) -> None:
        """End the trackers and the process group; the session cannot be used afterwards."""
        # The reducer of DistributedDataParallel must not be the last to hold the group: its destructor keeps
        # the GIL while it joins gloo's threads (torch 2.13), one of which may be waiting for the GIL.
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
    """Make optimizer, schedule and loader for the loaded ``model``, prepared by accelerate; collective.

    Raises ConfigError for data that do not fill one step, and for a tracker that cannot start.
    """
    engine = get_record(model).engine
    accelerator = _accelerator(engine, train, precision, tracking, directory)
    # Before the first collective: too few data are an error on every rank.
    buckets = make_buckets(items, train, accelerator.num_processes)
    optimizer = optimizer_factory(train)(_parameter_groups(model, train.weight_decay))
    collator = task.collator(train.seed + accelerator.process_index)
    data: Any = items  # DataLoader accepts it, though it is no Dataset
    loader: Any = DataLoader(data, collate_fn=collator, num_workers=workers, batch_sampler=buckets)
    with current_world().collectives("preparing the training"), raised_locally():
        if engine.owns_optimizer or engine.replicates_parameters:
            model, prepared = accelerator.prepare(model, optimizer)
        else:
            # Without the model: accelerate would wrap it in DDP, and it is sharded already.
            prepared = accelerator.prepare(optimizer)
        engine.exempt_unreached(model)  # needs the wrapped model
    loader = accelerator.prepare_data_loader(loader)
    # Not prepared: accelerate would step it once per rank.
    scheduler = learning_rate_schedule(optimizer, train)
    if tracking.trackers:
        _begin_trackers(accelerator, tracking, train)
    opened = Session(accelerator, model, prepared, scheduler, loader, task, engine, buckets)
    if ema is not None:
        # Last: it averages the masters of mixed precision, which exist only now.
        opened.ema = Ema(ema, model, None if engine.owns_optimizer else prepared, current_world())
    return opened


def _begin_trackers(accelerator: Accelerator, tracking: TrackingConfig, train: TrainingConfig) -> None:
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
    with hidden():  # the configuration has the launcher's choices by now
        setup = engine.accelerate_setup(precision)
        for message, category in setup.ignored:
            warnings.filterwarnings("ignore", message, category)
        with patch_environment(**setup.environment):
            return Accelerator(**setup.options, **common)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the trained parameters into matrices with weight decay, and biases and norms without."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if len(full_shape(parameter)) > 1 else undecayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate_schedule(optimizer: Optimizer, train: TrainingConfig) -> LambdaLR:
    """Return the schedule of ``train``, to be stepped after each optimizer step.

    Step ``k`` (from 0) of ``train.warmup_steps`` = ``W`` has the rate ``learning_rate * (k + 1) / W``, so no
    step has the rate 0. Other steps have that of ``transformers.get_scheduler``, whose warm-up is ``k / W``.
    """
    from transformers import get_scheduler

    schedule: Any = get_scheduler(train.schedule, optimizer, train.warmup_steps, train.last_step)
    rate: Callable[[int], float] = schedule.lr_lambdas[0]
    warmup = 0 if train.schedule == "constant" else train.warmup_steps  # "constant" has no warm-up
    return LambdaLR(optimizer, lambda step: (step + 1) / warmup if step < warmup else rate(step))


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown or not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in installed:
            names_known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            absent = f"is not installed: pip install {name}, or leave it out"
            problem = absent if name in LOGGER_TYPE_TO_CLASS else f"is unknown; known are {names_known}"
            raise ConfigError(f"tracking.trackers: {name} {problem}")
