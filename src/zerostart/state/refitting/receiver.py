"""A worker's side: what its engine's own loader takes of an image, filling that in, and reading it back.

Nothing is known of the engine but its ``load_weights``. That is run on symbolic tensors once, which says
which bytes of the image each parameter is made of; the plan of a load fills the parameters from them, and
the same plan run backwards reads them back for their digests.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage import Reader, Rows
from zerostart.distributed.world import default_device
from zerostart.errors import ConfigError, ConversionError, VerifyError
from zerostart.geometry import Box
from zerostart.geometry.layout import Layout, LocalBox
from zerostart.recipe import Computed, Recipe, symbols_of, torch_dtype
from zerostart.recipe.dtypes import holds
from zerostart.recipe.loaders import trace_loader
from zerostart.state.refitting.changes import Changed
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.sums import Sums, Tensors, differing
from zerostart.state.refitting.transports.base import Incoming
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.planning import Destination, Plan, PlanOptions, join
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.planning.writes import Origin, WritePlan, plan_writes
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import Source, write_out

logger = logging.getLogger("zerostart")
MiB = 1 << 20
#: Bytes of one read of a fill.
CHUNK = 8 * MiB
#: No byte that is not wanted: the trainer sends what is read, and nothing else.
EXACT = PlanOptions(chunk_size=CHUNK, gap_share=0.0, gap_floor=0)

Load: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@runtime_checkable
class EngineWeights(Protocol):
    """The parameters of an engine that are not simply those of a module: packed, renewed, layer by layer.

    One whose tensors of a stage have the values that they were left with may say so by ``keeps_values =
    True``: then what has not changed is not filled in again. One with a method ``may_keep(name)`` says of a
    parameter that no tensor fills whether that is as it should be.
    """

    #: What messages call the engine.
    name: str

    def tracing(self) -> AbstractContextManager[tuple[Mapping[str, torch.Tensor], Load]]:
        """Inside, the engine's tensors by name as its loader finds them, and the loader.

        The tensors are real or on meta; nothing of them is written.
        """
        ...

    def stages(
        self, filled: Mapping[str, bool]
    ) -> Iterator[AbstractContextManager[Mapping[str, torch.Tensor]]]:
        """Groups of the tensors that are ``filled`` (true: every element of it), one after the other.

        A group, entered, gives writable tensors of the same names, shapes and dtypes; on leaving it the
        engine makes of them what it wants. The iterator is closed where a fill fails.
        """
        ...


class ModuleWeights:
    """A plain module: its parameters and buffers, all at once."""

    keeps_values = True

    def __init__(self, model: nn.Module, load: Load, name: str) -> None:
        self._model, self._load = model, load
        self.name = name

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[tuple[Mapping[str, torch.Tensor], Load]]:
        """As ``EngineWeights``."""
        yield self._tensors, self._load

    def stages(
        self, filled: Mapping[str, bool]
    ) -> Iterator[AbstractContextManager[Mapping[str, torch.Tensor]]]:
        """As ``EngineWeights``: one."""
        yield contextlib.nullcontext(self._tensors)


@dataclass(frozen=True)
class Wants:
    """What a worker takes of an image."""

    #: All bytes that it reads.
    runs: Runs
    #: Those of whose elements it sums up digests; each has an element once at most.
    sets: tuple[Runs, ...]


class Supply(Protocol):
    """Where a fill has the image's bytes from."""

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Fill ``storages``, one for each destination of ``plan``."""
        ...

    def sum(self, runs: Runs, digests: Digests) -> None:
        """Add the elements of ``runs`` to ``digests``."""
        ...


@dataclass(frozen=True)
class _Stored:
    """What an ``Incoming`` has."""

    image: Image
    incoming: Incoming

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """As ``Supply``."""
        execute(plan, storages, Progress(0, False), push_threads(), self.incoming.reader())

    def sum(self, runs: Runs, digests: Digests) -> None:
        """As ``Supply``."""
        with self.incoming.reader() as reader:
            sum_read(self.image, runs, reader, digests)


@dataclass(frozen=True)
class _Filled:
    """A tensor of the engine that is filled."""

    recipe: Recipe
    #: Whether every element of it is filled.
    whole: bool
    #: Number of the set by which elements are read back, and the part of the recipe that these are.
    number: int
    back: Recipe
    #: The rest: the engine computes it, or takes an element twice. What was read for it is summed up instead.
    rest: Recipe


@dataclass(frozen=True)
class _StagePlan:
    """How the tensors of a stage are filled and read back."""

    names: tuple[str, ...]
    plan: Plan
    #: By number of the set the plan of reading back, and the tensors that it is of.
    back: Mapping[int, tuple[WritePlan, tuple[str, ...]]]


class Receiver:
    """Takes versions of an image into the tensors of an engine's worker, or of any module.

    ``model`` is a module, with a ``load_weights`` that takes names and tensors as a checkpoint has them, or
    an ``EngineWeights``. ``version`` is the one that its parameters have: None before the first, and where a
    fill has failed half way.
    """

    def __init__(
        self, model: nn.Module | EngineWeights, load_weights: Load | None = None, *, name: str | None = None
    ) -> None:
        """``load_weights`` replaces the module's own; ``name`` is what reports call the worker.

        Raises ConfigError for what has no loader.
        """
        self.version: int | None = None
        self.name = name
        if not isinstance(model, nn.Module):
            self._engine: EngineWeights = model
        else:
            load = load_weights or getattr(model, "load_weights", None)
            if not callable(load):
                raise ConfigError(
                    f"this {type(model).__name__} has no load_weights: pass load_weights=, a function that "
                    f"takes "
                    "an iterable of (name, tensor) as a checkpoint has them"
                )
            self._engine = ModuleWeights(model, load, type(model).__name__)
        self._image: Image | None = None
        #: What the last ``plan`` has given.
        self._wants: Wants | None = None
        self._filled: dict[str, _Filled] = {}
        self._sets: tuple[Runs, ...] = ()
        #: What is summed up as it is read.
        self._read = Runs.of([])
        self._plans: dict[object, _StagePlan] = {}
        #: By set the tensors that it has elements of, and the sums of those of the last fill.
        self._names: list[list[str]] = []
        self._digests: list[Digests] = []
        #: Where the tensors are, as far as that can be seen before they are filled.
        self.device = default_device()

    def plan(self, image: Image, strict: bool = True) -> Wants:
        """Find out what of ``image`` the engine takes; nothing of the engine changes.

        Raises ConversionError, naming layer and operation, for a loader that cannot be followed, and with
        ``strict`` for parameters that it fills with nothing.
        """
        catalog = image.catalog()
        with self._engine.tracing() as (tensors, load):
            recipes = trace_loader(load, symbols_of(catalog), tensors, self._engine.name)
            strides = {name: tensors[name].stride() for name in recipes.by_name}
            real = (tensors[name].device for name in recipes.by_name)
            self.device = next((device for device in real if device.type != "meta"), default_device())
        if not recipes.by_name:
            raise ConversionError(
                f"{self._engine.name} takes none of the {len(image.entries)} tensors of the trained model; "
                f"is it "
                "the engine of another model?"
            )
        if strict:
            self._check_all_filled(tensors, recipes.by_name)
        self._image, self._plans, self._wants = image, {}, None
        self._filled = self._divided(image, recipes.by_name, strides, recipes.partial)
        whole = self._stage_plan(tuple(self._filled), strides, frozenset(self._filled))
        rest = [
            (one.rest, _layout(one.rest, strides[name], False), _destination(one.rest))
            for name, one in self._filled.items()
            if one.rest.pieces
        ]
        self._read = Runs.of_reads(join(catalog, rest, EXACT))
        read = (self._read,) if self._read.nbytes else ()
        self._wants = wants = Wants(Runs.of_reads(whole.plan), (*self._sets, *read))
        tensors_of = Tensors(image)
        self._names = [tensors_of.names(runs) for runs in wants.sets]
        return wants

    def renew(self, image: Image, wants: Wants) -> None:
        """Be as the ``plan`` of ``image`` left it that gave ``wants``, where another trainer's came since.

        Raises ConversionError, also where the engine takes something else of it now.
        """
        if self._wants is wants:
            return
        again = self.plan(image, strict=False)  # was looked at the first time
        if _in_bytes(again) != _in_bytes(wants):
            raise ConversionError(
                f"{self._engine.name} takes other parts of the trained model than when this refit began: "
                "begin it again"
            )
        self._wants = wants

    def fill(self, incoming: Incoming, version: int, sums: Sequence[Sums], since: int | None = None) -> None:
        """Bring the tensors to ``version`` out of ``incoming``, and read them back.

        ``sums`` are the trainer's of each set of ``plan``. ``since`` is the version of the same incoming
        that the tensors have whole: where that is known, what has not changed is not filled in again; all is
        read back. Raises VerifyError, naming the tensors, where those of what was read back differ, and what
        the engine and reading raise; ``version`` is then None.
        """
        assert self._image is not None, "planned before"
        self.version = None
        changed, supply = None, _Stored(self._image, incoming)
        # What takes an element twice is neither read back nor computed anew.
        twice = any(
            not isinstance(source, Computed)
            for one in self._filled.values()
            for piece in one.rest.pieces
            for source in piece.source
        )
        if since is not None and getattr(self._engine, "keeps_values", False) and not twice:
            changed = incoming.changed(since)
        try:
            self._fill(supply, sums, changed)
        except VerifyError as error:
            if changed is None:
                raise
            # Somebody has changed what should have been as it was left.
            logger.warning("%s: all of it is filled in again", error)
            self._fill(supply, sums, None)
        self.version = version

    def take(self, supply: Supply) -> None:
        """Fill the tensors, and read them back; they are no version before ``agree`` has been called.

        Raises what the engine and ``supply`` raise.
        """
        self.version = None
        self._fill(supply, None, None)

    def agree(self, sums: Sequence[Sums]) -> None:
        """Raise VerifyError where what ``take`` has read back is not what the trainer's ``sums`` are of."""
        self._compare(sums, done=True)

    def _fill(self, supply: Supply, sums: Sequence[Sums] | None, changed: Changed | None) -> None:
        """``sums`` are compared with as soon as can be; None: they are not known yet."""
        assert self._image is not None, "planned before"
        entries = {name: (name, dtype, shape) for name, dtype, shape in self._image.entries}
        self._digests = [Digests(entries[name] for name in names) for names in self._names]
        left = set(self._filled)
        stages = self._engine.stages({name: filled.whole for name, filled in self._filled.items()})
        with contextlib.closing(_generator(stages)) as following:
            for stage in following:
                with stage as given:
                    mine = {name: given[name] for name in given if name in self._filled}
                    left -= mine.keys()
                    self._fill_stage(mine, supply, changed)
                    if sums is not None:
                        self._compare(sums, done=False)
        if left:
            raise VerifyError(
                f"{self._engine.name} gave no room for {', '.join(sorted(left)[:8])}, which its load fills"
            )
        if self._read.nbytes:
            # What cannot be read back. After the fill: bytes that are the version's now were so then.
            supply.sum(self._read, self._digests[len(self._sets)])
        if sums is not None:
            self._compare(sums, done=True)

    def _check_all_filled(self, tensors: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe]) -> None:
        """Raise ConversionError for parameters that would stay as they are while the version counts up."""
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
                "zerostart.refit if that is as it should be"
            )

    def _divided(
        self,
        image: Image,
        recipes: Mapping[str, Recipe],
        strides: Mapping[str, tuple[int, ...]],
        partial: Mapping[str, int],
    ) -> dict[str, _Filled]:
        """Each tensor with the set by which it is read back: sets have no element twice."""
        sets: list[list[Runs]] = []
        sources: list[set[str]] = []
        found: dict[str, _Filled] = {}
        for name, recipe in recipes.items():
            back = tuple(
                piece for piece in recipe.pieces if not any(isinstance(s, Computed) for s in piece.source)
            )
            rest = tuple(
                piece for piece in recipe.pieces if any(isinstance(s, Computed) for s in piece.source)
            )
            plain = Recipe(recipe.target, back)
            plan = plan_writes(
                image.layout, [(plain, _layout(plain, strides[name], False), _origin(plain))], CHUNK
            )
            runs = Runs.of_writes(plan, image.layout)
            own = {str(source) for piece in back for source in piece.source}
            kinds = {torch_dtype(image.layout.tensors[source].dtype, source) for source in own}
            # An element that is there twice, or in a dtype that gives back no value as it was.
            if runs.nbytes != _nbytes(plain) or not all(holds(recipe.target.dtype, kind) for kind in kinds):
                back, rest, plain, runs = (), recipe.pieces, Recipe(recipe.target, ()), Runs.of([])
                own = set()
            # Parameters of one tensor of the files (tied ones that the engine has twice) are in two sets,
            # unless
            # each takes another part of it.
            number = 0
            while (
                number < len(sets)
                and sources[number] & own
                and any(r.intersect(runs).nbytes for r in sets[number])
            ):
                number += 1
            if number == len(sets):
                sets.append([])
                sources.append(set())
            sets[number].append(runs)
            sources[number] |= own
            found[name] = _Filled(recipe, name not in partial, number, plain, Recipe(recipe.target, rest))
        self._sets = tuple(each[0].union(*each[1:]) for each in sets)
        return found

    def _stage_plan(
        self, names: tuple[str, ...], strides: Mapping[str, tuple[int, ...]], hosted: frozenset[str]
    ) -> _StagePlan:
        """``hosted`` are those on the host, where an engine may have some alone."""
        key = (names, tuple(strides[name] for name in names), hosted)
        if key not in self._plans:
            self._plans[key] = self._planned(names, strides, hosted)
        return self._plans[key]

    def _planned(
        self, names: tuple[str, ...], strides: Mapping[str, tuple[int, ...]], hosted: frozenset[str]
    ) -> _StagePlan:
        assert self._image is not None, "planned before"
        catalog, layout = self._image.catalog(), self._image.layout
        wanted = []
        back: dict[int, list[tuple[Recipe, Layout, Origin]]] = {}
        for name in names:
            one, host = self._filled[name], name in hosted
            wanted.append(
                (one.recipe, _layout(one.recipe, strides[name], one.whole), _destination(one.recipe, host))
            )
            if one.back.pieces:
                placed = _layout(one.back, strides[name], one.whole and not one.rest.pieces)
                back.setdefault(one.number, []).append((one.back, placed, _origin(one.back, host)))
        plans = {
            # Windows begin with the tensor and not with a page, and so with a row of its digest.
            number: (plan_writes(layout, items, CHUNK, page=1), tuple(item[0].target.name for item in items))
            for number, items in back.items()
        }
        return _StagePlan(names, join(catalog, wanted, EXACT), plans)

    def _fill_stage(
        self,
        tensors: Mapping[str, torch.Tensor],
        supply: Supply,
        changed: Changed | None,
    ) -> None:
        if not tensors:
            return
        for name, tensor in tensors.items():
            target = self._filled[name].recipe.target
            if tuple(tensor.shape) != target.shape or tensor.dtype != target.dtype:
                raise VerifyError(
                    f"{self._engine.name}: {name} is {tensor.dtype} {list(tensor.shape)} now, and was "
                    f"{target.dtype} {list(target.shape)} when its loader was followed"
                )
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        hosted = frozenset(name for name, tensor in tensors.items() if tensor.device.type == "cpu")
        stage = self._stage_plan(tuple(tensors), strides, hosted)
        storages = {name: _storage(tensor) for name, tensor in tensors.items()}
        with torch.no_grad():
            each = [storages[name] for name in stage.names]
            fill = stage.plan
            if changed is not None:
                # What is not read back is filled, and computed, again: nobody would notice what has become
                # of it.
                seen = {n for n, name in enumerate(stage.names) if not self._filled[name].rest.pieces}
                reads = tuple(
                    read
                    for read in fill.reads
                    if changed.between(read.offset, read.end)
                    or not seen.issuperset(part.target for part in read.parts)
                )
                fill = replace(fill, reads=reads)
            supply.fill(fill, each)
            for number, (plan, names) in stage.back.items():
                sources = [Source(storages[name]) for name in names]
                write_out(plan, sources, None, push_threads(), self._digests[number].add_rows)

    def _compare(self, sums: Sequence[Sums], done: bool) -> None:
        """Raise VerifyError for tensors that have other sums; until all is ``done`` for whole ones alone."""
        for expected, digest in zip(sums, self._digests, strict=True):
            found = digest.sums()
            if not done:
                found = {name: row for name, row in found.items() if row[-1] == expected[name][-1]}
            if names := differing(expected if done else {n: expected[n] for n in found}, found):
                raise VerifyError(
                    f"{self._engine.name}: what was read back of {', '.join(names[:8])} is not what the "
                    f"trainer "
                    f"has{f' (and {len(names) - 8} more)' if len(names) > 8 else ''}; push again"
                )


