"""Trace a loader: find out which checkpoint elements it copies into its own tensors.

A loader, such as an engine's ``load_weights``, takes names and tensors and copies parts of them into its
parameters. Here it gets symbolic tensors, and its own tensors keep their values. The first write gives a
parameter a symbolic memory. All later operations on the parameter, or on a view of it, apply to that memory.
Its contents at the end are the recipe. Elements without a write have the source ``Kept``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zerostart import geometry
from zerostart.errors import ConversionError
from zerostart.geometry import Box, Piece
from zerostart.recipe.memory import Memory, get_fill_value, is_view, is_write, iter_tensors, map_tensors
from zerostart.recipe.operators import cast, expand, permute, reshape
from zerostart.recipe.recipe import Coverage, Recipe, Recipes, Target
from zerostart.recipe.record import box_view, byte_span
from zerostart.recipe.recording import trace_call
from zerostart.recipe.refusals import refusal
from zerostart.recipe.symbolic import SymbolicTensor, snapshot
from zerostart.recipe.values import Computed, Value, find_sources, list_names, make_constant
from zerostart.recipe.views import StridedLayout
from zerostart.upstream.types import Arguments, Keywords

aten = torch.ops.aten


def trace_loader(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    symbols: Mapping[str, SymbolicTensor],
    tensors: Mapping[str, torch.Tensor],
    known_as: str,
) -> Recipes:
    """Trace which parts of ``symbols`` the loader ``load`` copies into ``tensors``.

    ``tensors`` maps names to the loader's own parameters and buffers, real or on meta; their values do not
    change. ``known_as`` is the loader's name in messages. The recipes cover the filled tensors, in the order
    of ``tensors``. ``partial`` counts unfilled elements of a filled tensor, ``missing`` lists unfilled
    tensors, and ``unexpected`` lists unused symbols.

    Raises ConversionError if the loader fails, is random, depends on values of weights, or copies them
    elsewhere.
    """
    own = OwnTensors(tensors, known_as)
    at = ""

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for name, symbol in deepcopy(dict(symbols)).items():
            at = f" (after it was given {name})"
            yield name, symbol
        at = ""

    def run() -> None:
        with Following(own), _Replacing(own):
            load(pairs())

    try:
        trace_call(f"the loading of {known_as}", run)
    except ConversionError as error:
        raise ConversionError(f"{error}{at}") from error
    except Exception as error:
        raise ConversionError(
            f"the loading of {known_as} failed{at}: {type(error).__name__}: {error}"
        ) from error
    return _recipes(own, tensors, symbols, known_as)


@dataclass(frozen=True, slots=True)
class Kept:
    """Source of elements without a write: the previous contents of a loader's tensor."""

    name: str

    def __str__(self) -> str:
        return f"{self.name} as it was before the load"


