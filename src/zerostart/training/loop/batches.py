"""Choose the examples of each batch, and their order.

The order follows from the seed, the epoch, the batch size and the number of batches in a step: any number of
ranks that share such a step sees the same examples in each step, also after a resume.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch.utils.data import Sampler

from zerostart.errors import ConfigError
from zerostart.training.config.configuration import TrainingConfig
from zerostart.training.loop.task import Items

logger = logging.getLogger("zerostart")


class Buckets(Sampler[list[int]]):
    """Batches of indices; examples with equal ``shapes`` are a bucket.

    In each epoch the examples come in a new order. As soon as a bucket has ``step`` batches of
    ``batch_size``, they are the next step. The remaining whole batches of all buckets make up the last steps;
    each batch is of one bucket. Examples that fill no batch, and batches that fill no step, are left out of
    this epoch.
    """

    def __init__(self, shapes: Sequence[Hashable], batch_size: int, step: int, seed: int) -> None:
        self._shapes = shapes
        self.batch_size = batch_size
        self.drop_last = True
        self._step = step
        self._seed = seed
        self._epoch = 0
        self._skipped = 0
        self._sizes = Counter(shapes)

    @property
    def sampler(self) -> Buckets:
        """Itself: accelerate calls ``set_epoch`` of a batch sampler's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._epoch = epoch

    def skip(self, batches: int) -> None:
        """Skip the first ``batches`` of the next pass only."""
        self._skipped = batches

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same in each."""
        # Steps of one bucket, and steps of the rest of all buckets, as in ``_batches``.
        whole = sum(size // (self.batch_size * self._step) for size in self._sizes.values())
        rest = sum(size % (self.batch_size * self._step) // self.batch_size for size in self._sizes.values())
        return (whole + rest // self._step) * self._step

    def __iter__(self) -> Iterator[list[int]]:
        start, self._skipped = self._skipped, 0
        # The whole order is drawn, so that the rest is the same without the skipped part.
        return itertools.islice(self._batches(), start, None)

    @property
    def order(self) -> str:
        """Description of the order of an epoch; equal descriptions mean equal orders."""
        # In one bucket the examples come in the drawn order, however a step is cut into batches.
        if len(self._sizes) == 1:
            return f"seed {self._seed}, {self.batch_size * self._step} examples a step"
        return f"seed {self._seed}, {self._step} batches of {self.batch_size} a step"

    def never_seen(self) -> int:
        """Return the number of examples in buckets that fill no batch."""
        return sum(size for size in self._sizes.values() if size < self.batch_size)

    def _batches(self) -> Iterator[list[int]]:
        # As accelerate seeds its own sampler: with one bucket the order is the same.
        generator = torch.Generator(device="cpu").manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(len(self._shapes), generator=generator, device="cpu").tolist()
        waiting: dict[Hashable, list[int]] = {}
        for index in order:
            bucket = waiting.setdefault(self._shapes[index], [])
            bucket.append(index)
            if len(bucket) == self.batch_size * self._step:
                yield from self._cut(bucket)
                bucket.clear()
        rest = [batch for bucket in waiting.values() for batch in self._cut(bucket)]
        # Only whole steps: each rank needs a batch in each.
        yield from rest[: len(rest) // self._step * self._step]

    def _cut(self, bucket: Sequence[int]) -> list[list[int]]:
        starts = range(0, len(bucket) - self.batch_size + 1, self.batch_size)
        return [list(bucket[start : start + self.batch_size]) for start in starts]


def convert_epochs(items: Items, train: TrainingConfig, ranks: int) -> TrainingConfig:
    """Return ``train`` with its epochs, if any, converted to steps (at least one)."""
    if train.epochs is None:
        return train
    step = ranks * train.accumulation
    batches = len(Buckets(items.shapes(), train.batch_size, step, train.seed))
    return train.model_copy(update={"steps": max(1, train.epochs * batches // step), "epochs": None})


def make_buckets(items: Items, train: TrainingConfig, ranks: int) -> Buckets:
    """Return the order of ``items`` for a ``DataLoader``. Raises ConfigError for too few items."""
    buckets = Buckets(items.shapes(), train.batch_size, ranks * train.accumulation, train.seed)
    if not len(buckets):
        raise ConfigError(
            f"the data has {len(items)} examples to train on; one step takes "
            f"{train.batch_size * ranks * train.accumulation} (train.batch_size, times train.accumulation, "
            "times ranks), and those of one batch have the same shapes: lower one of these, or raise "
            "media.repeats"
        )
    if buckets.never_seen():
        logger.warning(
            "%d of %d examples are never trained on, because fewer than train.batch_size %d have their "
            "shapes: lower train.batch_size, or use fewer sizes (media.buckets)",
            buckets.never_seen(),
            len(items),
            train.batch_size,
        )
    return buckets
