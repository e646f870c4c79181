"""Ranks that load by ``from_pretrained`` meet by the store, also in a group after another one in it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerostart.distributed.roll_call import RollCall
from zerostart.errors import ConfigError
from zerostart.integrations.barrier import _Calls


def _ranks(store: dist.Store, calls: tuple[str, str]) -> list[Exception | None]:
    """What two ranks of a new group over ``store`` raise, the first of which comes some time later."""
    second_is_here = threading.Event()

    def rank(number: int) -> Exception | None:
        group = dist.PrefixStore("group", store)
        own = _Calls(group, number, 2, RollCall(group, number, 2, timedelta(seconds=10)))
        if number == 0:
            second_is_here.wait(10)
        else:
            threading.Timer(0.05, second_is_here.set).start()
        try:
            own.gather(calls[number])
        except ConfigError as error:
            return error
        own.wait()
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_a_second_group_over_the_same_store_does_not_take_the_first_ones_loads_for_its_own() -> None:
    store = dist.HashStore()
    assert _ranks(store, ("A.from_pretrained",) * 2) == [None, None]
    assert _ranks(store, ("B.from_pretrained",) * 2) == [None, None]
    assert _ranks(store, ("C.from_pretrained",) * 2) == [None, None]


def test_ranks_at_different_loads_are_told_in_any_group_over_the_store() -> None:
    store = dist.HashStore()
    assert _ranks(store, ("A.from_pretrained",) * 2) == [None, None]
    for error in _ranks(store, ("B.from_pretrained", "C.from_pretrained")):
        assert "something else on another" in str(error)


class _Slow:
    """A store at which other ranks see each step of a rank before it takes the next one."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        total = int(self._store.add(key, amount))
        if amount:
            time.sleep(0.1)
        return total


def test_ranks_that_are_slow_to_tell_are_not_taken_to_load_something_else() -> None:
    store = dist.HashStore()

    def load(number: int) -> None:
        own = _Slow(store) if number else store
        _Calls(own, number, 2, RollCall(own, number, 2, timedelta(seconds=10))).gather("A.from_pretrained")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(load, range(2))) == [None, None]
