"""Fill an engine's parameters from an image, and verify them.

The engine's ``load_weights`` runs once on symbolic tensors. That shows which bytes of the image form each
parameter. A load plan fills the parameters from these bytes, and the reverse plan reads the parameters back
for their digests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn

from zerostart.checkpoint.digest import Digests
from zerostart.distributed.world import default_device
from zerostart.errors import ConfigError, ConversionError, VerifyError
from zerostart.geometry import Box, Piece
from zerostart.geometry.layout import Layout, LocalBox
from zerostart.recipe import CheckpointSymbols, Computed, Recipe, torch_dtype
from zerostart.recipe.dtypes import can_hold
from zerostart.refit.image import ByteSet, Image, Sums, find_differences
from zerostart.refit.loaders import trace_loader
from zerostart.transfer.planning import Destination, Plan, PlanOptions, join
from zerostart.transfer.planning.writes import Origin, WritePlan, plan_writes
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import Source, write_out

#: Maximum size of one read, in bytes.
MAX_READ_BYTES = 8 << 20
#: Options to read no bytes between the needed ones, since the trainer sends every byte that is read.
NO_GAPS = PlanOptions(chunk_size=MAX_READ_BYTES, gap_share=0.0, gap_floor=0)

Load: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
#: Context managers, each of which gives the tensors of one stage (a group that is filled together).
Stages: TypeAlias = Generator[AbstractContextManager[Mapping[str, torch.Tensor]]]


class EngineWeights(Protocol):
    """Parameters of an engine that packs them, or fills them layer by layer.

    An optional method ``may_keep(name)`` returns True if a parameter may stay unfilled.
    """

    #: Name of the engine in messages.
    name: str

    def tracing(self) -> AbstractContextManager[tuple[Mapping[str, torch.Tensor], Load]]:
        """Yield the engine's tensors by name, and its loader, for a trace."""
        ...

    def stages(self, filled: Mapping[str, bool]) -> Stages:
        """Yield context managers, one for each group of the ``filled`` tensors.

        ``filled`` maps a name to True if every element will be filled. A context manager gives writable
        tensors with the traced names, shapes and dtypes; at its exit the engine packs them. If a fill fails,
        the generator is closed.
        """
        ...


class ModuleWeights:
    """Parameters and buffers of a plain module, filled together."""

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


class ImageSource(Protocol):
    """Source of an image's bytes."""

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Fill ``storages``, one for each destination of ``plan``."""
        ...

    def sum(self, image: Image, runs: ByteSet, digests: Digests) -> None:
        """Add the elements in ``runs`` to ``digests``."""
        ...


class Receiver:
    """Worker of an inference engine, or any module with a loader, that receives weights.

    ``model`` is a module with a ``load_weights`` that takes names and tensors as in a checkpoint, or an
    ``EngineWeights``. ``version`` is the version of its parameters: None before the first one and after a
    failed fill.
    """

    def __init__(
        self, model: nn.Module | EngineWeights, load_weights: Load | None = None, *, name: str | None = None
    ) -> None:
        """Use ``load_weights`` if given, otherwise the module's own; ``name`` appears in reports.

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
                "takes an iterable of (name, tensor) with the names of a checkpoint"
            )
        self.engine = ModuleWeights(model, load, type(model).__name__)


class _FilledTensor(NamedTuple):
    """A tensor of the engine that a push fills."""

    recipe: Recipe
    #: True if every element is filled.
    whole: bool
    #: Part of the recipe that is read back for digests: elements that are copied, each only once.
    back: Recipe


