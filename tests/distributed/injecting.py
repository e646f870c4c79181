"""Inject failures at chosen places of a job: phases and collectives, in order."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from zerostart.distributed.world import World, current_world
from zerostart.errors import ZerostartError

#: Collectives that other libraries call, or that transfer tensors.
RAW = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "gather", "barrier", "new_group")


class Places:
    """Counter of phases and collectives; calls ``act`` at one of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.chosen = -1
        self.act: Callable[[str], None] = lambda name: None

    def reset(self, chosen: int = -1) -> None:
        self.names, self.chosen = [], chosen

    def reach(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.chosen:
            self.act(name)

    @contextlib.contextmanager
    def watch(self) -> "Iterator[Places]":
        """Record the places that methods of World reach in the body."""
        originals = {name: getattr(World, name) for name in ("phase", "collectives", *_EXCHANGES)}
        places = self

        @contextlib.contextmanager
        def phase(self: World, name: str) -> Iterator[None]:
            with originals["phase"](self, name):
                places.reach(f"begin of {name}")
                yield
                places.reach(f"end of {name}")

        def collectives(self: World, during: str, *args: Any) -> Any:
            places.reach(f"before {during}")
            return originals["collectives"](self, during, *args)

        def wrap_exchange(name: str) -> Any:
            @functools.wraps(originals[name])
            def call(self: World, value: Any, during: str, *args: Any) -> Any:
                places.reach(f"{name} of {during}")
                return originals[name](self, value, during, *args)

            return call

        wrappers = {
            "phase": phase,
            "collectives": collectives,
            **{name: wrap_exchange(name) for name in _EXCHANGES},
        }
        for name, method in wrappers.items():
            setattr(World, name, method)
        try:
            yield self
        finally:
            for name, method in originals.items():
                setattr(World, name, method)


_EXCHANGES = ("all_gather_object", "broadcast_object")


def fail_at_every_place(job: Callable[[], None], kinds: tuple[type[BaseException], ...]) -> list[str]:
    """Fail ``job`` at each place on each rank in turn; describe deviations.

    Every rank of a group calls it; the group must work after each failure.
    """
    world, lines = current_world(), []
    with Places().watch() as places:
        places.reset()
        job()
        names = list(places.names)
    names_by_rank = world.all_gather_object(names, "counting places")
    assert all(len(names) > 5 for names in names_by_rank)
    for victim, names in enumerate(names_by_rank):
        for number in range(len(names)):
            kind = kinds[number % len(kinds)]
            lines += _fail_at(job, world, victim, number, kind)
    return lines


def _fail_at(
    job: Callable[[], None], world: World, victim: int, number: int, kind: type[BaseException]
) -> list[str]:
    def act(name: str) -> None:
        raise kind(f"injected at {name}")

    places, caught, start = Places(), "nothing", time.monotonic()
    places.act = act
    places.reset(number if world.rank == victim else -1)
    with places.watch():
        try:
            job()
        except ZerostartError as error:
            caught = f"{type(error).__name__}: {error}"
        except (KeyboardInterrupt, SystemExit) as error:
            caught = (
                f"{type(error).__name__}: {error}" if world.rank == victim else "an interrupt on another rank"
            )
    seconds = time.monotonic() - start
    # Outside `watch`, so that this exchange does not fail.
    outcomes = world.all_gather_object(
        (caught, seconds, places.names[-1:] if world.rank == victim else ""), "after"
    )
    place = f"{kind.__name__} on rank {victim} at {''.join(outcomes[victim][2])}"
    texts = {
        text for rank, (text, *_) in enumerate(outcomes) if issubclass(kind, Exception) or rank != victim
    }
    lines = [] if len(texts) == 1 else [f"{place}: {sorted(texts)}"]
    lines += [f"{place}: {t}" for t in texts if f"rank {victim}: " not in t or kind.__name__ not in t]
    if not issubclass(kind, Exception) and not outcomes[victim][0].startswith(kind.__name__):
        lines.append(f"{place}: the rank itself had {outcomes[victim][0]}")
    return lines + [f"{place}: {s:.0f} s" for _, s, _ in outcomes if s > 30]


@contextlib.contextmanager
def record_unguarded() -> Iterator[list[str]]:
    """List the raw collectives that the body calls outside World's guards."""
    unguarded: list[str] = []
    depth = 0
    originals: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def wrap_guard(original: Any) -> Any:
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

    def wrap_transfer(original: Any) -> Any:
        def call(*arguments: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return original(*arguments, **kwargs)
            finally:
                depth -= 1

        return call

    def wrap_collective(name: str, original: Any) -> Any:
        def call(*arguments: Any, **kwargs: Any) -> Any:
            if not depth:
                unguarded.append(name)
            return original(*arguments, **kwargs)

        return call

    replace(World, "collectives", wrap_guard(World.collectives))
    replace(World, "_transfer", wrap_transfer(World._transfer))
    for name in RAW:
        wrapped = wrap_collective(name, getattr(distributed_c10d, name))
        for owner in (distributed_c10d, dist, device_mesh):
            if hasattr(owner, name):
                replace(owner, name, wrapped)
    try:
        yield unguarded
    finally:
        for owner, name, original in reversed(originals):
            setattr(owner, name, original)
