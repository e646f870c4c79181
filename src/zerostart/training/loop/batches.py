"""Choose the examples of each batch, and their order.

The order depends only on the seed, the epoch, the batch size and the number of batches in a step. So each
step has the same examples for any number of ranks, also after a resume.
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
    """Sampler of batches; a bucket has examples with equal ``shapes``.

    Each epoch draws a new order of the examples. When a bucket has ``step`` batches of ``batch_size``, they
    become the next step. The last steps consist of the remaining whole batches of all buckets; a batch never
    mixes buckets. Examples that fill no batch, and batches that fill no step, are skipped in this epoch.
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
        """This object, since accelerate calls ``set_epoch`` on a batch sampler's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def skip(self, batches: int) -> None:
        """Skip the first ``batches`` of only the next iteration."""
        self._skipped = batches

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which all epochs share."""
        # Steps of one bucket, and steps of the rest of all buckets, as in ``_batches``.
        whole = sum(size // (self.batch_size * self._step) for size in self._sizes.values())
        spare = sum(size % (self.batch_size * self._step) // self.batch_size for size in self._sizes.values())
        return (whole + spare // self._step) * self._step

    def __iter__(self) -> Iterator[list[int]]:
        start, self._skipped = self._skipped, 0
        # Draw the whole order, so that skipping does not change the batches after it.
        return itertools.islice(self._batches(), start, None)

    @property
    def order(self) -> str:
        """Description of the order of an epoch; equal descriptions mean equal orders."""
        # In one bucket, the batch size does not change which examples form a step.
        if len(self._sizes) == 1:
            return f"seed {self._seed}, {self.batch_size * self._step} examples a step"
        return f"seed {self._seed}, {self._step} batches of {self.batch_size} a step"

    def never_seen(self) -> int:
        """Return the number of examples in buckets that fill no batch."""
        return sum(size for size in self._sizes.values() if size < self.batch_size)

    def _batches(self) -> Iterator[list[int]]:
        # Seed as accelerate's own sampler does, so that one bucket has the same order.
        generator = torch.Generator(device="cpu").manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(len(self._shapes), generator=generator, device="cpu").tolist()
        waiting: dict[Hashable, list[int]] = {}
        for index in order:
            bucket = waiting.setdefault(self._shapes[index], [])
            bucket.append(index)
            if len(bucket) == self.batch_size * self._step:
                yield from self._split_batches(bucket)
                bucket.clear()
        spare = [batch for bucket in waiting.values() for batch in self._split_batches(bucket)]
        # Yield only whole steps, since each rank needs a batch in every step.
        yield from spare[: len(spare) // self._step * self._step]

    def _split_batches(self, bucket: Sequence[int]) -> list[list[int]]:
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
            "times ranks), and all examples of a batch need the same shapes: lower one of these, or raise "
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