class FillPlan:
    """Plan to fill an engine from an image repeatedly: call ``fill``, then ``check``."""

    def __init__(self, receiver: Receiver, image: Image, strict: bool) -> None:
        """Trace the engine's loader on ``image``, without changing the engine.

        Raises ConversionError, naming layer and operation, if the loader cannot be traced, or, with
        ``strict``, if it leaves parameters unfilled.
        """
        self._receiver, self._engine, self.image = receiver, receiver.engine, image
        catalog = image.catalog()
        with self._engine.tracing() as (tensors, load):
            recipes = trace_loader(load, CheckpointSymbols(catalog), tensors, self._engine.name)
            strides = {name: tensors[name].stride() for name in recipes.by_name}
            real = (tensors[name].device for name in recipes.by_name)
            #: Device of the tensors; the default device if they are on meta.
            self.device = next((device for device in real if device.type != "meta"), default_device())
        if not recipes.by_name:
            raise ConversionError(
                f"{self._engine.name} loads none of the {len(image.entries)} tensors of the trained model: "
                "start the engine with the same model"
            )
        if strict:
            self._check_all_filled(tensors, recipes.by_name)
        self._stages: dict[object, tuple[Plan, WritePlan]] = {}
        self._filled, back = self._plan_readback(recipes.by_name, strides, recipes.partial)
        filling, _ = self._stage_plan(tuple(self._filled), strides, frozenset(self._filled))
        #: Bytes to read. Digests cover each once, as read back from the engine, or else as received.
        self.wants = ByteSet.of_reads(filling)
        self._unread = self.wants.minus(back)

    def fill(self, supply: ImageSource) -> None:
        """Fill the tensors and read them back.

        The receiver has no version until ``check`` has passed. Raises the errors of the engine and of
        ``supply``.
        """
        self._receiver.version = None
        self._digests = Digests(self.image.entries_in(self.wants))
        stages = self._engine.stages({name: filled.whole for name, filled in self._filled.items()})
        with contextlib.closing(stages):
            for stage in stages:
                with stage as tensors:
                    self._fill_stage({name: t for name, t in tensors.items() if name in self._filled}, supply)
        supply.sum(self.image, self._unread, self._digests)

    def check(self, sums: Sums, version: int) -> None:
        """Raise VerifyError, naming tensors, if they differ from the trainer's ``sums``."""
        if names := find_differences(sums, self._digests.sums()):
            more = f" (and {len(names) - 8} more)" if len(names) > 8 else ""
            raise VerifyError(
                f"{self._engine.name}: the values of {', '.join(names[:8])}{more} differ from the trainer's; "
                "push again"
            )
        self._receiver.version = version

    def _check_all_filled(self, tensors: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe]) -> None:
        """Raise ConversionError for parameters that would stay unfilled."""
        may_keep: Callable[[str], bool] = getattr(self._engine, "may_keep", lambda name: False)
        filled = {_memory_location(tensors[name]) for name in recipes}
        unfilled = [
            name
            for name, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.numel() and name not in recipes
            if _memory_location(tensor) not in filled and not may_keep(name)
        ]
        if unfilled:
            more = f" (and {len(unfilled) - 8} more)" if len(unfilled) > 8 else ""
            raise ConversionError(
                f"{self._engine.name}: the trained model has no tensor for {', '.join(unfilled[:8])}{more}: "
                "push a model that has them, or pass strict=False to zerostart.refit to keep the values"
            )

    def _plan_readback(
        self,
        recipes: Mapping[str, Recipe],
        strides: Mapping[str, tuple[int, ...]],
        partial: Mapping[str, int],
    ) -> tuple[dict[str, _FilledTensor], ByteSet]:
        layout = self.image.layout
        copied: dict[str, list[ByteSet]] = {}
        tensors: dict[str, _FilledTensor] = {}
        all_runs: list[ByteSet] = []
        for name, recipe in recipes.items():
            back = Recipe(recipe.target, tuple(piece for piece in recipe.pieces if not _is_computed(piece)))
            placed = _layout(back, strides[name], False)
            plan = plan_writes(layout, [(back, placed, Origin(recipe.target.dtype, True))], MAX_READ_BYTES)
            runs = ByteSet.of_writes(plan, layout)
            own = {str(source) for piece in back.pieces for source in piece.source}
            dtypes = [torch_dtype(layout.tensors[source].dtype, source) for source in own]
            nbytes = sum(piece.numel for piece in back.pieces) * recipe.target.dtype.itemsize
            # Elements that are copied twice, or into a dtype that loses values, cannot be read back.
            if (
                runs.nbytes != nbytes
                or any(other.intersect(runs).nbytes for source in own for other in copied.get(source, ()))
                or not all(can_hold(recipe.target.dtype, dtype) for dtype in dtypes)
            ):
                back, runs, own = Recipe(recipe.target, ()), ByteSet.of([]), set()
            for source in own:
                copied.setdefault(source, []).append(runs)
            all_runs.append(runs)
            tensors[name] = _FilledTensor(recipe, name not in partial, back)
        return tensors, ByteSet.of(np.concatenate([runs.rows for runs in all_runs]))

    def _stage_plan(
        self, names: tuple[str, ...], strides: Mapping[str, tuple[int, ...]], on_host: frozenset[str]
    ) -> tuple[Plan, WritePlan]:
        """Plan to fill and read back one stage; ``on_host``: tensors in host memory."""
        key = (names, tuple(strides[name] for name in names), on_host)
        if key in self._stages:
            return self._stages[key]
        wanted, back = [], []
        for name in names:
            one, host, steps = self._filled[name], name in on_host, strides[name]
            dtype = one.recipe.target.dtype
            placed = _layout(one.recipe, steps, one.whole)
            wanted.append((one.recipe, placed, Destination(name, 0, 0, dtype, host)))
            placed = _layout(one.back, steps, one.whole and len(one.back.pieces) == len(one.recipe.pieces))
            back.append((one.back, placed, Origin(dtype, host)))
        # page=1 aligns windows with the start of the tensor, like the rows of its digest.
        reading = plan_writes(self.image.layout, back, MAX_READ_BYTES, page=1)
        return self._stages.setdefault(key, (join(self.image.catalog(), wanted, NO_GAPS), reading))

    def _fill_stage(self, tensors: Mapping[str, torch.Tensor], supply: ImageSource) -> None:
        for name, tensor in tensors.items():
            target = self._filled[name].recipe.target
            if tuple(tensor.shape) != target.shape or tensor.dtype != target.dtype:
                raise VerifyError(
                    f"{self._engine.name}: {name} is {tensor.dtype} {list(tensor.shape)} now, but was "
                    f"{target.dtype} {list(target.shape)} when its loader was traced"
                )
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        on_host = frozenset(name for name, tensor in tensors.items() if tensor.device.type == "cpu")
        filling, reading = self._stage_plan(tuple(tensors), strides, on_host)
        storages = [_view_storage(tensor) for tensor in tensors.values()]
        with torch.no_grad():
            supply.fill(filling, storages)
            write_out(reading, [*map(Source, storages)], None, push_threads(), self._digests.add_rows)


def _is_computed(piece: Piece) -> bool:
    return any(isinstance(source, Computed) for source in piece.source)


def _memory_location(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a key of a tensor's memory; tied tensors have the same key."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _layout(recipe: Recipe, strides: tuple[int, ...], whole: bool) -> Layout:
    """Return the layout of a tensor with ``strides`` in its memory.

    It has one box if the recipe fills the ``whole`` tensor, otherwise one for each piece.
    """
    shape = recipe.target.shape
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    boxes = [Box((0,) * len(shape), shape)]
    if not whole:
        boxes = [Box(piece.origin, piece.extent) for piece in recipe.pieces]
    placed = (
        LocalBox(box, sum(at * step for at, step in zip(box.origin, strides, strict=True)), strides)
        for box in boxes
    )
    return Layout(shape, span, span, tuple(placed))


def _view_storage(tensor: torch.Tensor) -> torch.Tensor:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.detach().as_strided((1 + sum((size - 1) * stride for size, stride in steps),), (1,))
