"""Whether a call that all ranks have to make is made by all of them.

Scripts save on rank 0 alone where rank 0 has all that is saved; and transformers' documentation has every
rank call ``save_pretrained``, with a state dict that was gathered before, on rank 0 alone. So before the
ranks meet in a collective, rank 0 tells by the store of the process group what its call is, and the others
answer. Before a load of a script they count in the store who has come.
A rank that finds itself alone raises an error, at once where the others are known to be elsewhere, and says
before that for whom it waits (``distributed.roll_call``).
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zerostart.distributed.roll_call import RollCall
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.upstream.torch.process_group import patience, store_of

_ALONE, _TOGETHER = "alone", "together"
_ALIKE = (
    "every rank gets a part of the model, so call it on every rank (without `if is_main_process`), or "
    "outside zerostart.enabled() for a whole model of this rank's own"
)


@dataclass
class _Calls:
    """What this rank has told and heard; one for a process group.

    The numbers are kept in the store: a group that is made anew often has that of the one before it (as
    torchrun's ranks have), with all that was told there.
    """

    store: Any
    rank: int
    size: int
    roll: RollCall
    #: By directory, calls with a state dict of its own that this rank has made, and rank 0 has told of.
    own: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Calls of rank 0: those that it told of, or that this rank has heard of."""
        return self._number("calls")

    @property
    def waits(self) -> int:
        """How often this rank has waited for everyone."""
        return self._number("waits")

    def _number(self, of: str, more: int = 0) -> int:
        return int(self.store.add(f"{of}/{self.rank}", more))

    def tell(self, kind: str, directory: str) -> None:
        self.store.set(f"call/{self.count}", json.dumps([kind, directory]))
        self._number("calls", 1)

    def wait(self) -> None:
        """Tell that this rank is about to wait for everyone."""
        self.store.set(f"waited/{self._number('waits', 1)}", "")

    def await_others(self, directory: str) -> None:
        """Of rank 0: return when all others make this call."""
        number = self.count
        self.tell(_TOGETHER, directory)
        # Rank 0 alone asks, one rank after the other: the others wait for its word and not for each other.
        for rank in range(1, self.size):
            self._wait(f"here/{number}/{rank}", rank, directory)
            theirs = self.store.get(f"here/{number}/{rank}").decode()
            if theirs != directory:
                raise _apart(directory, rank, theirs)

    def follow(self, directory: str) -> bool:
        """Of another rank: whether rank 0 makes this call with all others, or saves by itself."""
        while True:
            number = self.count
            self._wait(f"call/{number}", 0, directory)
            kind, theirs = json.loads(self.store.get(f"call/{number}"))
            self._number("calls", 1)
            # Calls of rank 0 come in its order: those it makes by itself are passed over here, until one of
            # this directory (then this rank saves nothing) or one that all make.
            if kind == _TOGETHER:
                self.store.set(f"here/{number}/{self.rank}", directory)
                if theirs != directory:
                    raise _apart(directory, 0, theirs)
                return True
            # Both of us were handed a state dict for that directory: rank 0 saved its own, this rank had done
            # so before.
            if self.own[theirs]:
                self.own[theirs] -= 1
            elif theirs == directory:
                return False

    def _wait(self, key: str, rank: int, directory: str) -> None:
        call = f"save_pretrained({directory!r}) of a sharded model"
        missing = self.roll.await_ranks(
            lambda: [] if self.store.check([key]) else [rank],
            call,
            "call it on every rank",
            elsewhere=lambda: self._is_elsewhere(rank),
        )
        if missing:
            away = self._is_elsewhere(rank)
            late = f"has not come within {self.roll.timeout:.0f} s"
            what = "waits for everyone instead (wait_for_everyone)" if away else late
            raise _absent(call, self.roll.named(missing), what)

    def gather(self, call: str) -> None:
        """Return when every rank has begun this load."""
        place = f"load/{self._number('loads')}"
        self.roll.come(f"{place}/{call}")  # first: whoever sees all ranks there looks here next
        self.roll.come(place)
        # A rank that begins its next wait before it has come here is at another place of the script.
        next_wait = f"waited/{self.waits + 1}"
        missing = self.roll.await_ranks(
            lambda: self.roll.absent(place),
            call,
            _ALIKE,
            all_here=lambda: self.roll.all_here(place),
            elsewhere=lambda: bool(self.store.check([next_wait])),
        )
        if missing:
            self.roll.come(place, -1)  # What comes later is this load of all.
            self.roll.come(f"{place}/{call}", -1)
            away = self.store.check([next_wait])
            how = ", where one waits for everyone instead" if away else f" within {self.roll.timeout:.0f} s"
            raise ConfigError(
                f"{call} was called on this rank, but not on {self.roll.named(missing)}{how}: {_ALIKE}"
            )
        self._number("loads", 1)
        if not self.roll.all_here(f"{place}/{call}"):
            self.roll.leave(place)
            raise ConfigError(f"{call} was called on this rank, but something else on another rank: {_ALIKE}")

    def _is_elsewhere(self, rank: int) -> bool:
        """Whether a rank waits for everyone at a point that this one has not reached."""
        return int(self.store.add(f"waits/{rank}", 0)) > self.waits


#: By process group; there is one at a time.
_calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


def _here() -> _Calls | None:
    """This process group's calls; None for a process that is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group, world = dist.group.WORLD, current_world()
    if group not in _calls:
        # A prefix of its own, so that the numbers meet nobody else's in the group's store.
        store = store_of("zerostart/meeting")
        roll = RollCall(store, world.rank, world.size, patience())
        _calls[group] = _Calls(store, world.rank, world.size, roll)
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
        calls.tell(_ALONE, os.fspath(directory))
    else:
        calls.own[os.fspath(directory)] += 1


def join_save(directory: str | os.PathLike[str]) -> bool:
    """Whether to go on with a collective save into ``directory``; False where rank 0 saves by itself.

    Raises ConfigError where the other ranks do not come, or save somewhere else.
    """
    calls = _here()
    if calls is None:
        return True
    if calls.rank:
        return calls.follow(os.fspath(directory))
    calls.await_others(os.fspath(directory))
    return True


def note_wait() -> None:
    """Tell that this rank is about to wait for everyone."""
    calls = _here()
    if calls is not None:
        calls.wait()


def _absent(call: str, rank: str, what: str) -> ConfigError:
    return ConfigError(
        f"{call} was called on this rank, but {rank} {what}: every rank holds a part of the "
        "model, so call it on every rank (without `if is_main_process`, and without "
        "state_dict), or pass a state dict that all ranks have gathered "
        "(state_dict=accelerator.get_state_dict(model))"
    )


def _apart(directory: str, rank: int, theirs: str) -> ConfigError:
    return ConfigError(
        f"this rank saves to {directory!r}, but rank {rank} saves to {theirs!r}; pass "
        "save_pretrained the same directory on every rank"
    )
