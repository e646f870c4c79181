"""The values of a module that exists, on their way into its shards: each is freed when it is there.

As with ``zero.Init(module=...)``, DistributedDataParallel and ``deepspeed.initialize`` the values of rank 0
count. Ranks whose values have the same digest read their own; the others, and those whose module is on meta,
get them from the first rank that has some.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerostart import models
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.memory import MemoryStorage, memory_catalog
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.live.model import loaded_models
from zerostart.models import Aliases
from zerostart.transfer.collective import TransferStats
from zerostart.transfer.planning import Plan, Read
from zerostart.upstream.deepspeed.zero3_partitions import partition_of

logger = logging.getLogger("zerostart")
#: Bytes of tensors that are moved before they are freed.
TOGETHER = 64 << 20


class Values:
    """What a module had, taken out of it: ``model`` has parameters on meta until it is sharded."""

    def __init__(self, model: nn.Module, catalog: Catalog, note: str) -> None:
        self.model = model
        self.note = note
        # Before the parameters are taken out: what shares memory is found by its memory.
        self.aliases = Aliases.of(model)
        self._taken = models.Taken(model)
        self.aliases.follow(model)
        storage = catalog.storage
        assert isinstance(storage, MemoryStorage), "the tensors of a module are in memory"
        # One for each piece of memory, and none on a rank whose values do not count. They keep the values
        # alive, as ``_taken`` does until it is released.
        self._buffers: list[torch.Tensor] = list(storage.buffers)
        self._groups = _groups(catalog)
        #: Names, types and places of the tensors, which it does not keep alive.
        self.catalog = replace(catalog, storage=storage.kept())

    @staticmethod
    def of(model: Any, world: World, take: bool) -> Values:
        """Look at the module on every rank, agree on whose values count, and take them; collective.

        Raises ConfigError for what is no module on a rank, is sharded already, or differs in more than
        values; where it is not to ``take`` them, for any.
        """
        # These stay on a rank whose module is on meta.
        own, digest = None, ""
        with world.phase("looking at the module"):
            _check(model, take)
            if models.has_values(model):
                own = memory_catalog({name: t.detach() for name, t, _ in models.named_tensors(model)})
                digest = _digest(own)
        # One exchange for both answers: whether the modules are alike, and whose values differ.
        forms = world.all_gather_object((_form(model), digest), "looking at the module")
        for rank, (form, _) in enumerate(forms):
            if form != forms[0][0]:
                raise ConfigError(
                    f"the modules of ranks 0 and {rank} differ in names, order, dtypes or shapes of their "
                    "tensors; build the same on each"
                )
        # There is one: ``start`` asks for values only where a rank has said that it has some.
        first = next(rank for rank, (_, found) in enumerate(forms) if found)
        holders = tuple(rank for rank, (_, found) in enumerate(forms) if found == forms[first][1])
        others = [rank for rank, (_, found) in enumerate(forms) if found not in ("", forms[first][1])]
        shared = own
        # A rank that has no values, or others, gets the catalog only: names and places of tensors that the
        # holders serve.
        if len(holders) < world.size:
            shared = world.broadcast_object(lambda: own, "looking at the module", first)
        catalog = own if world.rank in holders else shared
        assert catalog is not None, "a rank without values gets the first one's catalog"
        storage = catalog.storage
        assert isinstance(storage, MemoryStorage), "the tensors of a module are in memory"
        catalog = replace(catalog, storage=replace(storage, holders=holders))
        note = ""
        if others:
            note = f"the values of rank {first}, from which those of {len(others)} other ranks differed"
            if world.rank == first:
                logger.warning("%s is sharded with %s", type(model).__name__, note)
        taken: Values | None = None
        try:
            with world.phase("taking the module's values"):
                taken = Values(model, catalog, note)
        except BaseException:
            if taken is not None:  # and another rank's could not be
                taken.give_back()
            raise
        return taken

    def give_back(self) -> None:
        """Put the module's parameters back, unless shards have been made of some."""
        self._taken.give_back()

    def execute(self, plan: Plan, read: Callable[[Plan], TransferStats]) -> TransferStats:
        """``read`` the plan in parts, and free the tensors of each part when it is done; collective."""
        # There are shards by now: what fails from here on gives no module back.
        self._taken.release()
        # Every rank has the same groups, empty ones too: each part is a collective read.
        reads: dict[int, list[Read]] = {number: [] for number in range(len(self._groups))}
        place = {file: number for number, group in enumerate(self._groups) for file in group}
        for one in plan.reads:
            reads[place[one.file]].append(one)
        moved = TransferStats(0, 0)
        for number, group in enumerate(self._groups):
            done = read(self._part(plan, reads.pop(number), group))
            moved = TransferStats(
                moved.read + done.read,
                moved.planned + done.planned,
                moved.received + done.received,
                how=done.how,
            )
            # Freed only now: the read has served every rank that wants something of this group.
            for file in group if self._buffers else ():
                self._buffers[file] = _nothing()
            _return_freed()
        return replace(moved, how=f"{moved.how}; {self.note}") if self.note else moved

    def _part(self, plan: Plan, reads: Sequence[Read], group: Sequence[int]) -> Plan:
        storage = plan.storage
        assert isinstance(storage, MemoryStorage), "the tensors of a module are in memory"
        if self._buffers:
            # The part sees the tensors of its group alone; the others keep their numbers, and have no bytes.
            here = [_nothing()] * len(self._buffers)
            for file in group:
                here[file] = self._buffers[file]
            storage = replace(storage, buffers=tuple(here))
        return replace(plan, storage=storage, reads=reads)


