"""Calls that all ranks have to make: whether they do.

Scripts save on rank 0 only where rank 0 has all that is saved; and transformers' documentation has every rank
call ``save_pretrained``, with a state dict that was gathered before, on rank 0 only. So before the ranks meet
in a collective, rank 0 tells by the store of the process group what its call is, and the others answer.
Before a load of a script all ranks write there that they have come.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zerostart.distributed.failures import await_ranks, name_ranks
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.upstream.torch.process_group import patience, store_of

_ALONE, _TOGETHER = "alone", "together"
_SAME_CALL_HINT = (
    "every rank gets a part of the model, so call it on every rank (without `if is_main_process`), or "
    "outside zerostart.enabled() for a whole model of this rank's own"
)


@dataclass
class _Calls:
    """Calls that this rank has announced and heard of, in one process group.

    The numbers are kept in the store: a group that is made again often has that of the one before it.
    """

    store: Any
    rank: int
    size: int
    seconds: float
    #: By directory, the calls with a state dict of its own that this rank has made.
    own: Counter[str] = field(default_factory=Counter)

    def count(self, what: str, more: int = 0) -> int:
        return int(self.store.add(f"{what}/{self.rank}", more))

    def announce(self, kind: str, directory: str) -> None:
        """Tell as rank 0 what its next call is."""
        self.store.set(f"call/{self.count('calls')}", json.dumps([kind, directory]))
        self.count("calls", 1)

    def lead(self, directory: str) -> bool:
        """Return as rank 0, always True, when all others make this call."""
        number = self.count("calls")
        self.announce(_TOGETHER, directory)
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
            # Calls of rank 0 come in its order: those it makes by itself are passed over, until one of this
            # directory (then this rank saves nothing) or one that all make.
            if kind == _TOGETHER:
                self.store.set(f"here/{number}/{self.rank}", directory)
                if theirs != directory:
                    raise _diverged_error(directory, 0, theirs)
                return True
            # Both ranks were handed a state dict for that directory, and this one has saved its own.
            if self.own[theirs]:
                self.own[theirs] -= 1
            elif theirs == directory:
                return False

    def _wait(self, keys: list[str], directory: str) -> None:
        """Wait for rank 0's key, or for those of all ranks."""
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
        """Return when every rank has begun this load."""
        place = f"load/{self.count('loads')}"
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], call)
        missing = await_ranks(self.store, keys, self.seconds, self._is_anyone_elsewhere)
        if missing:
            self.store.delete_key(keys[self.rank])  # What comes later is this load of all.
            elsewhere = self._is_anyone_elsewhere()
            how = ", where one waits for everyone instead" if elsewhere else f" within {self.seconds:.0f} s"
            named = name_ranks(self.store, missing)
            raise ConfigError(f"{call} was called on this rank, but not on {named}{how}: {_SAME_CALL_HINT}")
        self.count("loads", 1)
        if any(self.store.get(key).decode() != call for key in keys):
            raise ConfigError(
                f"{call} was called on this rank, but something else on another rank: {_SAME_CALL_HINT}"
            )

    def note_wait(self) -> None:
        """Tell that this rank is about to wait for everyone."""
        self.store.set(f"waited/{self.count('waits', 1)}", "")

    def _is_anyone_elsewhere(self) -> bool:
        return bool(self.store.check([f"waited/{self.count('waits') + 1}"]))


#: By process group; there is one at a time.
_calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


def _here() -> _Calls | None:
    """This process group's calls; None for a process that is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group, world = dist.group.WORLD, current_world()
    if group not in _calls:
        _calls[group] = _Calls(store_of("zerostart"), world.rank, world.size, patience().total_seconds())
    return _calls[group]


def barrier(call: str) -> None:
    """Return when every rank is at ``call``, which loads a model in shards.

    Raises ConfigError where others do not come, or come to something else.
    """
    calls = _here()
    if calls is not None:
        calls.gather(call)


def announce_local_save(directory: str | os.PathLike[str]) -> None:
    """Tell that this rank saves what it was handed by itself; returns at once, and need not be called."""
    calls = _here()
    if calls is None:
        return
    if calls.rank == 0:
        calls.announce(_ALONE, os.fspath(directory))
    else:
        calls.own[os.fspath(directory)] += 1


def join_save(directory: str | os.PathLike[str]) -> bool:
    """True to go on with a collective save into ``directory``; False where rank 0 saves by itself.

    Raises ConfigError where the other ranks do not come, or save somewhere else.
    """
    calls = _here()
    return calls is None or (calls.follow if calls.rank else calls.lead)(os.fspath(directory))


def note_wait() -> None:
    """Tell that this rank is about to wait for everyone."""
    calls = _here()
    if calls is not None:
        calls.note_wait()


def _diverged_error(directory: str, rank: int, theirs: str) -> ConfigError:
    return ConfigError(
        f"this rank saves to {directory!r}, but rank {rank} saves to {theirs!r}; pass "
        "save_pretrained the same directory on every rank"
    )
