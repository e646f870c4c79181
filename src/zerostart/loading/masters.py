"""Reading a loaded model's weights once more, in full precision, when an engine makes its fp32 masters.

A parameter in bf16 that the checkpoint stores in fp32 has lost bits. An engine that trains with fp32 master
weights makes them from the parameters, much later than the load. No fp32 copy is kept until then: what is
kept is where each share lies (recipe, layout, catalog), and the shares are read straight into the masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import current_world
from zerostart.engines import Shard
from zerostart.errors import EngineError
from zerostart.geometry.layout import Layout
from zerostart.geometry.layout.layout import narrowed
from zerostart.recipe import Computed, Recipe, torch_dtype
from zerostart.recipe.values import leaves_of
from zerostart.transfer import Progress, Tuning
from zerostart.transfer.collective import execute_together
from zerostart.transfer.planning import Destination, join

_PURPOSE = (
    "and fp32 masters are to be read from it when the engine starts; keep it as it is until then, or load "
    "again, or pass fp32_masters=False to zerostart.load to have them start from the parameters' rounded "
    "values"
)


class Masters:
    """The shares of one loaded model that were rounded, and how to read them again.

    Tensors in memory are not kept alive for it: they are held by weak references.
    """

    def __init__(
        self,
        shares: Mapping[str, tuple[Recipe, Layout, Layout]],
        catalog: Catalog,
        tuning: Tuning,
    ) -> None:
        # Recipe, and the layouts of what the shard stores and of the rank's local tensor: the first is what
        # an engine asks for whole, the second what it asks for in runs.
        self._shares = dict(shares)
        self._tuning = tuning
        # Of the files only those that rounded parameters come from have to stay as they are.
        used = {catalog.tensors[n].file for r, *_ in self._shares.values() for n in leaves_of(r.pieces)}
        self._catalog = replace(catalog, storage=catalog.storage.kept(used))

    def read(self, wanted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with this rank's share of the parameter of that name, in its dtype.

        Collective, with the same names in the same order. Raises EngineError where the mapping that was
        loaded is gone, ReadError where files or tensors have changed since, the same on every rank.
        """
        self._read((name, self._shares[name][1], storage) for name, storage in wanted)

    def read_runs(self, wanted: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Like ``read``, of other shares: a run of the rank's local tensor from the element given.

        Raises as ``read`` does.
        """
        self._read(
            (name, narrowed(self._shares[name][2], first, first + storage.numel()), storage)
            for name, first, storage in wanted
        )

    def _read(self, shares: Iterable[tuple[str, Layout, torch.Tensor]]) -> None:
        world = current_world()
        with world.phase("reading fp32 masters"):
            # Raised on this rank inside the phase, and so on all, before anybody reads.
            catalog = self._checked()
            wanted = list(shares)
            destined = [self._destined(*item) for item in wanted]
            plan = join(catalog, destined, self._tuning.options())
            storages = [storage for _, _, storage in wanted]
            execute_together(plan, storages, Progress(plan.read_bytes, False), self._tuning, world)

    def _destined(
        self, name: str, layout: Layout, storage: torch.Tensor
    ) -> tuple[Recipe, Layout, Destination]:
        recipe = self._shares[name][0]
        if storage.numel() != layout.numel:
            raise EngineError(
                f"the fp32 master of {name} has {storage.numel()} elements on this rank, but the load "
                f"gave it {layout.numel}; start the engine on the ranks that the model was loaded on"
            )
        # The same recipe with another dtype at its end: the bytes are cast from what is stored, and not from
        # the rounded parameter.
        target = replace(recipe.target, dtype=storage.dtype)
        direct = storage.device.type == "cpu"
        destination = Destination(name, storage.numel(), layout.owned, storage.dtype, direct)
        return replace(recipe, target=target), layout, destination

    def _checked(self) -> Catalog:
        return replace(self._catalog, storage=self._catalog.storage.recalled(_PURPOSE))


def masters_of(
    catalog: Catalog,
    recipes: Mapping[str, object],
    shards: Sequence[Shard],
    tuning: Tuning,
) -> tuple[list[str], Masters | None]:
    """Names of the parameters that a cast rounded, and what reads them again; None if there are none."""
    shares = {}
    for shard in shards:
        recipe = recipes[shard.name]
        if isinstance(recipe, Recipe) and is_rounded(recipe, catalog):
            # Of every shard, one without elements here too: the reading is collective, with the same names on
            # all ranks.
            shares[shard.name] = (recipe, shard.layout, shard.local or shard.layout)
    if not shares:
        return [], None
    return list(shares), Masters(shares, catalog, tuning)


def is_rounded(recipe: Recipe, catalog: Catalog) -> bool:
    """Whether the target's dtype may not hold exactly what is stored, or what a conversion computes."""
    target = recipe.target.dtype
    # A dtype of as many bits rounds as well: fp16 and bf16 hold different numbers.
    return target.is_floating_point and any(
        given != target and given.itemsize >= target.itemsize for given in _given_dtypes(recipe, catalog)
    )


def _given_dtypes(recipe: Recipe, catalog: Catalog) -> set[torch.dtype]:
    return {
        source.dtype
        if isinstance(source, Computed)
        else torch_dtype(catalog.tensors[str(source)].dtype, str(source))
        for piece in recipe.pieces
        for source in piece.source
    }
