"""Ranks that do not come to a call: the others say which, and where, before the time-out and in its error."""

import logging
import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from zerostart.distributed import roll_call
from zerostart.distributed.roll_call import RollCall
from zerostart.distributed.world import current_world, group_beside, joined_world

HOST = platform.node()


def joined(seconds: float, backend: str = "gloo") -> list[str]:
    """Initialise this rank's group with a time-out of ``seconds``; a list that receives its warnings."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("zerostart").addHandler(Kept(logging.WARNING))
    roll_call.SILENCE, roll_call.LOOK = 0.6, 0.2
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=False)
    limit = timedelta(seconds=seconds)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return said


def load() -> nn.Module:
    weights = {"weight": torch.ones(8, 8), "bias": torch.zeros(8)}
    return zerostart.load(weights, lambda: nn.Linear(8, 8), engine="fsdp2", progress=False)


def long_work(seconds: float) -> str:
    """Rank 0 works for longer than ranks wait for each other; then it fails."""
    joined(2)

    def work() -> str:
        time.sleep(seconds)
        return "done"

    def fail() -> str:
        time.sleep(1)
        raise zerostart.errors.WriteError("refused")

    world = current_world()
    assert world.broadcast_slow(work, "working") == "done"
    try:
        world.broadcast_slow(fail, "failing")
    except zerostart.ZerostartError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_wait_for_long_work_past_the_time_out() -> None:
    assert run_ranks(long_work, 2, 5.0, process_group=False) == ["WriteError: rank 0: refused"] * 2


def alone_in_a_load(backend: str) -> tuple[str, float, list[str]]:
    """Two of three ranks load; what they raise, when, and what they have said before."""
    said, begun = joined(3, backend), time.monotonic()
    if dist.get_rank() == 2:
        time.sleep(6)
        os._exit(0)
    try:
        load()
    except zerostart.ZerostartError as error:
        return str(error), time.monotonic() - begun, said
    return "loaded", time.monotonic() - begun, said


@pytest.mark.parametrize("backend", ["gloo", pytest.param("fake", marks=pytest.mark.slow)])
def test_a_load_without_one_rank_names_it_before_the_time_out_and_in_the_error(backend: str) -> None:
    """Also where the group that messages go over has to be made first."""
    outcomes = rank_outcomes(alone_in_a_load, 3, backend, process_group=False, timeout=60)
    (text, seconds, said), (other, _, others) = outcomes[0].value, outcomes[1].value
    assert text == other
    assert f"rank 2 (on {HOST}) has not come to" in text or "rank 2 has not come to" in text
    assert "within 3 s, the time-out of the process group" in text
    assert "init_process_group(timeout=...)" in text
    assert 2.5 < seconds < 9
    for number, warnings in enumerate((said, others)):
        (warning,) = [line for line in warnings if "has waited" in line]
        assert warning.startswith(f"rank {number} is at '")
        assert "for rank 2" in warning


def group_after_a_call_of_one() -> bool:
    """Make a group where one rank has asked before who the ranks are, which is no call of all."""
    joined(5)
    if dist.get_rank() == 0:
        current_world()
    return group_beside() is not None


def test_a_group_is_made_whatever_one_rank_has_asked_by_itself_before() -> None:
    assert run_ranks(group_after_a_call_of_one, 2, process_group=False, timeout=60) == [True, True]


def later(folder: Path, seconds: float) -> dict[str, list[str]]:
    """Every collective verb, to which the last rank comes late: what each says."""
    said, last = joined(30), dist.get_rank() == dist.get_world_size() - 1
    model = load()
    optimizer = torch.optim.AdamW(model.parameters())
    state = str(folder / "state")
    verbs: dict[str, Callable[[], Any]] = {
        "load": load,
        "save": lambda: zerostart.save(model, str(folder / "model")),
        "save_state": lambda: zerostart.save_state(state, model, optimizer),
        "background": lambda: zerostart.save_state(state, model, optimizer, wait=False).wait(),
        "load_state": lambda: zerostart.load_state(state, model, optimizer),
        "digest": lambda: zerostart.digest(model),
        "diff": lambda: zerostart.diff(model, state),
        "full_tensors": lambda: list(zerostart.full_tensors(model)),
        "gathered": lambda: zerostart.gathered(model, "weight").__enter__(),
    }
    told = {}
    for name, verb in verbs.items():
        dist.barrier()
        said.clear()
        if last:
            time.sleep(seconds)
        verb()
        told[name] = [line for line in said if "has waited" in line]
    return told


@pytest.mark.slow
def test_every_verb_says_which_rank_is_late_and_goes_on(tmp_path: Path) -> None:
    first, second, late = (
        outcome.value for outcome in rank_outcomes(later, 3, tmp_path, 1.5, process_group=False, timeout=120)
    )
    assert all(not lines for lines in late.values()), late
    for told in (first, second):
        assert {name: len(lines) for name, lines in told.items()} == dict.fromkeys(first, 1)
        assert all(f"for rank 2 (on {HOST}): it goes on waiting" in line for (line,) in told.values())


class _Slow:
    """A store that a rank reads late, under load."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        time.sleep(0.3)
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        time.sleep(0.1)
        return bool(self._store.check(keys))


