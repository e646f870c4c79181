"""Check that all ranks make the collective calls of a script.

Some scripts call ``save_pretrained`` on rank 0 only. With a state dict that was gathered before, as in
transformers' documentation, that is correct: rank 0 saves without the others. So before a collective save
rank 0 announces its call in the store of the process group, and the others answer. Before a load all ranks
record there that they have begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zerostart.distributed.failures import await_ranks, name_ranks, pickle_error, restore_error
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError, ZerostartError
from zerostart.upstream.torch.process_group import group_timeout, store_of

_LOCAL_SAVE, _COLLECTIVE_SAVE = "alone", "together"
_SAME_CALL_HINT = (
    "every rank gets a part of the model, so call it on every rank (without `if is_main_process`), or "
    "outside zerostart.enabled() for a whole model of this rank's own"
)


@dataclass
class _Calls:
    """Calls of this rank in one process group.

    Counters are in the store, because a new process group may share the store of the previous one.
    """

    store: Any
    rank: int
    size: int
    seconds: float
    #: For each directory: number of this rank's saves of a given state dict.
    own: Counter[str] = field(default_factory=Counter)

    def count(self, counter: str, more: int = 0) -> int:
        return int(self.store.add(f"{counter}/{self.rank}", more))

    def announce(self, kind: str, directory: str) -> None:
        """Announce the next call of rank 0."""
        self.store.set(f"call/{self.count('calls')}", json.dumps([kind, directory]))
        self.count("calls", 1)

    def lead(self, directory: str) -> bool:
        """Wait, as rank 0, until all others make this call; return True."""
        number = self.count("calls")
        self.announce(_COLLECTIVE_SAVE, directory)
        self.store.set(f"here/{number}/0", directory)
        self._wait([f"here/{number}/{rank}" for rank in range(self.size)], directory)
        for rank in range(1, self.size):
            theirs = self.store.get(f"here/{number}/{rank}").decode()
            if theirs != directory:
                raise _diverged_error(directory, rank, theirs)
        return True

    def follow(self, directory: str) -> bool:
        while True:
            number = self.count("calls")
            self._wait([f"call/{number}"], directory)
            kind, theirs = json.loads(self.store.get(f"call/{number}"))
            self.count("calls", 1)
            # Go through the calls of rank 0 in order, up to a collective one, or a local save into this
            # directory, for which this rank saves nothing.
            if kind == _COLLECTIVE_SAVE:
                self.store.set(f"here/{number}/{self.rank}", directory)
                if theirs != directory:
                    raise _diverged_error(directory, 0, theirs)
                return True
            # This rank has saved its own state dict into that directory, too.
            if self.own[theirs]:
                self.own[theirs] -= 1
            elif theirs == directory:
                return False

    def _wait(self, keys: list[str], directory: str) -> None:
        missing = await_ranks(self.store, keys, self.seconds, self._is_anyone_elsewhere)
        if missing:
            where = "waits for everyone instead (wait_for_everyone)"
            late = f"has not come within {self.seconds:.0f} s"
            raise ConfigError(
                f"save_pretrained({directory!r}) of a sharded model was called on this rank, but "
                f"{name_ranks(self.store, missing)} {where if self._is_anyone_elsewhere() else late}: every "
                "rank holds a part of the model, so call it on every rank (without `if is_main_process`, and "
                "without state_dict), or pass a state dict that all ranks have gathered "
                "(state_dict=accelerator.get_state_dict(model))"
            )

    def gather(self, call: str) -> None:
        """Wait until every rank has begun this load."""
        place = f"load/{self.count('loads')}"
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], call)
        missing = await_ranks(self.store, keys, self.seconds, self._is_anyone_elsewhere)
        if missing:
            self.store.delete_key(keys[self.rank])  # a later attempt uses the same key
            elsewhere = self._is_anyone_elsewhere()
            how = ", where one waits for everyone instead" if elsewhere else f" within {self.seconds:.0f} s"
            named = name_ranks(self.store, missing)
            raise ConfigError(f"{call} was called on this rank, but not on {named}{how}: {_SAME_CALL_HINT}")
        self.count("loads", 1)
        if any(self.store.get(key).decode() != call for key in keys):
            raise ConfigError(
                f"{call} was called on this rank, but something else on another rank: {_SAME_CALL_HINT}"
            )

    def record_wait(self) -> None:
        """Record that this rank will wait for everyone."""
        self.store.set(f"waited/{self.count('waits', 1)}", "")

    def _is_anyone_elsewhere(self) -> bool:
        return bool(self.store.check([f"waited/{self.count('waits') + 1}"]))


#: Calls of each process group.
_calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


def _current_calls() -> _Calls | None:
    """Return the calls of the process group; None for a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group, world = dist.group.WORLD, current_world()
    if group not in _calls:
        _calls[group] = _Calls(store_of("zerostart"), world.rank, world.size, group_timeout().total_seconds())
    return _calls[group]


@contextlib.contextmanager
def library_call(name: str) -> Iterator[None]:
    """Raise an error of one rank on all ranks; collective.

    Inside, every rank calls a library. If all ranks fail with the same error, that of the library is raised.
    """
    try:
        with current_world().phase(name):
            yield
    except ZerostartError as error:
        original = error.__cause__
        if isinstance(original, Exception) and str(error) == str(restore_error(pickle_error(original), None)):
            raise original from original.__cause__
        raise


def barrier(call: str) -> None:
    """Wait until every rank makes ``call``, which loads a model in shards.

    Raises ConfigError if a rank does not come, or makes another call.
    """
    calls = _current_calls()
    if calls is not None:
        calls.gather(call)


def announce_local_save(directory: str | os.PathLike[str]) -> None:
    """Announce that this rank saves a given state dict without the others; never waits."""
    calls = _current_calls()
    if calls is not None and calls.rank == 0:
        calls.announce(_LOCAL_SAVE, os.fspath(directory))
    elif calls is not None:
        calls.own[os.fspath(directory)] += 1


def join_save(directory: str | os.PathLike[str]) -> bool:
    """Return True to save collectively into ``directory``.

    Return False if rank 0 saves there without the others. Raises ConfigError if other ranks do not come, or
    save to another directory.
    """
    calls = _current_calls()
    return calls is None or (calls.follow if calls.rank else calls.lead)(os.fspath(directory))


def record_wait() -> None:
    """Record that this rank will wait for everyone."""
    calls = _current_calls()
    if calls is not None:
        calls.record_wait()


def _diverged_error(directory: str, rank: int, theirs: str) -> ConfigError:
    return ConfigError(
        f"this rank saves to {directory!r}, but rank {rank} saves to {theirs!r}; pass "
        "save_pretrained the same directory on every rank"
    )
