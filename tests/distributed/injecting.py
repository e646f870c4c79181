"""Failures at chosen places of what ranks do together: places are counted as they are come by."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from zerostart.distributed.world import World, current_world
from zerostart.errors import ZerostartError

#: Raw collectives: of other libraries, or made for tensors.
RAW = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "gather", "barrier", "new_group")


class Places:
    """Counts begins and ends of phases, and calls of collectives; acts at one of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.chosen = -1
        self.act: Callable[[str], None] = lambda name: None

    def reset(self, chosen: int = -1) -> None:
        self.names, self.chosen = [], chosen

    def come_by(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.chosen:
            self.act(name)

    @contextlib.contextmanager
    def watched(self) -> "Iterator[Places]":
        """Inside, the methods of World tell this object where they are."""
        kept = {name: getattr(World, name) for name in ("phase", "collectives", *_MEETINGS)}
        places = self

        @contextlib.contextmanager
        def phase(self: World, name: str) -> Iterator[None]:
            with kept["phase"](self, name):
                places.come_by(f"begin of {name}")
                yield
                places.come_by(f"end of {name}")

        def collectives(self: World, during: str, *rest: Any) -> Any:
            places.come_by(f"before {during}")
            return kept["collectives"](self, during, *rest)

        def meeting(name: str) -> Any:
            @functools.wraps(kept[name])
            def call(self: World, value: Any, during: str, *rest: Any) -> Any:
                places.come_by(f"{name} of {during}")
                return kept[name](self, value, during, *rest)

            return call

        made = {"phase": phase, "collectives": collectives, **{name: meeting(name) for name in _MEETINGS}}
        for name, method in made.items():
            setattr(World, name, method)
        try:
            yield self
        finally:
            for name, method in kept.items():
                setattr(World, name, method)


_MEETINGS = ("all_gather_object", "broadcast_object")


def at_every_place(job: Callable[[], None], kinds: tuple[type[BaseException], ...]) -> list[str]:
    """Do ``job``, failing at each place on each rank in turn; what is not as it should be, in words.

    Run by every rank of a group, which has to be whole after each failure.
    """
    world, wrong = current_world(), []
    with Places().watched() as places:
        places.reset()
        job()
        names = list(places.names)
    every = world.all_gather_object(names, "counting places")
    assert all(len(found) > 5 for found in every)
    for victim, found in enumerate(every):
        for number in range(len(found)):
            kind = kinds[number % len(kinds)]
            wrong += _one(job, world, victim, number, kind)
    return wrong


def _one(
    job: Callable[[], None], world: World, victim: int, number: int, kind: type[BaseException]
) -> list[str]:
    def act(name: str) -> None:
        raise kind(f"injected at {name}")

    places, caught, began = Places(), "nothing", time.monotonic()
    places.act = act
    places.reset(number if world.rank == victim else -1)
    with places.watched():
        try:
            job()
        except ZerostartError as error:
            caught = f"{type(error).__name__}: {error}"
        except (KeyboardInterrupt, SystemExit) as error:
            caught = f"{type(error).__name__}: {error}" if world.rank == victim else "an interrupt elsewhere"
    seconds = time.monotonic() - began
    # Outside `watched`: with the group as it is.
    told = world.all_gather_object(
        (caught, seconds, places.names[-1:] if world.rank == victim else ""), "after"
    )
    place = f"{kind.__name__} on rank {victim} at {''.join(told[victim][2])}"
    texts = {text for rank, (text, *_) in enumerate(told) if issubclass(kind, Exception) or rank != victim}
    wrong = [] if len(texts) == 1 else [f"{place}: {sorted(texts)}"]
    wrong += [f"{place}: {t}" for t in texts if f"rank {victim}: " not in t or kind.__name__ not in t]
    if not issubclass(kind, Exception) and not told[victim][0].startswith(kind.__name__):
        wrong.append(f"{place}: the rank itself had {told[victim][0]}")
    return wrong + [f"{place}: {s:.0f} s" for _, s, _ in told if s > 30]


@contextlib.contextmanager
def unguarded() -> Iterator[list[str]]:
    """Inside, a list of the raw collectives that are made outside of what World guards."""
    found: list[str] = []
    depth = 0
    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def guarding(original: Any) -> Any:
        @contextlib.contextmanager
        def collectives(*arguments: Any) -> Iterator[Any]:
            nonlocal depth
            with original(*arguments) as value:
                depth += 1
                try:
                    yield value
                finally:
                    depth -= 1

        return collectives

    def inside(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return original(*arguments, **options)
            finally:
                depth -= 1

        return call

    def noted(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if not depth:
                found.append(name)
            return original(*arguments, **options)

        return call

    replace(World, "collectives", guarding(World.collectives))
    replace(World, "_transfer", inside(World._transfer))
    for name in RAW:
        wrapped = noted(name, getattr(distributed_c10d, name))
        for owner in (distributed_c10d, dist, device_mesh):
            if hasattr(owner, name):
                replace(owner, name, wrapped)
    try:
        yield found
    finally:
        for owner, name, original in reversed(kept):
            setattr(owner, name, original)
