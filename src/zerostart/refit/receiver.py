"""A worker's side: what its engine's own loader takes of an image, filling that in, and reading it back.

Nothing is known of the engine but its ``load_weights``. That is run on symbolic tensors once, which says
which bytes of the image each parameter is made of. The plan of a load fills the parameters from them, and
the same plan run backwards reads them back for their digests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import nn

from zerostart.checkpoint.digest import Digests
from zerostart.distributed.world import default_device
from zerostart.errors import ConfigError, ConversionError, VerifyError
from zerostart.geometry import Box, Piece
from zerostart.geometry.layout import Layout, LocalBox
from zerostart.recipe import Computed, Recipe, symbols_of, torch_dtype
from zerostart.recipe.dtypes import holds
from zerostart.refit.image import Image, Runs, Sums, differing
from zerostart.refit.loaders import trace_loader
from zerostart.transfer.planning import Destination, Plan, PlanOptions, join
from zerostart.transfer.planning.writes import Origin, WritePlan, plan_writes
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import Source, write_out

#: Bytes of one read of a fill.
CHUNK = 8 << 20
#: No byte that is not wanted: the trainer sends what is read, and nothing else.
EXACT = PlanOptions(chunk_size=CHUNK, gap_share=0.0, gap_floor=0)

Load: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
#: Yields context managers that give the tensors of one stage.
Stages: TypeAlias = Generator[AbstractContextManager[Mapping[str, torch.Tensor]]]


class EngineWeights(Protocol):
    """The parameters of an engine that are not simply those of a module: packed, or filled layer by layer.

    A method ``may_keep(name)``, if there is one, says of a parameter that no tensor fills whether that is
    right.
    """

    #: Name of the engine in messages.
    name: str

    def tracing(self) -> AbstractContextManager[tuple[Mapping[str, torch.Tensor], Load]]:
        """Give the engine's tensors by name as its loader finds them, and the loader; nothing is written."""
        ...

    def stages(self, filled: Mapping[str, bool]) -> Stages:
        """Yield groups of the tensors that are ``filled`` (true: every element of it), one after the other.

        A group, entered, gives writable tensors of the same names, shapes and dtypes; on leaving it the
        engine packs them. The generator is closed if a fill fails.
        """
        ...


class ModuleWeights:
    """A plain module: its parameters and buffers, all at once."""

    def __init__(self, model: nn.Module, load: Load, name: str) -> None:
        self._model, self._load = model, load
        self.name = name

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[tuple[Mapping[str, torch.Tensor], Load]]:
        yield self._tensors, self._load

    def stages(self, filled: Mapping[str, bool]) -> Stages:
        yield contextlib.nullcontext(self._tensors)


