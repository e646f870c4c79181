"""Which examples make up a batch, in which order.

The order of batches whose examples have tensors of the same shapes follows from the seed, the epoch, the
size of a batch and the number of batches in a step alone: so any number of ranks that share a step of that
many batches see the same examples in each step, also when one resumes from a checkpoint of another.
"""

from __future__ import annotations

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
    """Batches of indices; those with the same one of ``shapes`` are a bucket.

    In each epoch the examples come in a new order. Whenever ``step`` batches of ``batch_size`` of one
    bucket have come together they are the next step. What is left of the buckets in the end makes up steps
    of several buckets, each batch still of one. What then fills no batch, and batches that fill no step,
    are left out of this epoch: others in each.
    """

    def __init__(self, shapes: Sequence[Hashable], batch_size: int, step: int, seed: int) -> None:
        self._shapes = shapes
        self.batch_size = batch_size
        self.drop_last = True
        self._step = step
        self._seed = seed
        self._epoch = 0
        # Batches to be left out of the next pass; it forgets them, for the epoch after is whole again.
        self._passed_over = 0
        self._sizes = Counter(shapes)

    @property
    def sampler(self) -> Buckets:
        """Itself: accelerate tells the sampler of a sampler of batches which epoch it is."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be that of ``epoch``."""
        self._epoch = epoch

    def pass_over(self, batches: int) -> None:
        """Have the next pass, and no other, begin after so many batches."""
        self._passed_over = batches

    def __len__(self) -> int:
        """Batches of an epoch: equally many in each."""
        # In two parts, as ``_batches`` makes them: steps of one bucket, and what is left of all buckets
        # together.
        whole = sum(size // (self.batch_size * self._step) for size in self._sizes.values())
        left = sum(size % (self.batch_size * self._step) // self.batch_size for size in self._sizes.values())
        return (whole + left // self._step) * self._step

    def __iter__(self) -> Iterator[list[int]]:
        # The order is drawn whole also where a part is passed over: what is left of it is then as it was.
        start, self._passed_over = self._passed_over, 0
        for number, batch in enumerate(self._batches()):
            if number >= start:
                yield batch

    @property
    def order(self) -> str:
        """By what the order of an epoch goes, in words: that of two with the same words is the same."""
        # Of one bucket the examples come as they are drawn, however a step is cut into batches.
        if len(self._sizes) == 1:
            return f"seed {self._seed}, {self.batch_size * self._step} examples a step"
        return f"seed {self._seed}, {self._step} batches of {self.batch_size} a step"

    def never_seen(self) -> int:
        """How many examples are in buckets that fill no batch."""
        return sum(size for size in self._sizes.values() if size < self.batch_size)

    def _batches(self) -> Iterator[list[int]]:
        # As accelerate seeds its own sampler: where all are of one bucket the order is the same.
        generator = torch.Generator(device="cpu").manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(len(self._shapes), generator=generator, device="cpu").tolist()
        waiting: dict[Hashable, list[int]] = {}
        for index in order:
            # Of several buckets the one that fills up first comes first: that follows from the drawn order,
            # so it is the same on every rank.
            together = waiting.setdefault(self._shapes[index], [])
            together.append(index)
            if len(together) == self.batch_size * self._step:
                yield from self._cut(together)
                together.clear()
        left = [batch for together in waiting.values() for batch in self._cut(together)]
        # Whole steps alone: each rank has to have a batch in each.
        yield from left[: len(left) // self._step * self._step]

    def _cut(self, together: Sequence[int]) -> list[list[int]]:
        """Whole batches."""
        starts = range(0, len(together) - self.batch_size + 1, self.batch_size)
        return [list(together[start : start + self.batch_size]) for start in starts]


def epochs_as_steps(items: Items, train: TrainingConfig, count: int) -> TrainingConfig:
    """``train`` with as many steps as its epochs are, rounded up; as it is where it has none.

    ``count`` batches go to the ranks at a time. Raises :class:`ConfigError` where an epoch has no batch.
    """
    if train.epochs is None:
        return train
    at_once = count * train.accumulation
    batches = len(Buckets(items.shapes(), train.batch_size, at_once, train.seed))
    # Too few examples for a step are refused where the order is made, in words of the data.
    return train.model_copy(update={"steps": max(1, train.epochs * batches // at_once), "epochs": None})


def order_of(items: Items, train: TrainingConfig, count: int) -> Buckets:
    """In which order a ``DataLoader`` takes ``items``, of which ``count`` batches go to the ranks at a time.

    Raises :class:`ConfigError` for too few items.
    """
    buckets = Buckets(items.shapes(), train.batch_size, count * train.accumulation, train.seed)
    if not len(buckets):
        raise ConfigError(
            f"the data has {len(items)} examples to train on; one step takes "
            f"{train.batch_size * count * train.accumulation} (train.batch_size, times train.accumulation, "
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