def _recipes(
    own: OwnTensors, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, SymbolicTensor], known_as: str
) -> Recipes:
    by_name: dict[str, Recipe] = {}
    partial: dict[str, int] = {}
    used: set[object] = set()
    for name, tensor in tensors.items():
        value = own.shown(tensor)
        if value is None:
            continue
        if (value.shape, value.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise ConversionError(
                f"{known_as} replaces {name}, {tensor.dtype} {list(tensor.shape)}, by a tensor of "
                f"{value.dtype} {list(value.shape)}; what is filled has to keep its dtype and shape"
            )
        filled = tuple(piece for piece in value.pieces if not isinstance(piece.source[0], Kept))
        if not filled:
            continue
        sources = find_sources(filled)
        old = next((source for source in sources if isinstance(source, Kept)), None)
        if old is not None:
            raise ConversionError(f"{known_as} fills {name} from {old}, which no push can know")
        used |= sources
        target = Target(name, value.shape, value.dtype, not isinstance(tensor, torch.nn.Parameter))
        as_stored = filled == geometry.whole(filled[0].source[0], value.shape)
        by_name[name] = Recipe(target, filled, not as_stored or isinstance(filled[0].source[0], Computed))
        lacking = tensor.numel() - sum(piece.numel for piece in filled)
        if lacking:
            partial[name] = lacking
    missing = tuple(name for name in tensors if name not in by_name)
    unexpected = tuple(name for name, symbol in symbols.items() if not find_sources(symbol.pieces) & used)
    return Recipes(by_name, Coverage(missing, unexpected), partial=partial)


class OwnMemory(Memory):
    """Symbolic memory of a loader's own tensor; reads merge its writes.

    Hundreds of copies fill a stack of experts. Merging each one at once would take quadratic time.
    """

    __slots__ = ("_boxes", "written")

    def __init__(self, layout: StridedLayout, dtype: torch.dtype, name: str) -> None:
        super().__init__(layout, dtype)
        self._boxes: list[tuple[Box, Value]] = []
        #: True after the first write.
        self.written = False
        before = Value(geometry.whole(Kept(name), layout.shape), layout.shape, dtype)
        self._value = before.with_strides(layout.strides)

    @property
    def value(self) -> Value:
        """Current contents."""
        assert self._value is not None, "a loader's own memory holds something"
        if self._boxes:
            pieces = _merge(self._value, self._boxes)
            stored = self._value.stored.union(*(new.stored for _, new in self._boxes))
            value = Value(pieces, self.layout.shape, self.dtype, stored)
            self._value, self._boxes = value.with_strides(self.layout.strides), []
        return self._value

    def hold(self, value: Value) -> None:
        """Replace the contents by ``value``."""
        self._boxes = []
        self.written = True
        super().hold(value)

    def write_box(self, layout: StridedLayout, new: Value) -> bool:
        """Write ``new`` into a view with ``layout``; False if the view is not a box."""
        mine = self.layout
        box_view = geometry.view_within(
            *(mine.shape, mine.strides, mine.offset), *(layout.shape, layout.strides, layout.offset)
        )
        if box_view is None or box_view.box is None:
            return False
        # Order the dimensions by address, like the box, then by the box's own order.
        moving = [d for d, n in enumerate(layout.shape) if n > 1]
        new = reshape(new, [layout.shape[d] for d in moving])
        new = permute(new, [box_view.permutation.index(i) for i in range(len(moving))])
        new = reshape(new, [box_view.box.extent[d] for d in box_view.order])
        new = permute(new, [box_view.order.index(d) for d in range(len(box_view.order))])
        self._boxes.append((box_view.box, new))
        self.written = True
        self.version += 1
        return True


def _merge(base: Value, writes: Sequence[tuple[Box, Value]]) -> tuple[Piece, ...]:
    rank = base.dim()
    low = np.array([box.origin for box, _ in writes], dtype=np.int64).reshape(len(writes), rank)
    high = low + np.array([box.extent for box, _ in writes], dtype=np.int64).reshape(len(writes), rank)
    pieces: list[Piece] = []
    unwritten: list[Piece] = []
    filled = 0
    for number, (box, new) in enumerate(writes):
        # Drop parts that a later write covers.
        meets = (low[number + 1 :] < high[number]) & (high[number + 1 :] > low[number])
        later = [writes[number + 1 + int(i)][0] for i in np.flatnonzero(meets.all(axis=1))]
        for part in _subtract(box, later):
            pieces += _cut(new, box, part)
            filled += part.numel
    whole = Box((0,) * rank, base.shape)
    if filled < whole.numel:
        for part in _subtract(whole, [box for box, _ in writes]):
            unwritten += _cut(base, whole, part)
    # Adjacent experts form one run of tensors, like stacked experts in a conversion.
    for dim in range(rank):
        pieces.sort(key=lambda p: (p.origin[:dim], p.origin[dim + 1 :], p.origin[dim]))
        pieces = list(geometry.join_runs(pieces, dim))
    return (*pieces, *unwritten)


def _subtract(box: Box, covers: Sequence[Box]) -> list[Box]:
    parts = [box]
    for cover in covers:
        parts = [rest for part in parts for rest in geometry.subtract_box(part, cover)]
    return parts


def _cut(value: Value, box: Box, part: Box) -> tuple[Piece, ...]:
    """Return the pieces of ``part`` of a ``value`` that fills ``box``."""
    pieces = value.pieces
    for dim, (at, size) in enumerate(zip(part.origin, part.extent, strict=True)):
        if size != box.extent[dim]:
            first = at - box.origin[dim]
            pieces = geometry.crop(pieces, dim, first, first + size)
        pieces = geometry.shift(pieces, dim, at)
    return pieces


@dataclass(slots=True)
class _Region:
    """Part of a storage that belongs to one tensor of the loader."""

    #: Byte offsets in the storage.
    start: int
    stop: int
    #: Name of the tensor.
    name: str
    memory: OwnMemory
    #: True if its previous values were used.
    read: bool = False


@dataclass(slots=True)
class OwnTensors:
    """A loader's own tensors with their symbolic memories."""

    tensors: Mapping[str, torch.Tensor]
    known_as: str
    #: Regions of each storage, sorted by offset.
    _regions: dict[int, list[_Region]] = field(default_factory=dict)
    #: For the id of a parameter: the parameter and the tensor assigned to its ``data``.
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Group the tensors by storage; tied tensors and views share one memory."""
        spans: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel() and not isinstance(tensor, SymbolicTensor):
                storage = tensor.untyped_storage()._cdata
                spans.setdefault(storage, []).append((*byte_span(tensor), name, tensor))
        for storage, entries in spans.items():
            # Larger tensors first: a view follows its base.
            entries.sort(key=lambda entry: (entry[0], -entry[1]))
            regions: list[_Region] = []
            for start, stop, name, tensor in entries:
                if regions and stop <= regions[-1].stop:
                    continue
                if regions and start < regions[-1].stop:
                    raise ConversionError(
                        f"{self.known_as} has {name} in memory that another of its tensors partly shares"
                    )
                layout = StridedLayout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
                regions.append(_Region(start, stop, name, OwnMemory(layout, tensor.dtype, name)))
            self._regions[storage] = regions

    def region(self, tensor: torch.Tensor) -> _Region | None:
        """Return the region that contains ``tensor``; None for a tensor of somebody else."""
        if isinstance(tensor, SymbolicTensor) or tensor.layout != torch.strided or not tensor.numel():
            return None
        regions = self._regions.get(tensor.untyped_storage()._cdata)
        if not regions:
            return None
        start, stop = byte_span(tensor)
        region = regions[bisect_right(regions, start, key=lambda each: each.start) - 1]
        return region if region.start <= start and stop <= region.stop else None

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the symbolic view of an own tensor; return other tensors unchanged."""
        region = self.region(tensor)
        if region is None:
            return tensor
        view: torch.Tensor = SymbolicTensor(region.memory)
        if tensor.dtype != view.dtype:
            view = view.view(tensor.dtype)
        layout = StridedLayout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        part: torch.Tensor | None = box_view(view, layout)
        if part is None:
            raise refusal(f"{self.known_as} fills a view of {region.name} that is no box of its memory")
        return part

    def shown(self, tensor: torch.Tensor) -> Value | None:
        """Return the final contents of an own tensor; None without a write."""
        _, current = self.replaced.get(id(tensor), (tensor, tensor))
        region = self.region(current)
        is_written = region is not None and region.memory.written
        if current is tensor and not is_written:
            return None
        if region is not None and is_written and region.read:
            raise ConversionError(
                f"{self.known_as} uses values that {region.name} has before the load, and then fills it"
            )
        return snapshot(self.twin(current)).value


class Following(TorchDispatchMode):
    """Mode that redirects operations on a loader's own tensors to their symbolic memories."""

    def __init__(self, own: OwnTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = own

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:
        """Run ``func`` on the symbolic views of its arguments."""
        kwargs = kwargs or {}
        if torch.device(kwargs.get("device") or "cpu").type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        operands = list(iter_tensors((args, kwargs.values())))
        regions = [region for t in operands if (region := self._own.region(t)) is not None]
        if not regions:
            self._refuse_outside(func, args, kwargs)
            return func(*args, **kwargs)
        if not is_write(func):
            return self._read(func, args, kwargs, regions)
        if torch.Tag.inplace_view in func.tags:
            raise refusal(f"{self._own.known_as} calls {func} on a tensor of its own while it loads")
        if func is aten.copy_.default and self._copied(args[0], args[1]):
            return args[0]
        # Run other writes on the symbolic views; results that are arguments are returned as such.
        originals: dict[int, torch.Tensor] = {}

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            view = self._own.twin(tensor)
            originals[id(view)] = tensor
            return view

        args, kwargs = map_tensors(args, twin), map_tensors(kwargs, twin)
        return map_tensors(func(*args, **kwargs), lambda result: originals.get(id(result), result))

    def _read(self, func: OpOverload, args: Arguments, kwargs: Keywords, regions: list[_Region]) -> Any:
        if is_view(func):
            return func(*args, **kwargs)  # a view of an own tensor is recognised by its storage
        is_unwritten = not any(region.memory.written for region in regions)
        is_real = all(t.device.type != "meta" for t in iter_tensors((args, kwargs.values())))
        if is_unwritten and is_real and get_fill_value(func, args) is None:
            for region in regions:
                region.read = True
            return func(*args, **kwargs)
        return func(*map_tensors(args, self._own.twin), **map_tensors(kwargs, self._own.twin))

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        region = self._own.region(target)
        own = self._own.twin(source)
        if region is None or target.dtype != region.memory.dtype or own.device.type == "meta":
            return False
        value = own.value if isinstance(own, SymbolicTensor) else make_constant(source.detach().cpu().clone())
        if value.shape != tuple(target.shape):
            torch.empty(value.shape, device="meta").expand(target.shape)  # raise torch's error
            value = expand(value, tuple(target.shape))
        layout = StridedLayout(tuple(target.shape), target.stride(), int(target.storage_offset()))
        return region.memory.write_box(layout, cast(value, target.dtype))

    def _refuse_outside(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        if not is_write(func) or not args or not isinstance(args[0], torch.Tensor):
            return
        if isinstance(args[0], SymbolicTensor) or not args[0].numel():
            return
        weights = [
            t for t in iter_tensors(args[1:]) if isinstance(t, SymbolicTensor) and not t.memory.is_constant
        ]
        if weights:
            raise refusal(
                f"{self._own.known_as} copies {list_names(*weights)} ({func}) into a tensor of shape "
                f"{list(args[0].shape)} that is none of its parameters and buffers"
            )


class _Replacing(TorchFunctionMode):
    """Mode that records ``parameter.data = t`` and uses ``t`` for the parameter afterwards.

    ``item`` returns a symbolic element, with which a tensor may be filled.
    """

    def __init__(self, own: OwnTensors) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(
        self, func: Any, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Call ``func`` with the replaced arguments."""
        kwargs = kwargs or {}
        slot = getattr(func, "__self__", None)
        name = getattr(func, "__name__", "")
        if slot is torch.Tensor.data and name == "__set__" and not isinstance(args[0], SymbolicTensor):
            target, instead = args[0], self._instead(args[1])
            if self._own.region(target) is not None or id(target) in self._own.replaced:
                if instead is not target:
                    self._own.replaced[id(target)] = (target, instead)
                return None
        if self._own.replaced:
            args, kwargs = map_tensors(args, self._instead), map_tensors(kwargs, self._instead)
        first = args[0] if args else None
        if isinstance(first, SymbolicTensor):
            if func is torch.Tensor.item and first.numel() == 1 and not first.memory.is_constant:
                return first.detach().reshape(())
            if name == "__get__" and slot is not None:
                return getattr(first, str(slot.__name__))
        return func(*args, **kwargs)

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor:
        while id(tensor) in self._own.replaced:
            _, tensor = self._own.replaced[id(tensor)]
        return tensor