def ending_first(how: str, folder: Path) -> None:
    """Three ranks that fail alike; rank 0, whose process serves the store, ends at once. The last is slow."""
    roll_call.LOOK = 0.5
    rank, address, port = int(os.environ["RANK"]), "127.0.0.1", folder / "port"
    if rank == 0:
        store = dist.TCPStore(address, 0, 3, is_master=True, wait_for_workers=False)
        (folder / "part").write_text(str(store.port))
        (folder / "part").rename(port)
    while not port.exists():
        time.sleep(0.01)
    if rank:
        store = dist.TCPStore(address, int(port.read_text()), 3, is_master=False)
    seen: Any = _Slow(store) if rank == 2 else store
    # Each waits for as long, and for longer than the one before has still to wait: rank 0 gives up first.
    calls = RollCall(seen, rank, 4 if how == "absent" else 3, timedelta(seconds=2))
    time.sleep(0.3 * rank)
    try:
        told = calls.gather("'making'", f"host {rank}", lambda: "refused" if rank < 2 else "")
    except zerostart.ZerostartError as error:
        told = f"{type(error).__name__}: {error}"
    (folder / f"told{rank}").write_text(told)
    os._exit(0)


@pytest.mark.parametrize("how", ["doubtful", pytest.param("absent", marks=pytest.mark.slow)])
def test_the_rank_that_serves_the_store_leaves_last(how: str, tmp_path: Path) -> None:
    """So that all have its error, and none that the store is gone."""
    rank_outcomes(ending_first, 3, how, tmp_path, process_group=False, timeout=60)
    told = {(tmp_path / f"told{rank}").read_text() for rank in range(3)}
    assert len(told) == 1, told
    start = "PeerError: rank 3 has not come to 'making' within 2 s" if how == "absent" else "rank "
    assert told.pop().startswith(start)


def dying() -> tuple[str, float]:
    joined(60)
    world, rank = current_world(), dist.get_rank()
    world.all_gather_object(rank, "being all there")
    begun = time.monotonic()
    if rank == 1:
        os._exit(0)
    try:
        world.all_gather_object(rank, "telling")
    except zerostart.ZerostartError as error:
        seconds = time.monotonic() - begun
        time.sleep(3)  # no rank learns it from the end of another's process
        return str(error), seconds
    return "", 0


def test_a_rank_that_dies_is_named_soon_on_all_others_alike() -> None:
    """Not only on its neighbours in the ring, and not as each of these ends in turn."""
    outcomes = rank_outcomes(dying, 5, process_group=False, timeout=60)
    values = [outcome.value for outcome in outcomes if outcome.rank != 1]
    assert len({text for text, _ in values}) == 1, values
    assert f"during 'telling' (not there: rank 1 (on {HOST}))" in values[0][0]
    assert max(seconds for _, seconds in values) < 3


def peers(rank: int, size: int) -> set[int]:
    """Whom a rank talks to in what a world sends: rings (reduce, gather), and binomial trees from rank 0."""
    found, bit = {(rank - 1) % size, (rank + 1) % size}, 1
    while bit < size:
        if rank < bit and rank + bit < size:
            found.add(rank + bit)
        elif bit <= rank < 2 * bit:
            found.add(rank - bit)
        bit *= 2
    return found - {rank}


def sockets() -> int:
    links = (os.path.realpath(name) for name in Path("/proc/self/fd").iterdir())
    return sum("socket:" in link for link in links)


def sockets_of_a_world() -> tuple[int, float]:
    """What the group for messages, and all that goes over it, has opened; and its time-out."""
    joined(50, "fake")
    before = sockets()
    world = joined_world()
    world.all_gather_object("x" * world.rank, "telling more")
    world.broadcast_object(lambda: 1, "telling all")
    world.all_reduce_sum(torch.ones(3, dtype=torch.int64), "adding up")
    opened = sockets() - before
    world.raise_together(None, "the end")
    return opened, world.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


@pytest.mark.slow
def test_sockets_of_the_group_for_messages_do_not_grow_with_the_ranks() -> None:
    assert max(len(peers(rank, 1024)) for rank in range(1024)) <= 12
    for size in (2, 16):
        outcomes = run_ranks(sockets_of_a_world, size, process_group=False, timeout=200)
        assert {seconds for _, seconds in outcomes} == {50}
        counted = [opened for opened, _ in outcomes]
        # One that listens, and one to each peer.
        assert max(counted) <= 1 + max(len(peers(rank, size)) for rank in range(size)), counted
