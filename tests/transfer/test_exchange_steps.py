"""Who reads what for whom: every byte once, every request served once, and the choice by cost."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.drawn import examples
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.transfer.planning import (
    Agreement,
    ExchangeStep,
    Machines,
    Part,
    Plan,
    Rates,
    Read,
    Routes,
    Table,
    Tables,
    Traffic,
    Want,
    batches,
    choose,
    exchange_schedule,
    given_away,
    in_rounds,
    pieces_within,
    reassigned,
    slow_ranks,
    spans_within,
    table_of,
)

LIMIT = 100


@st.composite
def tables(draw: st.DrawFn) -> list[Table]:
    out = []
    for _ in range(draw(st.integers(1, 4))):
        rows = []
        for _ in range(draw(st.integers(0, 12))):
            file, offset = draw(st.integers(0, 1)), draw(st.integers(0, 400))
            if draw(st.booleans()):
                rows.append((file, offset, draw(st.integers(1, LIMIT)), 1, 0))
            else:
                count, width, gap = (draw(st.integers(1, n)) for n in (4, 10, 12))
                rows.append((file, offset, count * width, count, width + gap if count > 1 else 0))
        out.append(np.array(sorted(rows), np.int64).reshape(-1, 5))
    return out


def wanted(table: Table, first: int, stop: int) -> list[tuple[int, int]]:
    """(file, byte) of the requests, in the order of a message."""
    return [
        (file, offset + row * stride + byte)
        for file, offset, nbytes, rows, stride in table[first:stop].tolist()
        for row in range(rows)
        for byte in range(nbytes // rows)
    ]


def gets(step: ExchangeStep, of: Tables) -> list[tuple[int, Want]]:
    """Each rank that gets something, with what."""
    return [(rank, want) for want in step.wants for rank in of.holders[want.table]]


def check(
    made: Sequence[ExchangeStep | Agreement], given_tables: Sequence[Table], alone: Sequence[set[int]]
) -> None:
    """Each rank gets its requests in order, each once, and messages have the sizes that they say."""
    following = [
        iter([n for n in range(len(t)) if n not in own]) for t, own in zip(given_tables, alone, strict=True)
    ]
    for step in made:
        if isinstance(step, Agreement):
            continue
        for to, want in gets(step, Tables.of(given_tables)):
            for number in range(want.first, want.stop):
                assert number == next(following[to])
            places = wanted(given_tables[to], want.first, want.stop)
            assert len(places) == want.nbytes
            file, begin, end = step.extent
            assert all(f == file and begin <= at < end for f, at in places)
    assert all(next(left, None) is None for left in following)


def chains(given_tables: Sequence[Table]) -> Iterator[tuple[int, int, int, bool]]:
    """Requests that overlap or touch, in a row: file, begin, end, whether one extent takes them."""
    spans = sorted(
        (file, offset, offset + (rows - 1) * stride + nbytes // rows, rank, nbytes)
        for rank, table in enumerate(given_tables)
        for file, offset, nbytes, rows, stride in table.tolist()
    )
    while spans:
        file, begin, end, *_ = spans[0]
        message: Counter[int] = Counter()
        while spans and spans[0][0] == file and spans[0][1] <= end:
            _, _, stop, rank, nbytes = spans.pop(0)
            end = max(end, stop)
            message[rank] += nbytes
        yield file, begin, end, max(end - begin, *message.values()) <= 2 * LIMIT


def rows_of(*rows: Sequence[int]) -> Table:
    return np.array(rows, np.int64).reshape(-1, 5)


#: A rank that wants bytes twice, in one message more than it takes: another rank's byte lies beyond the cut.
WANTED_TWICE = [
    rows_of(
        *[(0, 0, 1, 1, 0)] * 7, (0, 0, 19, 1, 0), (1, 83, 100, 1, 0), (1, 182, 100, 1, 0), (1, 200, 40, 4, 22)
    ),
    rows_of((1, 276, 1, 1, 0)),
]
#: Two ranks whose requests overlap without an end: extents are cut, and read again what lies on both sides.
ENDLESS = [rows_of(*((0, at + 50 * n, 100, 1, 0) for at in range(0, 400, 100))) for n in range(2)]


@settings(max_examples=examples(300))
@given(tables(), st.integers(1, 500))
@example(WANTED_TWICE, 39)
@example(ENDLESS, 500)
def test_overlapping_requests(given_tables: list[Table], between: int) -> None:
    of = Tables.of(given_tables)
    made = exchange_schedule(of, LIMIT, between)
    check(made.steps, given_tables, [set(numbers) for numbers in made.alone])
    steps = [step for step in made.steps if isinstance(step, ExchangeStep)]
    for step in steps:
        assert step.extent[2] - step.extent[1] <= 2 * LIMIT
        assert all(want.nbytes <= 2 * LIMIT for want in step.wants)
        assert step.server in {rank for rank, _ in gets(step, of)}
        assert len(gets(step, of)) > 1
    for rank, served in enumerate(made.served):
        mine = [e.extent for e in steps if e.server == rank]
        assert served == sum(end - begin for _, begin, end in mine)
    got = sum(want.nbytes for step in steps for rank, want in gets(step, of) if rank != step.server)
    assert sum(Routes(of, Machines.of([0] * len(given_tables))).messages(steps).values()) == got

    # Nothing is read twice but where one extent cannot take a chain of requests.
    reads = [{(file, at) for at in range(begin, end)} for file, begin, end in (e.extent for e in steps)]
    reads += [
        {place for n in numbers for place in wanted(table, n, n + 1)}
        for table, numbers in zip(given_tables, made.alone, strict=True)
    ]
    times = Counter(itertools.chain.from_iterable(reads))
    for file, begin, end, fits in chains(given_tables):
        assert not fits or all(times[file, at] <= 1 for at in range(begin, end))


def test_what_is_read_again_at_a_cut_is_planned() -> None:
    made = exchange_schedule(Tables.of(ENDLESS), LIMIT)
    extents = [step.extent for step in made.steps if isinstance(step, ExchangeStep)]
    assert extents == [(0, 0, 200), (0, 150, 350), (0, 300, 450)]
    assert sum(made.served) == 450 + 2 * 50  # planned with what is read again


def sent_in(step: ExchangeStep, routes: Routes) -> list[tuple[int, int, int]]:
    """Messages of a step as each rank works them out by itself: sender, receiver, bytes."""
    machines, of = routes.machines, routes.tables
    found = []
    for rank, want in gets(step, of):
        sender = routes.sender(step, machines.names[rank])
        if sender not in (rank, step.server):
            assert sender in {r for r, _ in gets(step, of)}  # it is in the step too, and passes on
        if sender == rank != step.server:
            found.append((step.server, rank, step.nbytes))
        elif rank not in (sender, step.server):
            found.append((sender, rank, want.nbytes))
    return sorted(found)


def messages_are_whole(steps: Sequence[ExchangeStep], routes: Routes) -> None:
    """Senders and receivers find the same messages; another machine gets no more bytes than an extent has."""
    names = routes.machines.names
    for step in steps:
        relays = routes.relays(step)
        messages = [(step.server, relay, step.nbytes) for relay in relays]
        for sender in (step.server, *relays):
            for want, ranks in routes.receivers(step, sender):
                messages += [(sender, rank, want.nbytes) for rank in ranks if rank != sender]
        assert sorted(messages) == sent_in(step, routes)
        assert len({names[rank] for rank in (step.server, *relays)}) == 1 + len(relays)
        wanted: Counter[object] = Counter()
        for rank, want in gets(step, routes.tables):
            wanted[names[rank]] += want.nbytes
        crossed: Counter[object] = Counter()
        for sender, to, nbytes in messages:
            if names[sender] != names[to]:
                crossed[names[to]] += nbytes
        for machine, nbytes in crossed.items():
            assert nbytes == min(wanted[machine], step.nbytes) or nbytes == step.nbytes < wanted[machine]
    total: Counter[tuple[int, int]] = Counter()
    for step in steps:
        for sender, to, nbytes in sent_in(step, routes):
            total[sender, to] += nbytes
    assert routes.messages(steps) == total


@settings(max_examples=examples(200))
@given(
    tables(),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.lists(st.floats(0, 100), min_size=4, max_size=4),
)
def test_ranks_of_several_machines(given_tables: list[Table], names: list[int], speeds: list[float]) -> None:
    """Also where servers are slow, and others read what they have not begun."""
    of = Tables.of(given_tables)
    routes = Routes(of, Machines.of(names[: len(given_tables)]))
    made = exchange_schedule(of, LIMIT, 250)
    check(made.steps, given_tables, [set(numbers) for numbers in made.alone])
    steps = [step for step in made.steps if isinstance(step, ExchangeStep)]
    messages_are_whole(steps, routes)

    changed = reassigned(made.steps, speeds[: len(given_tables)], of)
    check(changed, given_tables, [set(numbers) for numbers in made.alone])
    now = [step for step in changed if isinstance(step, ExchangeStep)]
    messages_are_whole(now, routes)
    assert [step.extent for step in now] == [step.extent for step in steps]
    begun: set[int] = set()
    for before, after in zip(steps, now, strict=True):
        # What a server reads already stays with it.
        assert before.server in begun or after.server == before.server
        begun.add(before.server)


def test_replicas_cross_to_another_machine_once() -> None:
    table = np.array([(0, 50 * i, 50, 1, 0) for i in range(64)], np.int64)
    routes = Routes(Tables.of([table] * 6), Machines.of("aabbcc"))
    made = exchange_schedule(routes.tables, LIMIT)
    names, across, received = routes.machines.names, 0, [0] * 6
    for (sender, to), nbytes in routes.messages(made.steps).items():
        across += nbytes if names[sender] != names[to] else 0
        received[to] += nbytes
    # Two of three servers are on other machines.
    assert across == 2 * 50 * 64
    assert max(received) - min(received) <= 4 * LIMIT
    # However many ranks there are: of a thousand each step is as small, and they read evenly.
    many = exchange_schedule(Tables.of([table] * 1024), LIMIT)
    assert len(many.steps) == len(made.steps)
    assert all(isinstance(step, ExchangeStep) and len(step.wants) == 1 for step in many.steps)
    assert max(many.served) <= LIMIT


def test_a_slow_server_gives_extents_away() -> None:
    table = np.array([(0, 50 * i, 50, 1, 0) for i in range(640)], np.int64)
    of = Tables.of([table] * 4)
    made = exchange_schedule(of, LIMIT)
    speeds = [10.0, 10.0, 1.0, 0.0]  # of the last nothing is known
    assert slow_ranks(speeds) == {2}
    assert slow_ranks([10.0, 9.0, 8.0, 0.0]) == set()
    served: Counter[int] = Counter()
    for step in reassigned(made.steps, speeds, of):
        assert isinstance(step, ExchangeStep)
        served[step.server] += step.nbytes
    assert sum(served.values()) == 50 * 640
    assert served[2] == pytest.approx(50 * 640 / 31, abs=2 * LIMIT)
    assert max(served.values()) == pytest.approx(50 * 640 * 10 / 31, abs=2 * LIMIT)


def test_what_a_slow_rank_has_not_begun() -> None:
    left = np.array([(0, 50 * i, 50, 1, 0) for i in range(310)], np.int64)
    nothing = rows_of()
    of = Tables.of([nothing, nothing, left, nothing])
    steps = given_away(of, [10.0, 10.0, 1.0, 10.0], 5000)
    check(steps, [nothing, nothing, left, nothing], [set()] * 4)
    served = Counter(step.server for step in steps if isinstance(step, ExchangeStep))
    assert served[2] == pytest.approx(10, abs=1)
    assert max(served.values()) == pytest.approx(100, abs=2)
    assert sum(isinstance(step, Agreement) for step in steps) == 3


@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 300), max_size=20), st.integers(1, 200))
def test_messages_of_one_rank(sizes: list[int], limit: int) -> None:
    following = 0
    for first, stop, nbytes in batches(sizes, limit):
        assert (first, nbytes) == (following, sum(sizes[first:stop]))
        assert nbytes <= limit or stop == first + 1
        following = stop
    assert following == len(sizes)


def test_replicas_read_each_byte_once_and_evenly() -> None:
    table = np.array([(0, 50 * i, 50, 1, 0) for i in range(64)], np.int64)
    made = exchange_schedule(Tables.of([table] * 4), LIMIT)
    assert sum(made.served) == 50 * 64
    assert max(made.served) - min(made.served) <= LIMIT
    # Servers take turns, so that one passes on what it has while the next is sending.
    servers = [step.server for step in made.steps if isinstance(step, ExchangeStep)]
    assert servers == [turn % 4 for turn in range(len(servers))]


def test_columns_of_one_matrix_are_one_extent() -> None:
    of_rank = [np.array([(0, 10 * rank, 100, 10, 40)], np.int64) for rank in range(4)]
    routes = Routes(Tables.of(of_rank), Machines.of([0] * 4))
    made = exchange_schedule(routes.tables, 400)
    (step,) = made.steps
    assert isinstance(step, ExchangeStep)
    assert step.extent == (0, 0, 400)
    assert sum(routes.messages(made.steps).values()) == 300


def test_own_slices_need_no_message() -> None:
    of_rank = [np.array([(0, 1000 * rank, 100, 1, 0)], np.int64) for rank in range(4)]
    made = exchange_schedule(Tables.of(of_rank), 400)
    assert (made.steps, made.alone) == ((), ((0,),) * 4)


def test_ranks_agree_now_and_then() -> None:
    table = np.array([(0, 50 * i, 50, 1, 0) for i in range(64)], np.int64)
    made = exchange_schedule(Tables.of([table] * 2), LIMIT, between=400)
    kinds = [isinstance(step, Agreement) for step in made.steps]
    assert sum(kinds) == 3  # each of two ranks reads 1600 bytes
    assert not kinds[-1]


@pytest.mark.parametrize(("rows", "stride", "limit"), [(10, 40, 100), (10, 40, 10), (7, 300, 100), (1, 0, 9)])
def test_reads_cut_to_a_span(rows: int, stride: int, limit: int) -> None:
    loops = ((rows, 10, 10), (10, 1, 1)) if rows > 1 else ((10, 1, 1),)
    read = Read(0, 5, 10 * rows, (Part(0, torch.uint8, 0, 0, loops, True),), True, rows, stride)
    plan = Plan(LocalFiles(("f",), (9999,)), (), (read,), limit)
    cut = spans_within(plan, limit).reads
    assert len(cut) == pieces_within(read, limit)
    assert wanted(table_of(cut), 0, len(cut)) == wanted(table_of([read]), 0, 1)
    assert all((r.rows - 1) * r.stride + 10 <= max(limit, 10) for r in cut)
    places = [r.parts[0].to for r in cut]
    assert places == [10 * row for row in itertools.accumulate([0, *(r.rows for r in cut)][:-1])]


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.integers(1, 5))
def test_rounds_are_of_whole_files(sizes: list[int], rounds: int) -> None:
    reads = [Read(n, 0, size, (), True, 1, 0) for n, size in enumerate(sizes) for _ in range(2)]
    made = in_rounds(reads, sizes, rounds)
    assert len(made) == rounds
    assert [read for some in made for read in some] == reads  # in their order
    assert len([n for some in made for n in {read.file for read in some}]) == len(sizes)
    even = sum(sizes) / rounds + max(sizes)
    assert all(sum(read.nbytes for read in some) <= 2 * even for some in made)


GB = 10**9


@pytest.mark.parametrize(
    ("traffic", "rates", "once"),
    [
        # ZeRO-3: nothing is wanted twice.
        (Traffic(64 * GB, 64 * GB, 1 * GB, 64, 8), Rates(shared=10e9), False),
        # The ranks of one machine find each other's bytes in its page cache.
        (Traffic(64 * GB, 8 * GB, 8 * GB, 8, 1), Rates(), False),
        # Sixteen machines that each want all of it from one file server.
        (Traffic(16 * 140 * GB, 140 * GB, 140 * GB // 8, 128, 16), Rates(shared=10e9), True),
        # The same on a disk of each machine's own, as fast as the interconnect.
        (Traffic(16 * 140 * GB, 140 * GB, 140 * GB // 8, 128, 16), Rates(link=20e9, interconnect=1e9), False),
        # Narrow columns, of which each machine would fetch the whole rows from one file server.
        (Traffic(140 * GB, 140 * GB, 9 * GB, 16, 16, 0, 16 * 140 * GB), Rates(shared=10e9), True),
        # The same as the third, where the machines' network is slower than the file server.
        (Traffic(16 * 140 * GB, 140 * GB, 140 * GB // 8, 128, 16), Rates(shared=10e9, network=0.5e9), False),
        # Warm: nothing comes from storage.
        (Traffic(4 * GB, 2 * GB, 1 * GB, 4, 2), Rates(link=math.inf, interconnect=0.5e9), False),
    ],
)
def test_choice(traffic: Traffic, rates: Rates, once: bool) -> None:
    chosen = choose(traffic, rates)
    assert chosen.once is once
    assert (chosen.once_seconds < chosen.own_seconds) is once
    for forced in (True, False):
        other = choose(traffic, rates, forced)
        assert (other.once, other.forced) == (forced, True)
        assert "as asked" in str(other)


def test_seconds_of_the_model() -> None:
    """By hand: 16 machines fetch 140 GB each at 10 GB/s together; or once, and 17.4 GB a rank at 1 GB/s, both
    in and out."""
    rates = Rates(shared=10e9, link=50e9, copy=1e12, network=50e9)
    chosen = choose(Traffic(16 * 140 * GB, 140 * GB, 140 * GB // 8, 128, 16), rates)
    assert chosen.own_seconds == pytest.approx(16 * 140 / 10)
    assert chosen.once_seconds == pytest.approx(2 * 17.5 * 127 / 128)
    # Each machine gets all but what it reads from the others.
    slower = choose(
        Traffic(16 * 140 * GB, 140 * GB, 140 * GB // 8, 128, 16),
        Rates(shared=10e9, link=50e9, copy=1e12, network=2e9),
    )
    assert slower.once_seconds == pytest.approx(140 / 2 * 15 / 16)
