"""Read weights again in full precision when an engine makes its fp32 masters.

A bf16 parameter has lost bits of an fp32 checkpoint. An engine makes its fp32 masters much later than the
load. Until then no fp32 copy is kept: recipe, layout and catalog of each shard are, and the stored values are
read directly into the masters.
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
from zerostart.geometry.layout.layout import narrow_layout
from zerostart.loading.destinations import read_request
from zerostart.recipe import Computed, Recipe, torch_dtype
from zerostart.recipe.values import find_leaves
from zerostart.transfer import Progress, Tuning
from zerostart.transfer.collective import execute_together
from zerostart.transfer.planning import Destination, join

_PURPOSE = (
    "and fp32 masters are to be read from it when the engine starts; keep it as it is until then, or load "
    "again, or pass fp32_masters=False to zerostart.load to have them start from the parameters' rounded "
    "values"
)


class Masters:
    """Rounded shards of one loaded model, to be read again.

    Tensors of a mapping are held by weak references.
    """

    def __init__(
        self,
        shares: Mapping[str, tuple[Recipe, Layout, Layout]],
        catalog: Catalog,
        tuning: Tuning,
    ) -> None:
        # Recipe, layout of the shard's storage (for `read`), layout of the local tensor (for `read_runs`).
        self._shares = dict(shares)
        self._tuning = tuning
        # Only files with rounded parameters must stay unchanged.
        used = {catalog.tensors[n].file for r, *_ in self._shares.values() for n in find_leaves(r.pieces)}
        self._catalog = replace(catalog, storage=catalog.storage.detach(used))

    def read(self, outputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with this rank's shard of the named parameter.

        Values have the tensor's dtype. Collective, with the same names in the same order. Raises EngineError
        if the loaded mapping is gone, and ReadError if files or tensors have changed.
        """
        self._read((name, self._shares[name][1], storage) for name, storage in outputs)

    def read_runs(self, outputs: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with a run of the rank's local tensor.

        Collective; raises as ``read`` does.
        """
        self._read(
            (name, narrow_layout(self._shares[name][2], first, first + storage.numel()), storage)
            for name, first, storage in outputs
        )

    def _read(self, shares: Iterable[tuple[str, Layout, torch.Tensor]]) -> None:
        world = current_world()
        with world.phase("reading fp32 masters"):
            storage = self._catalog.storage.reattach(_PURPOSE)
            items = list(shares)
            requests = [self._request(*item) for item in items]
            plan = join(replace(self._catalog, storage=storage), requests, self._tuning.options())
            storages = [storage for _, _, storage in items]
            execute_together(plan, storages, Progress(plan.read_bytes, False), self._tuning, world)

    def _request(
        self, name: str, layout: Layout, storage: torch.Tensor
    ) -> tuple[Recipe, Layout, Destination]:
        if storage.numel() != layout.numel:
            raise EngineError(
                f"the fp32 master of {name} has {storage.numel()} elements on this rank, but the load "
                f"gave it {layout.numel}; start the engine on the ranks that the model was loaded on"
            )
        return read_request(name, self._shares[name][0], layout, storage)


def find_masters(
    catalog: Catalog,
    recipes: Mapping[str, object],
    shards: Sequence[Shard],
    tuning: Tuning,
) -> tuple[list[str], Masters | None]:
    """Return names of rounded parameters, and their ``Masters``; None if there are none."""
    shares = {}
    for shard in shards:
        recipe = recipes[shard.name]
        if isinstance(recipe, Recipe) and is_rounded(recipe, catalog):
            # Also shards without elements here: reading is collective, with the same names on all ranks.
            shares[shard.name] = (recipe, shard.layout, shard.local or shard.layout)
    if not shares:
        return [], None
    return list(shares), Masters(shares, catalog, tuning)


def is_rounded(recipe: Recipe, catalog: Catalog) -> bool:
    """Return True if the target's dtype may round stored or computed values."""
    target = recipe.target.dtype
    # fp16 and bf16 have the same size and hold different numbers.
    return target.is_floating_point and any(
        dtype != target and dtype.itemsize >= target.itemsize for dtype in _source_dtypes(recipe, catalog)
    )


def _source_dtypes(recipe: Recipe, catalog: Catalog) -> set[torch.dtype]:
    return {
        source.dtype
        if isinstance(source, Computed)
        else torch_dtype(catalog.tensors[str(source)].dtype, str(source))
        for piece in recipe.pieces
        for source in piece.source
    }