def _in_bytes(wants: Wants) -> list[bytes]:
    return [runs.to_bytes() for runs in (wants.runs, *wants.sets)]


def _generator(stages: Iterator[AbstractContextManager[Mapping[str, torch.Tensor]]]) -> _Stages:
    return _Stages(stages)


class _Stages:
    """Any iterator, with a ``close``."""

    def __init__(self, stages: Iterator[AbstractContextManager[Mapping[str, torch.Tensor]]]) -> None:
        self._stages = stages

    def __iter__(self) -> Iterator[AbstractContextManager[Mapping[str, torch.Tensor]]]:
        return self._stages

    def close(self) -> None:
        close = getattr(self._stages, "close", None)
        if close is not None:
            close()


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Where a tensor lies: the same for one that is there twice."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _origin(recipe: Recipe, host: bool = True) -> Origin:
    return Origin(recipe.target.name, recipe.target.dtype, host)


def _nbytes(recipe: Recipe) -> int:
    return sum(piece.numel for piece in recipe.pieces) * recipe.target.dtype.itemsize


def _destination(recipe: Recipe, host: bool = True) -> Destination:
    target = recipe.target
    return Destination(target.name, 0, 0, target.dtype, host)


def _layout(recipe: Recipe, strides: tuple[int, ...], whole: bool) -> Layout:
    """A tensor with ``strides``, in its memory from its first element to its last.

    Of it the boxes that the recipe has pieces for; as one box where these are the ``whole``.
    """
    shape = recipe.target.shape
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 in shape:
        return Layout(shape, 0, 0, ())
    boxes = [Box((0,) * len(shape), shape)]
    if not whole:
        boxes = [Box(piece.origin, piece.extent) for piece in recipe.pieces]
    placed = (
        LocalBox(box, sum(at * step for at, step in zip(box.origin, strides, strict=True)), strides)
        for box in boxes
    )
    return Layout(shape, span, span, tuple(placed))


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first element to its last, as a row."""
    tensor = tensor.detach()
    if not tensor.numel():
        return tensor.reshape(-1)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((size - 1) * stride for size, stride in steps),), (1,))


def sum_read(image: Image, runs: Runs, reader: Reader, digests: Digests) -> None:
    """Add to ``digests`` what ``reader`` has of ``runs``, a bounded part of it at a time."""
    tensors = Tensors(image)
    for part in runs.batches(CHUNK):
        for name, first, count, step, rows in tensors.rows(part):
            entry = image.layout.tensors[name]
            width = entry.nbytes // entry.numel
            data = bytearray(rows * count * width)
            place = entry.offset + first * width
            wanted = Rows(rows, count * width, step * width if rows > 1 else count * width)
            reader.gather(0, place, wanted, memoryview(data), count * width)
            # As elements, so that rows that begin at the same place of a digest's are summed up together.
            elements = torch.frombuffer(data, dtype=torch_dtype(entry.dtype, name)).view(rows, count)
            digests.add_rows(name, first, step, elements)
