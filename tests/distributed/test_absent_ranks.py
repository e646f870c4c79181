"""Name the ranks, and their hosts, that are missing from a call."""

import os
import platform
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from zerostart.distributed import failures
from zerostart.distributed.world import current_world

HOST = platform.node()


def join_group(seconds: float, backend: str = "gloo") -> None:
    """Initialise this rank's process group with a timeout of ``seconds``."""
    failures.LOOK_SECONDS = 0.2
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=False)
    limit = timedelta(seconds=seconds)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def load() -> nn.Module:
    weights = {"weight": torch.ones(8, 8), "bias": torch.zeros(8)}
    return zerostart.load(weights, lambda: nn.Linear(8, 8), engine="fsdp2", progress=False)


def long_work(seconds: float) -> str:
    """Work on rank 0 for longer than the timeout, and then fail there."""
    join_group(2)

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


@pytest.mark.slow
def test_ranks_wait_for_long_work_past_the_timeout() -> None:
    assert run_ranks(long_work, 2, 5.0, process_group=False) == ["WriteError: rank 0: refused"] * 2


def load_on_two_of_three(backend: str) -> tuple[str, float]:
    """Load on two of three ranks; return the error and its time in seconds."""
    join_group(3, backend)
    start = time.monotonic()
    if dist.get_rank() == 2:
        time.sleep(6)
        os._exit(0)
    try:
        load()
    except zerostart.ZerostartError as error:
        return str(error), time.monotonic() - start
    return "loaded", time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "fake"])
def test_a_load_without_one_rank_names_it(backend: str) -> None:
    """Also for a backend that needs an additional group for messages."""
    outcomes = rank_outcomes(load_on_two_of_three, 3, backend, process_group=False, timeout=60)
    (text, seconds), (other_text, _) = outcomes[0].value, outcomes[1].value
    assert text == other_text
    assert f"rank 2 (on {HOST}) has not come to" in text or "rank 2 has not come to" in text
    assert "within 3 s, the time-out of the process group" in text
    assert "init_process_group(timeout=...)" in text
    assert 2.5 < seconds < 9


def die_on_rank_1() -> tuple[str, float]:
    join_group(60)
    world, rank = current_world(), dist.get_rank()
    world.all_gather_object(rank, "being all there")
    start = time.monotonic()
    if rank == 1:
        os._exit(0)
    try:
        world.all_gather_object(rank, "telling")
    except zerostart.ZerostartError as error:
        seconds = time.monotonic() - start
        time.sleep(3)  # the others must not notice the end of this process first
        return str(error), seconds
    return "", 0


def test_a_dead_rank_is_named_soon_on_all_others() -> None:
    """All survivors raise the same error, not only the dead rank's neighbours."""
    outcomes = rank_outcomes(die_on_rank_1, 5, process_group=False, timeout=60)
    values = [outcome.value for outcome in outcomes if outcome.rank != 1]
    assert len({text for text, _ in values}) == 1, values
    assert f"during 'telling' (not there: rank 1 (on {HOST}))" in values[0][0]
    assert max(seconds for _, seconds in values) < 3