class Supply(Protocol):
    """The source of an image's bytes in a fill."""

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Fill ``storages``, one for each destination of ``plan``."""
        ...

    def sum(self, image: Image, runs: Runs, digests: Digests) -> None:
        """Add the elements of ``runs`` to ``digests``."""
        ...


class Receiver:
    """A worker of an engine, or any module with a loader, that takes versions of a model's weights.

    ``model`` is a module, with a ``load_weights`` that takes names and tensors as a checkpoint has them, or
    an ``EngineWeights``. ``version`` is the one that its parameters have: None before the first, and after a
    fill that failed.
    """

    def __init__(
        self, model: nn.Module | EngineWeights, load_weights: Load | None = None, *, name: str | None = None
    ) -> None:
        """``load_weights`` replaces the module's own; ``name`` is the worker's in reports.

        Raises ConfigError for a module without a loader.
        """
        self.version: int | None = None
        self.name = name
        if not isinstance(model, nn.Module):
            self.engine: EngineWeights = model
            return
        load = load_weights or getattr(model, "load_weights", None)
        if not callable(load):
            raise ConfigError(
                f"this {type(model).__name__} has no load_weights: pass load_weights=, a function that "
                "takes an iterable of (name, tensor) as a checkpoint has them"
            )
        self.engine = ModuleWeights(model, load, type(model).__name__)


@dataclass(frozen=True)
class _Filled:
    """A tensor of the engine that is filled."""

    recipe: Recipe
    #: Whether every element of it is filled.
    whole: bool
    #: The part of the recipe by which elements are read back. The rest the engine computes, or takes twice.
    back: Recipe


class FillPlan:
    """How an engine is filled from an image, again and again: ``fill``, then ``check``."""

    def __init__(self, receiver: Receiver, image: Image, strict: bool) -> None:
        """Find out what of ``image`` the engine takes; nothing of the engine changes.

        Raises ConversionError, naming layer and operation, for a loader that cannot be followed, and with
        ``strict`` for parameters that it fills with nothing.
        """
        self._receiver, self._engine, self._image = receiver, receiver.engine, image
        catalog = image.catalog()
        with self._engine.tracing() as (tensors, load):
            recipes = trace_loader(load, symbols_of(catalog), tensors, self._engine.name)
            strides = {name: tensors[name].stride() for name in recipes.by_name}
            real = (tensors[name].device for name in recipes.by_name)
            #: Device of the tensors, as far as that is known before they are filled.
            self.device = next((device for device in real if device.type != "meta"), default_device())
        if not recipes.by_name:
            raise ConversionError(
                f"{self._engine.name} takes none of the {len(image.entries)} tensors of the trained model; "
                "is it the engine of another model?"
            )
        if strict:
            self._check_all_filled(tensors, recipes.by_name)
        self._stages: dict[object, tuple[Plan, WritePlan]] = {}
        self._filled, back = self._divide(recipes.by_name, strides, recipes.partial)
        filling, _ = self._stage_plan(tuple(self._filled), strides, frozenset(self._filled))
        #: All bytes that it reads. Each element of them is summed once: read back, or else as it was read.
        self.wants = Runs.of_reads(filling)
        self._unread = self.wants.minus(back)

    def fill(self, supply: Supply) -> None:
        """Fill the tensors, and read them back; they are of no version before ``check`` has passed.

        Raises what the engine and ``supply`` raise.
        """
        self._receiver.version = None
        self._digests = Digests(self._image.entries_in(self.wants))
        stages = self._engine.stages({name: filled.whole for name, filled in self._filled.items()})
        with contextlib.closing(stages):
            for stage in stages:
                with stage as given:
                    self._fill_stage({name: given[name] for name in given if name in self._filled}, supply)
        supply.sum(self._image, self._unread, self._digests)

    def check(self, sums: Sums, version: int) -> None:
        """Raise VerifyError, naming tensors, unless what was read back has the trainer's ``sums``."""
        if names := differing(sums, self._digests.sums()):
            more = f" (and {len(names) - 8} more)" if len(names) > 8 else ""
            raise VerifyError(
                f"{self._engine.name}: what was read back of {', '.join(names[:8])} is not what the "
                f"trainer has{more}; push again"
            )
        self._receiver.version = version

    def _check_all_filled(self, tensors: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe]) -> None:
        """Raise ConversionError for parameters that would stay as they are."""
        may_keep: Callable[[str], bool] = getattr(self._engine, "may_keep", lambda name: False)
        filled = {_place(tensors[name]) for name in recipes}
        left = [
            name
            for name, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.numel() and name not in recipes
            if _place(tensor) not in filled and not may_keep(name)
        ]
        if left:
            more = f" (and {len(left) - 8} more)" if len(left) > 8 else ""
            raise ConversionError(
                f"{self._engine.name} fills {', '.join(left[:8])}{more} with nothing of the trained model, "
                "and would go on with what is there: push a model that has it, or pass strict=False to "
                "zerostart.refit if that is intended"
            )

    def _divide(
        self,
        recipes: Mapping[str, Recipe],
        strides: Mapping[str, tuple[int, ...]],
        partial: Mapping[str, int],
    ) -> tuple[dict[str, _Filled], Runs]:
        layout = self._image.layout
        taken: dict[str, list[Runs]] = {}
        found: dict[str, _Filled] = {}
        every: list[Runs] = []
        for name, recipe in recipes.items():
            back = Recipe(recipe.target, tuple(piece for piece in recipe.pieces if not _is_computed(piece)))
            placed = _layout(back, strides[name], False)
            runs = Runs.of_writes(plan_writes(layout, [(back, placed, _origin(back, True))], CHUNK), layout)
            own = {str(source) for piece in back.pieces for source in piece.source}
            nbytes = sum(piece.numel for piece in back.pieces) * recipe.target.dtype.itemsize
            # An element that is taken twice, or in a dtype that does not give back every value.
            if (
                runs.nbytes != nbytes
                or any(other.intersect(runs).nbytes for source in own for other in taken.get(source, ()))
                or not all(holds(recipe.target.dtype, torch_dtype(layout.tensors[s].dtype, s)) for s in own)
            ):
                back, runs, own = Recipe(recipe.target, ()), Runs.of([]), set()
            for source in own:
                taken.setdefault(source, []).append(runs)
            every.append(runs)
            found[name] = _Filled(recipe, name not in partial, back)
        return found, Runs.of(np.concatenate([runs.rows for runs in every]))

    def _stage_plan(
        self, names: tuple[str, ...], strides: Mapping[str, tuple[int, ...]], hosted: frozenset[str]
    ) -> tuple[Plan, WritePlan]:
        """Plan how a stage is filled and read back; ``hosted`` of its tensors are in host memory."""
        key = (names, tuple(strides[name] for name in names), hosted)
        if key in self._stages:
            return self._stages[key]
        wanted, back = [], []
        for name in names:
            one, host, steps = self._filled[name], name in hosted, strides[name]
            wanted.append((one.recipe, _layout(one.recipe, steps, one.whole), _destination(one.recipe, host)))
            placed = _layout(one.back, steps, one.whole and len(one.back.pieces) == len(one.recipe.pieces))
            back.append((one.back, placed, _origin(one.back, host)))
        # Windows begin with the tensor and not with a page, and so with a row of its digest.
        reading = plan_writes(self._image.layout, back, CHUNK, page=1)
        return self._stages.setdefault(key, (join(self._image.catalog(), wanted, EXACT), reading))

    def _fill_stage(self, tensors: Mapping[str, torch.Tensor], supply: Supply) -> None:
        for name, tensor in tensors.items():
            target = self._filled[name].recipe.target
            if tuple(tensor.shape) != target.shape or tensor.dtype != target.dtype:
                raise VerifyError(
                    f"{self._engine.name}: {name} is {tensor.dtype} {list(tensor.shape)} now, and was "
                    f"{target.dtype} {list(target.shape)} when its loader was followed"
                )
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        hosted = frozenset(name for name, tensor in tensors.items() if tensor.device.type == "cpu")
        filling, reading = self._stage_plan(tuple(tensors), strides, hosted)
        storages = [_storage(tensor) for tensor in tensors.values()]
        with torch.no_grad():
            supply.fill(filling, storages)
            write_out(reading, [*map(Source, storages)], None, push_threads(), self._digests.add_rows)


def _is_computed(piece: Piece) -> bool:
    return any(isinstance(source, Computed) for source in piece.source)


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the place of a tensor in memory, the same for tied ones."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _origin(recipe: Recipe, host: bool) -> Origin:
    return Origin(recipe.target.dtype, host)


def _destination(recipe: Recipe, host: bool) -> Destination:
    return Destination(recipe.target.name, 0, 0, recipe.target.dtype, host)


def _layout(recipe: Recipe, strides: tuple[int, ...], whole: bool) -> Layout:
    """Lay out a tensor with ``strides`` in its memory, from its first element to its last.

    It has the boxes that the recipe has pieces for, or one box if these are the ``whole``.
    """
    shape = recipe.target.shape
    if 0 in shape:
        return Layout(shape, 0, 0, ())
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    boxes = [Box((0,) * len(shape), shape)]
    if not whole:
        boxes = [Box(piece.origin, piece.extent) for piece in recipe.pieces]
    placed = (
        LocalBox(box, sum(at * step for at, step in zip(box.origin, strides, strict=True)), strides)
        for box in boxes
    )
    return Layout(shape, span, span, tuple(placed))


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if not tensor.numel():
        return tensor.reshape(-1)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((size - 1) * stride for size, stride in steps),), (1,))
