"""Hand a loaded model to accelerate: precision, accumulation, trackers and data, on either engine.

The model comes sharded from ``zerostart.load``; nothing here moves, wraps or shards it again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from zerostart.distributed.world import current_world
from zerostart.engines import Engine
from zerostart.errors import ConfigError, EngineError
from zerostart.loading.record import record_of
from zerostart.training.config import TrainConfig
from zerostart.training.failures import untold
from zerostart.training.schedule import learning_rate_schedule
from zerostart.training.sequences import Sharing
from zerostart.training.tasks.base import Batch, Items, Task

__all__ = ["Session", "check_surroundings", "open_session"]


@dataclass
class Session:
    """A model in training: what the loop needs of accelerate and the engine."""

    accelerator: Any
    model: nn.Module  # as the engine wraps it: call this
    optimizer: Any
    scheduler: Any
    loader: Any
    task: Task
    engine: Engine  # that the model was loaded for
    items_a_round: int  # in one batch on every rank, or on all that share one
    sharing: Sharing | None  # of sequences that ranks share
    draws: bool  # whether making a batch draws from a generator that is no rank's own random state
    position: tuple[int, int] = (0, 0)  # the epoch, and the rounds of it that were had

    @property
    def device(self) -> torch.device:
        """Where the batches go."""
        device: torch.device = self.accelerator.device
        return device

    def batches(self, epoch: int = 0) -> Iterator[Batch]:
        """This rank's batches, epoch after epoch from ``epoch`` on, each in a new order."""
        while True:
            self.loader.set_epoch(epoch)
            for number, batch in enumerate(self.loader, start=1):
                self.position = (epoch, number)
                yield batch
            epoch += 1

    def batches_after(self, epoch: int, items: int) -> Iterator[Batch]:
        """The batches that follow when all ranks together have had ``items`` of ``epoch``.

        The order is the same for any number of ranks; where rounds were of another size, and do not end at
        the same place, some come again.
        """
        batches = self.batches(0 if self.draws else epoch)
        for _ in range(epoch * len(self.loader) * self.draws + items // self.items_a_round):
            next(batches)
        return batches

    def part(self, batch: Batch, weight: int) -> tuple[Batch, int]:
        """What this rank computes of a whole ``batch``, and how much of its ``weight`` that has."""
        return (batch, weight) if self.sharing is None else self.sharing.part(batch, weight)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean loss of one batch, [], as the task computes it."""
        with self.engine.attending():
            return self.task.loss(self.model, batch)

    def accumulate(self, batch: Batch, share: float) -> torch.Tensor:
        """Forward and backward of one batch; returns its mean loss, detached, [].

        ``share`` is its part (0 to 1) of the weight of the whole step, of all batches on all ranks.
        The gradients of the step come out as those of the sum of all losses times their shares.
        """
        # Every engine averages over ranks, and accelerate or DeepSpeed over the batches of a step: both as if
        # all weighed alike.
        alike = self.engine.averaging * self.accelerator.gradient_accumulation_steps
        with self.accelerator.accumulate(self.model):
            self.engine.begin_batch(self.model, self.accelerator.sync_gradients)
            loss = self.forward(batch)
            with self.engine.attending():
                self.accelerator.backward(loss.float() * (share * alike))
        return loss.detach()

    def clip(self, max_grad_norm: float) -> float | None:
        """Clip the gradients after the last batch of an accumulation; collective.

        Returns their norm before that; None where the engine does not tell (DeepSpeed in fp32 at stage 0).
        """
        parameters = list(self.model.parameters())
        if self.engine.wraps or max_grad_norm > 0.0:
            # DeepSpeed has clipped and stepped in the backward; accelerate knows that, and asks it.
            norm = self.accelerator.clip_grad_norm_(parameters, max_grad_norm)
        else:
            norm = _total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def update(self) -> None:
        """The optimizer step, after ``clip``; every rank by itself."""
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Each value added up over all ranks; collective."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(totals)
        summed: list[float] = totals.tolist()
        return summed

    def end(self) -> None:
        """End the trackers and the process group; the session can't be used afterwards.

        What the engine has wrapped goes first. The reducer of DistributedDataParallel must not be the last to
        hold the group: its destructor keeps the GIL while it joins gloo's threads (torch 2.13), and one of
        these may be waiting for the GIL to release a tensor.
        """
        del self.model, self.optimizer, self.scheduler, self.loader
        self.accelerator.free_memory()
        self.accelerator.end_training()


def check_surroundings(config: TrainConfig) -> None:
    """Find out before the load whether accelerate will be able to do its part.

    Raises :class:`ConfigError` for a tracker that is unknown or not installed, :class:`EngineError` when
    ``accelerate launch`` has set up another engine, which would wrap the sharded model a second time, or has
    ranks share what the configuration of the run does not know of.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in config.tracking.trackers:
        if name not in installed:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            what = "is not installed" if name in LOGGER_TYPE_TO_CLASS else f"is unknown; known are {known}"
            raise ConfigError(f"tracking.trackers: {name} {what}")
    allowed = config.engine.chosen().launched_by
    for variable in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        if os.environ.get(variable, "false").lower() == "true" and variable != allowed:
            raise EngineError(
                f"{variable}=true, but this run shards with {config.engine.name} by itself; start it with a "
                "plain multi-process accelerate configuration, with torchrun, or with --nproc"
            )
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        raise EngineError(
            "ACCELERATE_USE_PARALLELISM_CONFIG=true, but this run shares sequences by itself, as "
            "engine.sequence_parallel says; start it with a plain multi-process accelerate configuration"
        )


def open_session(config: TrainConfig, model: nn.Module, task: Task, items: Items) -> Session:
    """Make the optimizer, schedule and loader for the loaded ``model`` and let accelerate prepare them.

    Raises :class:`ConfigError` for data that does not fill one step.
    """
    train, engine = config.train, record_of(model).engine
    accelerator = _accelerator(config, engine)
    place, count = engine.mesh.batch(accelerator.process_index)
    needed = train.batch_size * count
    if len(items) < needed:
        raise ConfigError(
            f"the data has {len(items)} {task.examples} to train on; one batch on every rank takes {needed}"
        )
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, train.weight_decay), lr=train.learning_rate, betas=train.betas
    )
    # What is drawn differs from rank to rank in training.
    collator = task.collator(train.seed + accelerator.process_index)
    data: Any = items  # which DataLoader takes without it being its Dataset
    loader: Any = DataLoader(
        data,
        batch_size=train.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collator,
    )
    with current_world().collectives("preparing the training"), untold():
        if engine.wraps or engine.whole:
            model, prepared = accelerator.prepare(model, optimizer)  # whole ones in DDP
        else:
            # Without the model: accelerate would wrap it in DDP (it knows FSDP2 on accelerators only), and
            # for a module that is sharded already it has nothing to do.
            prepared = accelerator.prepare(optimizer)
        engine.begin_sharing(model)
    loader = _prepared(accelerator, loader, place, count)
    # Not prepared: accelerate steps a prepared scheduler once per rank, ours counts optimizer steps.
    scheduler = learning_rate_schedule(optimizer, train)
    if config.tracking.trackers:
        accelerator.init_trackers(config.tracking.project, config={"train": train.model_dump_json()})
    draws = getattr(collator, "generator", None) is not None
    sharing = None
    if engine.mesh.sequence_parallel > 1:
        sharing = Sharing(*engine.sequence_chunks(accelerator.process_index), train.batch_size)
    return Session(accelerator, model, prepared, scheduler, loader, task, engine, needed, sharing, draws)


def _prepared(accelerator: Any, loader: Any, place: int, count: int) -> Any:
    """The ``loader`` of the batches at ``place`` of ``count`` at a time, as accelerate prepares one.

    Not by ``accelerator.prepare``: it knows no ranks that see one batch, or has each draw its own.
    """
    from accelerate.data_loader import prepare_data_loader

    options = accelerator.dataloader_config
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=count,
        process_index=place,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        even_batches=options.even_batches,
        use_seedable_sampler=options.use_seedable_sampler,
        data_seed=options.data_seed,
    )


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, [], which may lie on several meshes (experts on their own)."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(
            gradient
        )
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(whole))
    return total


def _accelerator(config: TrainConfig, engine: Engine) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        patch_environment,
    )

    common: dict[str, Any] = {
        "log_with": config.tracking.trackers or None,
        "project_dir": config.output.directory,
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=config.train.seed),
        # A step is `accumulation` batches, also where an epoch ends in between.
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=config.train.accumulation, sync_with_dataloader=False
        ),
    }
    setup = engine.accelerate(config.train.mixed_precision)
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
            shape = getattr(parameter, "ds_shape", parameter.shape)  # a ZeRO-3 placeholder is empty
            (decayed if len(shape) > 1 else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
