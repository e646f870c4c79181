"""Weights at rest, in the files that they came in or in memory: layers are fetched for each use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.geometry import Box
from zerostart.geometry.layout import Layout, LocalBox, replicated
from zerostart.recipe import Recipe
from zerostart.recipe.values import leaves_of
from zerostart.transfer import Arena, Progress, Tuning, execute, page_locked
from zerostart.transfer.planning import Destination, Plan, join

_PURPOSE = (
    "and layers of the model are read from it as they are needed; keep it as it is while the model is used, "
    "or place the component 'replicate'"
)


class AtRest(ABC):
    """The parameters of one model, by name, whole."""

    @abstractmethod
    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Fill each 1-D tensor with the parameter of its name, in row-major order, in the tensor's dtype.

        Raises ReadError where its files cannot be read, or are not what they were.
        """

    @abstractmethod
    def rows(self, name: str, rows: Sequence[int], into: torch.Tensor) -> None:
        """Fill ``into``, [rows, columns], with these rows of the matrix ``name``; raises as ``fetch``."""


class InFiles(AtRest):
    """In the checkpoint's files, in whatever layout and dtype; nothing is kept in memory or open."""

    def __init__(self, catalog: Catalog, recipes: Mapping[str, Recipe], tuning: Tuning) -> None:
        self._recipes = dict(recipes)
        self._tuning = tuning
        used = {catalog.tensors[n].file for r in self._recipes.values() for n in leaves_of(r.pieces)}
        self._catalog = replace(catalog, storage=catalog.storage.kept(used))
        # By names and dtypes of what is fetched together.
        self._plans: dict[tuple[tuple[str, torch.dtype], ...], Plan] = {}

    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """See ``AtRest``. Raises ReadError."""
        key = tuple((name, to.dtype) for name, to in wanted.items())
        # Layers come round with every step: their plans are made once. ``rows`` differ each time, and are not
        # kept.
        if key not in self._plans:
            self._plans[key] = self._plan(
                [(name, replicated(self._recipes[name].target.shape), t) for name, t in wanted.items()]
            )
        # Not collective: each rank reads for itself, when its forward comes to it.
        self._run(self._plans[key], list(wanted.values()))

    def rows(self, name: str, rows: Sequence[int], into: torch.Tensor) -> None:
        """See ``AtRest``. Raises ReadError."""
        shape = self._recipes[name].target.shape
        (columns,) = shape[1:]
        boxes = [
            LocalBox(Box((first, 0), (count, columns)), at * columns, (columns, 1))
            for first, count, at in _runs(rows)
        ]
        layout = Layout(shape, into.numel(), into.numel(), tuple(boxes))
        self._run(self._plan([(name, layout, into.view(-1))]), [into.view(-1)])

    def _plan(self, wanted: Sequence[tuple[str, Layout, torch.Tensor]]) -> Plan:
        return join(
            self._catalog,
            [
                (
                    replace(recipe := self._recipes[name], target=replace(recipe.target, dtype=to.dtype)),
                    layout,
                    Destination(name, to.numel(), layout.owned, to.dtype, to.device.type == "cpu"),
                )
                for name, layout, to in wanted
            ],
            self._tuning.options(),
        )

    def _run(self, plan: Plan, storages: list[torch.Tensor]) -> None:
        # Weights in memory are held weakly until here: this raises where they are gone.
        storage, tuning = self._catalog.storage.recalled(_PURPOSE), self._tuning.suited(plan)
        reader = storage.reader(cold=tuning.cold)
        execute(plan, storages, Progress(plan.read_bytes, False), tuning.threads, reader, tuning.depth)


class InMemory(AtRest):
    """In memory of one device, in a dtype of their own; page-locked on a host that has another device."""

    def __init__(
        self,
        source: InFiles,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        pinned: bool,
    ) -> None:
        self._held: dict[str, torch.Tensor] = {}
        arena = Arena(device, page_locked) if pinned else None
        sizes = {name: (prod(shape), dtype) for name, (shape, dtype) in shapes.items()}
        # All before the first is taken, which allocates the arena.
        at = {name: arena.reserve(*size) for name, size in sizes.items()} if arena is not None else {}
        for name, (shape, _) in shapes.items():
            numel, dtype = sizes[name]
            if arena is None:
                held = torch.empty(numel, dtype=dtype, device=device)
            else:
                held = arena.take(at[name], numel, dtype)
            # One at a time, so that no more than the tensor itself is needed beside what is held.
            source.fetch({name: held})
            self._held[name] = held.view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(held.nbytes for held in self._held.values())

    def fetch(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """See ``AtRest``; nothing is read."""
        for name, to in wanted.items():
            # Not waited for: the stream that copies is the one that computes with it.
            to.copy_(self._held[name].view(-1), non_blocking=True)

    def rows(self, name: str, rows: Sequence[int], into: torch.Tensor) -> None:
        """See ``AtRest``; nothing is read."""
        held = self._held[name]
        chosen = torch.tensor(rows, dtype=torch.int64, device=held.device)
        # As bytes: there is no indexing of eight-bit floats.
        found = held.view(torch.uint8).index_select(0, chosen).view(held.dtype)
        into.copy_(found)


def _runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Rows in rising order as unbroken runs ``(first, count, place)``."""
    runs: list[tuple[int, int, int]] = []
    for place, row in enumerate(rows):
        if runs and runs[-1][0] + runs[-1][1] == row:
            first, count, at = runs[-1]
            runs[-1] = (first, count + 1, at)
        else:
            runs.append((row, 1, place))
    return runs
