"""Own slices that are foreseen without planning each rank are those that the full choice takes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from tests.drawn import examples
from tests.tiny import TinyCheckpoints
from zerostart.distributed.world import World
from zerostart.live.report import Clock
from zerostart.loading.forecast import Subject
from zerostart.loading.forecast.reading import Foreseen, counts_of, owned_by
from zerostart.loading.forecast.result import RankForecast, WorldPlan
from zerostart.loading.preparation import prepare
from zerostart.loading.request import Request
from zerostart.transfer import Tuning
from zerostart.transfer.collective import chosen
from zerostart.transfer.planning import Rates

KiB = 1 << 10


def foreseen(request: Request, world_size: int, tuning: Tuning, rates: Rates) -> tuple[Foreseen, WorldPlan]:
    """What decides it, and the plan for own slices, as `forecast.foresee` makes them."""
    engine = request.resolve(world_size)
    known = prepare(request, engine, World(0, 1, None), Clock(), strict=False)
    subject = Subject(known.catalog, known.built.model, known.recipes, known.coverage, known.origins)
    placed = engine.placements(subject.model, known.parallelism)
    ranks = range(world_size)
    shown = sorted({placed.twin(rank) for rank in ranks})
    counts = counts_of(
        subject.catalog,
        subject.origins,
        placed,
        owned_by(subject.model, placed, shown),
        shown,
        tuning,
        True,
    )
    read = dict(zip(shown, counts, strict=True))
    made = WorldPlan.of(
        subject.catalog,
        subject.recipes,
        subject.coverage,
        request.engine,
        world_size,
        [RankForecast(r, read[placed.twin(r)].nbytes, read[placed.twin(r)].reads, 0, 0) for r in ranks],
        0.0,
    )
    return Foreseen(subject.catalog, subject.origins, placed, tuning, rates, True), made


def full_choice(decides: Foreseen, made: WorldPlan) -> bool:
    """Whether the choice from every rank's plan is to read once."""
    plans = decides._plans(made.world_size, decides.tuning.chunk_size)
    sharing = chosen(decides._wants(plans, None), sum(decides.catalog.sizes))
    return sharing is not None and sharing.once


def along_columns(parameter: Any) -> Shard | None:
    return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % 4 == 0 else None


CASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero3-experts": {"expert_parallel": 3},
    "zero2": {"zero_stage": 2},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-replicas": {"engine": "fsdp2", "engine_config": {"replicate": 4}},
    "fsdp2-all-replicas": {"engine": "fsdp2", "engine_config": {"replicate": 12}},
    "fsdp2-columns": {
        "engine": "fsdp2",
        "engine_config": {"replicate": 3, "shard_placement_fn": along_columns},
    },
    "fsdp2-experts": {"engine": "fsdp2", "expert_parallel": 3},
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(12))
@given(
    shared=st.sampled_from([1e7, 1e9, 1e11, float("inf")]),
    link=st.sampled_from([1e6, 2e9, 1e11]),
    interconnect=st.sampled_from([1e6, 1e9, 2e11]),
    chunk=st.sampled_from([64 * KiB, 8192 * KiB]),
)
def test_what_is_plainly_own_is_chosen(
    case: str, checkpoints: TinyCheckpoints, shared: float, link: float, interconnect: float, chunk: int
) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16, sharded=True)
    rates = Rates(shared=shared, link=link, interconnect=interconnect)
    request = Request(path, **CASES[case])
    decides, made = foreseen(request, 12, Tuning(2, chunk, cold=True), rates)
    if decides._plainly_own(made):
        assert not full_choice(decides, made)


def test_it_says_no_where_reading_once_is_chosen(checkpoints: TinyCheckpoints) -> None:
    """And so the test above tests something: of replicas over slow storage bytes are read once."""
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16, sharded=True)
    rates = Rates(shared=1e6, link=1e9, interconnect=1e11)
    tuning = Tuning(2, 64 * KiB, cold=True)
    config = {"replicate": 12}
    own, own_made = foreseen(Request(path), 12, tuning, rates)
    many, many_made = foreseen(Request(path, engine="fsdp2", engine_config=config), 12, tuning, rates)
    assert own._plainly_own(own_made)
    assert not full_choice(own, own_made)
    assert not many._plainly_own(many_made)
    assert full_choice(many, many_made)
