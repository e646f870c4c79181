"""Tracing what others' code fills its own tensors with: an engine's ``load_weights``, a module's loading.

A loader takes names and tensors, and copies what it makes of these into parts of its parameters. Here it gets
symbolic tensors, and its own stay as they are: the first write gives a parameter a symbolic memory, and from
then on whatever is done to the parameter, or to any view of it, is done to that memory. What the memory shows
at the end is the recipe. The elements that nothing was written to have their source in ``Kept``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from zerostart.recipe.memory import Memory, fill_of, is_view, mapped, tensors_in, writes
from zerostart.recipe.operators import cast, expand, permute, reshape, slice_of
from zerostart.recipe.recipe import Coverage, Recipe, Recipes, Target
from zerostart.recipe.record import boxed
from zerostart.recipe.recording import recorded
from zerostart.recipe.refusals import refusal
from zerostart.recipe.stored import copies_of
from zerostart.recipe.symbolic import SymbolicTensor, settled
from zerostart.recipe.values import Computed, Value, constant, names_of
from zerostart.recipe.views import Layout
from zerostart.upstream.types import Arguments, Keywords

aten = torch.ops.aten


def trace_loader(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    symbols: Mapping[str, SymbolicTensor],
    tensors: Mapping[str, torch.Tensor],
    known_as: str,
) -> Recipes:
    """What ``load``, called with names and tensors, fills ``tensors`` with; messages call it ``known_as``.

    ``tensors`` are the loader's own parameters and buffers by name, real or on meta: no element of them
    changes. The recipes, in the order of ``tensors``, cover what is filled; ``partial`` counts the elements
    of a recipe's target that are not, and ``missing`` are the names of which nothing is. ``unexpected`` are
    the symbols of which nothing is taken.

    Raises ConversionError for a loader that fails, is random, depends on the values of weights, or keeps them
    elsewhere.
    """
    own = OwnTensors(tensors, known_as)
    at = ""

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for name, symbol in copies_of(symbols).items():
            at = f" (after it was given {name})"
            yield name, symbol
        at = ""

    def run() -> None:
        with Following(own), _Replacing(own):
            load(pairs())

    try:
        recorded(f"the loading of {known_as}", run)
    except ConversionError as error:
        raise ConversionError(f"{error}{at}") from error
    except Exception as error:
        raise ConversionError(
            f"the loading of {known_as} failed{at}: {type(error).__name__}: {error}"
        ) from error
    return _recipes(own, tensors, symbols, known_as)


@dataclass(frozen=True, slots=True)
class Kept:
    """The source of elements that a loader has not written: what its own tensor held before."""

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
        sources = _sources(filled)
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
    unexpected = tuple(name for name, symbol in symbols.items() if not _sources(symbol.pieces) & used)
    return Recipes(by_name, Coverage(missing, unexpected), partial=partial)


def _sources(pieces: Sequence[Piece]) -> set[object]:
    found: set[object] = set()
    seen: set[int] = set()
    todo: list[object] = [source for piece in pieces for source in piece.source]
    while todo:
        source = todo.pop()
        if not isinstance(source, Computed):
            found.add(source)
        elif id(source) not in seen:
            seen.add(id(source))
            todo += [s for operand in source.operands for piece in operand.pieces for s in piece.source]
    return found


class OwnMemory(Memory):
    """The memory of a loader's own tensor. Writes into boxes of it are put together when it is looked at.

    A stack of experts is filled by hundreds of copies, and to put each into its place at once would take the
    square of their number.
    """

    __slots__ = ("_boxes", "written")

    def __init__(self, layout: Layout, dtype: torch.dtype, name: str) -> None:
        super().__init__(layout, dtype)
        self._boxes: list[tuple[Box, Value]] = []
        #: Whether anything has been written into it.
        self.written = False
        before = Value(geometry.whole(Kept(name), layout.shape), layout.shape, dtype)
        self._value = before.lying(layout.strides)

    @property
    def value(self) -> Value:
        """What the memory holds now."""
        assert self._value is not None, "a loader's own memory holds something"
        if self._boxes:
            pieces = _put_together(self._value, self._boxes)
            stored = self._value.stored.union(*(new.stored for _, new in self._boxes))
            made = Value(pieces, self.layout.shape, self.dtype, stored)
            self._value, self._boxes = made.lying(self.layout.strides), []
        return self._value

    def hold(self, value: Value) -> None:
        """Hold ``value`` from now on."""
        self._boxes = []
        self.written = True
        super().hold(value)

    def put(self, layout: Layout, new: Value) -> bool:
        """Write ``new`` into the view that lies as ``layout``; False where that is no box, and nothing is."""
        mine = self.layout
        found = geometry.view_within(
            *(mine.shape, mine.strides, mine.offset), *(layout.shape, layout.strides, layout.offset)
        )
        if found is None or found.box is None:
            return False
        # The elements in the order of their addresses, as the box has them, and then in the box's own order.
        moving = [d for d, n in enumerate(layout.shape) if n > 1]
        new = reshape(new, [layout.shape[d] for d in moving])
        new = permute(new, [found.turned.index(i) for i in range(len(moving))])
        new = reshape(new, [found.box.extent[d] for d in found.order])
        new = permute(new, [found.order.index(d) for d in range(len(found.order))])
        self._boxes.append((found.box, new))
        self.written = True
        self.version += 1
        return True


def _put_together(base: Value, writes: Sequence[tuple[Box, Value]]) -> tuple[Piece, ...]:
    rank = base.dim()
    low = np.array([box.origin for box, _ in writes], dtype=np.int64).reshape(len(writes), rank)
    high = low + np.array([box.extent for box, _ in writes], dtype=np.int64).reshape(len(writes), rank)
    pieces: list[Piece] = []
    kept: list[Piece] = []
    filled = 0
    for number, (box, new) in enumerate(writes):
        # What a later write covers is gone.
        meets = (low[number + 1 :] < high[number]) & (high[number + 1 :] > low[number])
        later = [writes[number + 1 + int(i)][0] for i in np.flatnonzero(meets.all(axis=1))]
        for part in _left_of(box, later):
            pieces += _placed(new, box, part)
            filled += part.numel
    whole = Box((0,) * rank, base.shape)
    if filled < whole.numel:
        for part in _left_of(whole, [box for box, _ in writes]):
            kept += _placed(base, whole, part)
    # Experts that lie side by side are a run of tensors, as those that a conversion stacks.
    for dim in range(rank):
        pieces.sort(key=lambda p: (p.origin[:dim], p.origin[dim + 1 :], p.origin[dim]))
        pieces = list(geometry.join_runs(pieces, dim))
    return (*pieces, *kept)


def _left_of(box: Box, others: Sequence[Box]) -> list[Box]:
    left = [box]
    for other in others:
        left = [part for one in left for part in geometry.without(one, other)]
    return left


def _placed(value: Value, box: Box, part: Box) -> Iterator[Piece]:
    for dim, (at, size) in enumerate(zip(part.origin, part.extent, strict=True)):
        if size != box.extent[dim]:
            first = at - box.origin[dim]
            value = slice_of(value, dim, first, first + size)
    pieces = value.pieces
    for dim, at in enumerate(part.origin):
        pieces = geometry.shift(pieces, dim, at)
    yield from pieces


@dataclass(slots=True)
class _Region:
    """A part of a storage that one tensor of the loader fills."""

    #: In bytes of the storage.
    start: int
    stop: int
    #: Of the tensor.
    name: str
    memory: OwnMemory
    #: Whether values of it were used before anything was written into it.
    read: bool = False


@dataclass(slots=True)
class OwnTensors:
    """A loader's own tensors, and the symbolic memory of each."""

    tensors: Mapping[str, torch.Tensor]
    known_as: str
    #: By storage, in the order of their places.
    _regions: dict[int, list[_Region]] = field(default_factory=dict)
    #: What ``parameter.data = ...`` has put in the place of a tensor, by the tensor's identity.
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find out which tensors lie in one memory: tied ones, and views of each other."""
        spans: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel() and not isinstance(tensor, SymbolicTensor):
                start, stop = _span(tensor)
                spans.setdefault(_storage(tensor), []).append((start, stop, name, tensor))
        for storage, found in spans.items():
            # The larger first, so that a view comes after the tensor that it is a view of.
            found.sort(key=lambda one: (one[0], -one[1]))
            regions: list[_Region] = []
            for start, stop, name, tensor in found:
                if regions and stop <= regions[-1].stop:
                    continue
                if regions and start < regions[-1].stop:
                    raise ConversionError(
                        f"{self.known_as} has {name} in memory that another of its tensors partly shares"
                    )
                layout = Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
                regions.append(_Region(start, stop, name, OwnMemory(layout, tensor.dtype, name)))
            self._regions[storage] = regions

    def region(self, tensor: torch.Tensor) -> _Region | None:
        """Where a tensor lies, if it is one of the loader's own or a view of one."""
        if isinstance(tensor, SymbolicTensor) or tensor.layout != torch.strided or not tensor.numel():
            return None
        regions = self._regions.get(_storage(tensor))
        if not regions:
            return None
        start, stop = _span(tensor)
        found = regions[bisect_right(regions, start, key=lambda region: region.start) - 1]
        return found if found.start <= start and stop <= found.stop else None

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The symbolic view of the memory that lies where ``tensor`` does; others as they are."""
        region = self.region(tensor)
        if region is None:
            return tensor
        view: torch.Tensor = SymbolicTensor(region.memory)
        if tensor.dtype != view.dtype:
            view = view.view(tensor.dtype)
        layout = Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        found: torch.Tensor | None = boxed(view, layout)
        if found is None:
            raise refusal(f"{self.known_as} fills a view of {region.name} that is no box of its memory")
        return found

    def shown(self, tensor: torch.Tensor) -> Value | None:
        """What an own tensor holds in the end; None for one that nothing was written into."""
        _, instead = self.replaced.get(id(tensor), (None, None))
        if instead is not None:
            tensor = instead
        region = self.region(tensor)
        if region is None:
            return settled(tensor).value if instead is not None else None
        if not region.memory.written:
            return None if instead is None else _value(self.twin(tensor))
        if region.read:
            raise ConversionError(
                f"{self.known_as} uses values that {region.name} has before the load, and then fills it"
            )
        return _value(self.twin(tensor))


def _value(tensor: torch.Tensor) -> Value:
    assert isinstance(tensor, SymbolicTensor), "the twin of an own tensor is symbolic"
    return tensor.value


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * width


class Following(TorchDispatchMode):
    """Inside, writes into a loader's own tensors go into their symbolic memory, and reads see it."""

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
        """Do ``func`` to what the tensors stand for."""
        kwargs = _off_meta(func, kwargs or {})
        given = list(tensors_in((args, kwargs.values())))
        regions = [region for t in given if (region := self._own.region(t)) is not None]
        if not regions:
            self._refuse_outside(func, args, kwargs)
            return func(*args, **kwargs)
        if not writes(func):
            return self._read(func, args, kwargs, regions)
        if torch.Tag.inplace_view in func.tags:
            raise refusal(f"{self._own.known_as} calls {func} on a tensor of its own while it loads")
        if func is aten.copy_.default and self._copied(args[0], args[1]):
            return args[0]
        # Anything else that writes: on the twins, whose memory it is. It gives back what it was given.
        back: dict[int, torch.Tensor] = {}

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            made = self._own.twin(tensor)
            back[id(made)] = tensor
            return made

        args, kwargs = mapped(args, twin), mapped(kwargs, twin)
        return mapped(func(*args, **kwargs), lambda made: back.get(id(made), made))

    def _read(self, func: OpOverload, args: Arguments, kwargs: Keywords, regions: list[_Region]) -> Any:
        """An operator that writes nothing."""
        if is_view(func):
            return func(*args, **kwargs)  # a view of a real tensor is found by its place again
        untouched = not any(region.memory.written for region in regions)
        known = all(t.device.type != "meta" for t in tensors_in((args, kwargs.values())))
        if untouched and known and fill_of(func, args) is None:
            for region in regions:
                region.read = True
            return func(*args, **kwargs)
        return func(*mapped(args, self._own.twin), **mapped(kwargs, self._own.twin))

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        region = self._own.region(target)
        twin = self._own.twin(source)
        if region is None or target.dtype != region.memory.dtype or twin.device.type == "meta":
            return False
        value = twin.value if isinstance(twin, SymbolicTensor) else constant(source.detach().cpu().clone())
        if value.shape != tuple(target.shape):
            torch.empty(value.shape, device="meta").expand(target.shape)  # torch's own error
            value = expand(value, tuple(target.shape))
        layout = Layout(tuple(target.shape), target.stride(), int(target.storage_offset()))
        return region.memory.put(layout, cast(value, target.dtype))

    def _refuse_outside(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        if not writes(func) or not args or not isinstance(args[0], torch.Tensor):
            return
        if isinstance(args[0], SymbolicTensor) or not args[0].numel():
            return
        weights = [
            t for t in tensors_in(args[1:]) if isinstance(t, SymbolicTensor) and not t.memory.is_constant
        ]
        if weights:
            raise refusal(
                f"{self._own.known_as} copies {names_of(*weights)} ({func}) into a tensor of shape "
                f"{list(args[0].shape)} that is none of its parameters and buffers"
            )


def _off_meta(func: OpOverload, kwargs: Keywords) -> Keywords:
    device = kwargs.get("device")
    if device is None or torch.device(str(device)).type != "meta":
        return kwargs
    return {**kwargs, "device": torch.device("cpu")}


class _Replacing(TorchFunctionMode):
    """Inside, ``parameter.data = t`` is noted and not done, and ``t`` is used for the parameter from then on.

    The value of one element (``item``) may be asked for, to fill a tensor with it.
    """

    def __init__(self, own: OwnTensors) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(
        self, func: Any, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Call ``func`` with what stands for its arguments."""
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
            args, kwargs = mapped(args, self._instead), mapped(kwargs, self._instead)
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