def _check(model: object, take: bool) -> None:
    """Raise ConfigError for what cannot be sharded as it is."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "another rank passes a module with values, so every rank has to pass that module: "
            "with equal values, or on the meta device"
        )
    if not take:
        raise ConfigError(
            "model has values, which a plan would not change; pass it on the meta device, or a "
            "callable that builds it"
        )
    sharded = any(partition_of(parameter) is not None for parameter in model.parameters())
    if sharded or next(loaded_models(model), None) is not None:
        raise ConfigError(
            f"{type(model).__name__} or a part of it is sharded already; load its other parts one by one"
        )
    real = [n for n, p in model.named_parameters() if p.device.type != "meta"]
    on_meta = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if real and on_meta:
        raise ConfigError(
            f"{real[0]} has values, but {on_meta[0]} is on the meta device; give all of them values, or none"
        )


def _form(model: nn.Module) -> str:
    """A digest of names, dtypes and shapes: what modules of all ranks agree on."""
    found = hashlib.sha256()
    for name, tensor, buffer in models.named_tensors(model):
        found.update(repr((name, str(tensor.dtype), tuple(tensor.shape), buffer)).encode())
    return found.hexdigest()


def _digest(catalog: Catalog) -> str:
    storage = catalog.storage
    assert isinstance(storage, MemoryStorage), "the tensors of a module are in memory"
    # By number: memory that several names share is looked at once.
    names = [str(number) for number in range(len(storage.buffers))]
    digests = Digests((n, "U8", b.shape) for n, b in zip(names, storage.buffers, strict=True))
    for name, buffer in zip(names, storage.buffers, strict=True):
        for start in range(0, len(buffer), TOGETHER):
            digests.add(name, start, buffer[start : start + TOGETHER])
    strides = [(e.file, e.offset, e.strides) for e in catalog.tensors.values()]
    whole = repr((list(digests.summed().values()), strides))
    return hashlib.sha256(whole.encode()).hexdigest()


def _groups(catalog: Catalog) -> list[list[int]]:
    # A file of this catalog is one piece of memory, which several tensors may share.
    number, nbytes = itertools.count(), 0
    group, last = next(number), dict[int, int]()
    for entry in catalog.tensors.values():
        if nbytes > TOGETHER:
            group, nbytes = next(number), 0
        last[entry.file] = group  # freed with the last tensor in it
        nbytes += entry.nbytes
    return [[file for file, at in last.items() if at == turn] for turn in range(group + 1)]


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _return_freed() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
