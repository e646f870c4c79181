"""Order of examples: a batch has one shape; the number of ranks changes nothing."""

import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hypothesis_settings import count_examples
from zerostart.training.config.configuration import CheckpointConfig, TrainingConfig
from zerostart.training.loop import checkpoints
from zerostart.training.loop.batches import Buckets, convert_epochs
from zerostart.training.loop.checkpoints import Checkpoints

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=60)
SIZES = {"batch_size": st.integers(1, 3), "step": st.integers(1, 12), "seed": st.integers(0, 2**40)}


def list_epoch(buckets, epoch):
    buckets.set_epoch(epoch)
    return list(buckets)


@given(shapes=SHAPES, epoch=st.integers(0, 5), **SIZES)
@settings(max_examples=count_examples(100))
def test_whole_steps_of_batches_of_one_shape(shapes, batch_size, step, seed, epoch):
    buckets = Buckets(shapes, batch_size, step, seed)
    batches = list_epoch(buckets, epoch)
    assert len(batches) == len(buckets)
    assert len(batches) % step == 0
    assert all(len(batch) == batch_size for batch in batches)
    assert all(len({shapes[index] for index in batch}) == 1 for batch in batches)
    counts = Counter(index for batch in batches for index in batch)
    assert set(counts.values()) <= {1}
    # Left out: less than a batch of each shape, and less than a step of batches.
    left_out = Counter(shapes) - Counter(shapes[index] for index in counts)
    assert sum(count // batch_size for count in left_out.values()) < step
    # Steps of several shapes come last, and are no more than are needed.
    mixed = [
        len({shapes[batch[0]] for batch in batches[at : at + step]}) > 1
        for at in range(0, len(batches), step)
    ]
    assert mixed == sorted(mixed)
    assert buckets.never_seen() == sum(count for count in Counter(shapes).values() if count < batch_size)


@given(shapes=SHAPES, epoch=st.integers(0, 3), start=st.integers(0, 40), **SIZES)
@settings(max_examples=count_examples(100))
def test_a_step_has_the_same_examples_on_any_number_of_ranks(shapes, batch_size, step, seed, epoch, start):
    """Accelerate divides the batches, also after a skip."""
    whole = list_epoch(Buckets(shapes, batch_size, step, seed), epoch)
    for ranks in (1, 2, 3, 4):
        if step % ranks:
            continue
        steps = start % (len(whole) // step + 1)
        parts = []
        for rank in range(ranks):
            buckets = Buckets(shapes, batch_size, step, seed)
            buckets.skip(steps * step)
            shard = BatchSamplerShard(buckets, ranks, rank) if ranks > 1 else buckets
            parts.append(list_epoch(shard if ranks == 1 else _EpochShard(shard, buckets), epoch))
            assert list_epoch(buckets, epoch) == whole  # only one pass skips
        merged = [batch for batches in zip(*parts, strict=True) for batch in batches]
        assert merged == whole[steps * step :]


class _EpochShard:
    """Shard that passes the epoch to its batch sampler, as accelerate's loader does."""

    def __init__(self, shard, buckets):
        self.shard, self.buckets = shard, buckets

    def set_epoch(self, epoch):
        self.shard.batch_sampler.sampler.set_epoch(epoch)

    def __iter__(self):
        return iter(self.shard)


@given(count=st.integers(1, 50), epoch=st.integers(0, 3), **SIZES)
@settings(max_examples=count_examples(100))
def test_examples_of_one_shape_come_as_accelerate_shuffles_them(count, batch_size, step, seed, epoch):
    sampler = SeedableRandomSampler(range(count), data_seed=seed)
    sampler.set_epoch(epoch)
    order = [
        index for batch in list_epoch(Buckets([0] * count, batch_size, step, seed), epoch) for index in batch
    ]
    assert order == list(sampler)[: count // (batch_size * step) * batch_size * step]


def test_each_epoch_has_another_order_and_leaves_out_others():
    buckets = Buckets([0] * 10 + [1] * 5, 2, 2, seed=3)
    random_state = torch.get_rng_state()
    epochs = [list_epoch(buckets, epoch) for epoch in range(20)]
    assert torch.equal(random_state, torch.get_rng_state())
    assert len({str(epoch) for epoch in epochs}) == 20
    assert epochs[3] == list_epoch(buckets, 3)
    assert {index for epoch in epochs for batch in epoch for index in batch} == set(range(15))


@pytest.mark.parametrize(
    ("shapes", "batch_size", "step", "warned"),
    [(["a"] * 12, 3, 1, False), (["a"] * 12, 3, 2, True), (["a", "b"] * 6, 3, 1, True)],
)
def test_resuming_in_another_order_warns(shapes, batch_size, step, warned, monkeypatch, caplog):
    """Resume 3 batches of 1 in a step as 1 batch of 3."""
    before = Buckets(shapes, 1, 3, 0)
    now = Buckets(shapes, batch_size, step, 0)
    monkeypatch.setattr(checkpoints, "restore_state", lambda *arguments: None)
    extra = {
        "course": {"data": "d"},
        "order": before.order,
        "epoch": 0,
        "sequences": 3,
        "step": 1,
        "schedule": {},
    }
    monkeypatch.setattr(checkpoints, "_extra", lambda path: extra | {"losses": [1.0, 1.0], "held_out": []})
    session = SimpleNamespace(
        buckets=now,
        model=None,
        ema=None,
        engine=SimpleNamespace(owns_optimizer=True),
        scheduler=SimpleNamespace(load_state_dict=lambda state: None),
        batches_after=lambda epoch, items: iter(()),
    )
    with caplog.at_level(logging.WARNING, "zerostart"):
        Checkpoints(CheckpointConfig(), Path("x"), session, {"data": "d"}, False).resume(
            Path("x", "step-00000001")
        )
    assert ("of another order" in caplog.text) == warned


@given(
    shapes=SHAPES,
    ranks=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    batch_size=st.integers(1, 3),
    epochs=st.integers(1, 3),
)
@settings(max_examples=count_examples(100))
def test_epochs_are_converted_to_steps(shapes, ranks, accumulation, batch_size, epochs):
    """The expected steps are counted over accelerate's shards."""
    batches = Buckets(shapes, batch_size, ranks * accumulation, 0)
    counts = [len(list(BatchSamplerShard(batches, ranks, rank, even_batches=True))) for rank in range(ranks)]
    train = TrainingConfig(epochs=epochs, batch_size=batch_size, accumulation=accumulation, seed=0)
    converted = convert_epochs(_Items(shapes), train, ranks)
    assert [converted.steps] * ranks == [max(1, -(-epochs * rounds // accumulation)) for rounds in counts]


class _Items(list):
    def shapes(self):
        return self
