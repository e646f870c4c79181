"""Who reads what of the bytes that several ranks want."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn import examples
from zerostart.errors import ConfigError
from zerostart.transfer import MIN_CHUNK
from zerostart.transfer.collective import (
    ReadDemand,
    choose_strategy,
    find_groups,
    find_levels,
    make_rounds,
    read_by_place,
)
from zerostart.transfer.planning import Read

LIMIT = 100


def read(number: int, nbytes: int) -> Read:
    return Read(0, 1000 * number, nbytes, (), False)


@settings(max_examples=examples(100, 2000))
@given(sizes=st.lists(st.integers(1, LIMIT), max_size=40), ranks=st.integers(2, 5))
def test_every_read_is_made_by_one_rank_in_batches_that_fit(sizes: Sequence[int], ranks: int) -> None:
    reads = [read(number, size) for number, size in enumerate(sizes)]
    rounds = make_rounds(reads, LIMIT, ranks)
    assert [r for of_round in rounds for batch in of_round for r in batch.reads] == reads
    assert all(batch.nbytes == sum(r.nbytes for r in batch.reads) <= LIMIT for b in rounds for batch in b)
    assert all(len(of_round) == ranks for of_round in rounds[:-1])
    by_place = read_by_place(reads, LIMIT, ranks)
    assert len(by_place) == ranks
    assert sorted((r for own in by_place for r in own), key=lambda r: r.offset) == reads


@given(keys=st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=6))
def test_groups_of_a_level_have_no_rank_in_common(keys: list[set[int]]) -> None:
    groups = find_groups(keys)
    for key, group in groups.items():
        assert group == tuple(rank for rank, own in enumerate(keys) if key in own)
    levels = find_levels(groups.values())
    assert set(levels) == {group for group in groups.values() if len(group) > 1}
    for level in set(levels.values()):
        ranks = [rank for group, at in levels.items() if at == level for rank in group]
        assert len(ranks) == len(set(ranks))


def demands(exchange: bool | None, **changes: object) -> list[ReadDemand]:
    usual = {"chunk": MIN_CHUNK, "cold": True, "remote": True, "cached": True}
    return [
        ReadDemand(exchange, machine=machine, **{**usual, **changes})  # type: ignore[arg-type]
        for machine in ("a", "a", "b")
    ]


def test_ranks_exchange_where_they_share_no_page_cache() -> None:
    assert choose_strategy(demands(None)).exchange
    assert choose_strategy(demands(None, remote=False, cached=False)).exchange
    assert not choose_strategy(demands(None)[:2]).exchange
    assert not choose_strategy(demands(None, cold=False)).exchange
    assert not choose_strategy(demands(None, remote=False)).exchange
    assert not choose_strategy(demands(None, chunk=0)).exchange
    assert not choose_strategy(demands(False)).exchange
    assert choose_strategy(demands(True, cold=False)).exchange
    with pytest.raises(ConfigError, match="memory_limit"):
        choose_strategy(demands(True, chunk=0))
