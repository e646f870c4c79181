"""Find the tensors and shards of a live model, on any engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.machine import seconds_since_start
from zerostart.distributed.world import World
from zerostart.engines import (
    Engine,
    Placements,
    Shard,
    engine_families,
    first_rank_shard,
    plain_name,
    whole_shard,
)
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Parallelism
from zerostart.live.report import Report
from zerostart.models import library_of, state_names
from zerostart.recipe import Recipe


@dataclass(frozen=True)
class LoadRecord:
    """Source, recipes and engine of one load; holds none of the model's tensors."""

    catalog: Catalog
    #: Recipes of the parameters and buffers that were read. A tied tensor has its first name.
    recipes: Mapping[str, Recipe]
    engine: Engine
    parallelism: Parallelism
    placements: Placements
    #: Report of this rank.
    report: Report

    def shards(self, model: nn.Module) -> dict[str, Shard]:
        """Return the current shards of the live ``model``, by parameter name."""
        return self.engine.shards_of(model, self.parallelism, self.report.rank)


#: Report fields that add up over successive loads; each peak is above the level where the last load ended.
_SUMMED = ("read_bytes", "planned_bytes", "exchanged_bytes", "peak_host_bytes", "peak_device_bytes")
#: Report fields that are combined: if loads differ, text is joined and other values become None.
_SHARED = ("reading", "engine", "engine_reason", "tier")
#: Packages with modules that wrap models.
_WRAPPERS = ("torch", "deepspeed", "accelerate", "peft")
_records: weakref.WeakKeyDictionary[nn.Module, LoadRecord] = weakref.WeakKeyDictionary()


def remember_load(model: nn.Module, record: LoadRecord) -> None:
    """Keep the record of ``model`` for the model's lifetime."""
    _records[model] = record
    _first_step()


@cache
def _first_step() -> list[float]:
    """Return a list with the seconds from process start to the first step's end.

    It is empty before. The first call registers a hook on optimizers.
    """
    seconds: list[float] = []
    register_optimizer_step_post_hook(lambda *_: None if seconds else seconds.append(seconds_since_start()))
    return seconds


def unwrap_loaded(model: nn.Module) -> nn.Module:
    """Return the loaded model inside wrappers of engines, torch.compile and PEFT, or ``model`` itself."""
    inner: nn.Module | None = model
    # Stop at a loaded model, even if it looks like a wrapper.
    while inner is not None and inner not in _records:
        inner = inner_module(inner)
    return model if inner is None else inner


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of libraries, loaded by zerostart or not."""
    inner = unwrap_loaded(model)
    # Only library classes are wrappers: a script's own class may be a model with a child named ``module``.
    while inner not in _records and _library(inner) in _WRAPPERS:
        inside = inner_module(inner)
        if inside is None:
            break
        inner = inside
    return inner


def inner_module(wrapper: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper; None for other modules."""
    names: tuple[str, ...] = ("module", "_orig_mod")
    if _library(wrapper) == "peft":
        # PeftModel has the tuner in ``base_model``, and the tuner has the model in ``model``.
        names += ("base_model", "model")
    children = (wrapper._modules.get(name) for name in names)
    return next((module for module in children if module is not None), None)


def _library(module: nn.Module) -> str:
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return kind.__module__.partition(".")[0]


def find_loaded_models(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the loaded models in ``model``, itself included."""
    return (module for module in model.modules() if module in _records)


def find_surrounding_loads(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the loaded models that contain ``module``."""
    return (model for model in list(_records) if any(part is module for part in model.modules()))


def find_record(model: nn.Module) -> LoadRecord | None:
    """Return the record of ``model`` itself; None if zerostart did not load it."""
    return _records.get(model)


def get_record(model: nn.Module) -> LoadRecord:
    """Return the record of the loaded model in ``model``. Raises ConfigError without one."""
    record = _records.get(unwrap_loaded(model))
    if record is None:
        raise ConfigError(
            f"this {type(model).__name__} was not loaded by zerostart; use zerostart.load or zerostart.enable"
        )
    return record


def find_loaded_parts(model: nn.Module) -> list[tuple[str, nn.Module, LoadRecord]]:
    """Return prefix, module and record of each outermost load in ``model``."""
    parts: list[tuple[str, nn.Module, LoadRecord]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        record = find_record(module)
        if record is not None and id(module) not in inside:
            parts.append((f"{name}." if name else "", module, record))
            # named_modules goes from the outside to the inside.
            inside.update(id(part) for part in module.modules())
    return parts


def get_report(model: nn.Module) -> Report:
    """Return the report of ``model``, or one report for all loads of its parts.

    Raises ConfigError if zerostart loaded no part of it.
    """
    return replace(_joined_report(model), first_step_seconds=sum(_first_step()))


def _joined_report(model: nn.Module) -> Report:
    inner = unwrap_model(model)
    parts = find_loaded_parts(inner)
    if not parts:
        return get_record(inner).report  # raises ConfigError
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][2].report
    reports = [(prefix, record.report) for prefix, _, record in parts]
    first = reports[0][1]
    joined = {
        field.name: tuple(prefix + name for prefix, report in reports for name in getattr(report, field.name))
        for field in fields(Report)
        if isinstance(getattr(first, field.name), tuple)
    }
    every = [report for _, report in reports]
    sums = {name: _sum([getattr(report, name) for report in every]) for name in _SUMMED}
    shared = {name: _common(getattr(report, name) for report in every) for name in _SHARED}
    phases = {key: sum(report.phases[key] for report in every) for key in first.phases}
    # The dictionaries have values of several types.
    return replace(first, **joined, **sums, **shared, phases=phases)  # type: ignore[arg-type]


def _sum(values: list[int | None]) -> int | None:
    """Return the sum; None if one value is unknown."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def _common(values: Iterable[object]) -> object:
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    return ", ".join(map(str, distinct)) if isinstance(distinct[0], str) else None


#: Packages whose wrappers add no parameters; PEFT's do.
_AROUND = ("torch", "deepspeed", "accelerate")


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter or persistent buffer of a live model, with this rank's shard."""

    #: Name in the unsharded model, without wrappers.
    name: str
    #: Name in the current model, with wrappers.
    current_name: str
    shard: Shard
    is_parameter: bool
    #: True if it takes gradients.
    trained: bool
    #: Function that replaces elements on the way to a file. It takes the index of the first one in the
    #: storage, and the elements.
    change: Callable[[int, torch.Tensor], torch.Tensor] | None = None


def find_shards(module: nn.Module, world: World) -> dict[str, Shard]:
    """Return the shards of all engines in ``module`` by parameter name, aliases included."""
    shards: dict[str, Shard] = {}
    for engine in engine_families():
        shards.update(engine.find_shards(module, world))
    return shards


class LiveModel:
    """Current tensors of a model, tied ones once, with this rank's shard of each.

    ``wrapper`` is the model that was passed, ``module`` the model inside all wrappers, and ``record`` the
    record of its load, None if zerostart did not load it. The first name of a tied tensor is its first in the
    model's order. Valid until a forward, step or load replaces parameters.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        """``model`` may be wrapped by an engine, torch, accelerate or PEFT."""
        # A forward may have left other parameter objects in the model.
        for engine in engine_families():
            engine.reshard_units(model)
        self.world = world
        self.module = unwrap_model(model)
        self.record: LoadRecord | None = find_record(self.module)
        self.wrapper = model
        # The outermost module that has all parameters, PEFT's adapters included.
        self._outer = model
        while _library(self._outer) in _AROUND:
            if (inner := inner_module(self._outer)) is None:
                break
            self._outer = inner

    @cached_property
    def sharded(self) -> Mapping[int, Shard]:
        """This rank's shard of each sharded parameter, by the parameter's ``id``."""
        outer, parts = self._outer, find_loaded_parts(self._outer)
        named = dict(outer.named_parameters(remove_duplicate=False))
        loaded = {id(p) for _, part, _ in parts for p in part.parameters()}
        # Searching the whole model is slow. Only parameters that no load made, such as adapters, need it.
        added = any(id(p) not in loaded for p in named.values())
        shards = find_shards(outer, self.world) if added else {}
        # Experts and slices look like whole tensors: only the record knows them.
        for prefix, part, record in parts:
            shards.update({prefix + name: shard for name, shard in record.shards(part).items()})
        return {id(named[name]): shard for name, shard in shards.items()}

    def shard_of(self, name: str, parameter: torch.Tensor) -> Shard:
        """Return this rank's shard of ``parameter``; whole if no engine has sharded it.

        Raises EngineError for experts of DeepSpeed's MoE, which have one name on several ranks.
        """
        if (shard := self.sharded.get(id(parameter))) is not None:
            return shard
        if any(engine.has_own_values(parameter) for engine in engine_families()):
            raise EngineError(
                f"{name} belongs to an expert of DeepSpeed's MoE. Other ranks have different experts under "
                "that name, so it cannot be saved as one tensor; use DeepSpeed's save_checkpoint"
            )
        return whole_shard(name, parameter, self.world)

    def named_shards(self) -> dict[str, Shard]:
        """Return this rank's shards of parameters and buffers by current name, aliases included."""
        module = self.module
        shards = {n: self.shard_of(n, p) for n, p in module.named_parameters(remove_duplicate=False)}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            shards[name] = whole_shard(name, buffer, self.world)
        return shards

    # Training states use first names.

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by first name, including those of wrappers."""
        return {name: p for name, p in self._named() if self._names[id(p)] == name}

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """This rank's shard of each of ``parameters``. Raises EngineError as ``shard_of``."""
        return {name: self.shard_of(name, p) for name, p in self.parameters.items()}

    @cached_property
    def ties(self) -> dict[str, str]:
        """First name of a tied parameter, by each of its other names."""
        return {name: first for name, p in self._named() if (first := self._names[id(p)]) != name}

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers, whole on every rank."""
        return {plain_name(name): tensor for name, tensor, buffer in state_names(self.module) if buffer}

    @cached_property
    def wrapper_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of wrappers around ``module`` (``AveragedModel.n_averaged``)."""
        inside = {id(tensor) for _, tensor, buffer in state_names(self.module) if buffer}
        return {n: t for n, t, buffer in state_names(self.wrapper) if buffer and id(t) not in inside}

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the first name of a parameter. Raises ConfigError if the model lacks it."""
        if (name := self._names.get(id(parameter))) is not None:
            return name
        raise ConfigError(
            "the optimizer has a parameter that is not in the model; pass the model and the "
            "optimizer that were trained together, and make the optimizer from the model's "
            "current parameters"
        )

    @cached_property
    def _names(self) -> dict[int, str]:
        first: dict[int, str] = {}
        for name, parameter in self._named():
            first.setdefault(id(parameter), name)
        return first

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        inside = set()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            inside.add(id(parameter))
            yield plain_name(name), parameter
        # Then parameters of wrappers, such as PEFT's adapters. The model's own names come first.
        for name, parameter in self._outer.named_parameters():
            if id(parameter) not in inside:
                yield plain_name(name), parameter

    # Saves and digests use the names of the checkpoint.

    def tensors(self) -> tuple[list[LogicalTensor], dict[str, str]]:
        """Return the tensors in state-dict order, and the other names of tied tensors.

        A tied tensor has the name under which it was loaded. The second result maps its other names to that
        one. Raises EngineError as ``shard_of``, and
        ConfigError for a tensor on meta.
        """
        recipes = self.record.recipes if self.record is not None else {}
        followers = set(library_of(self.module).ties(self.module))
        chosen: dict[int, str] = {}
        named = list(state_names(self.module))
        for name, tensor, _ in named:
            before = chosen.get(id(tensor))
            # Prefer the name of the load, then a name that the library does not declare tied to another one,
            # then the first.
            if (
                before is None
                or (plain_name(before) not in recipes and plain_name(name) in recipes)
                or (before in followers and name not in followers and plain_name(before) not in recipes)
            ):
                chosen[id(tensor)] = name
        tensors, tied = [], {}
        for name, tensor, _ in named:
            first = chosen[id(tensor)]
            if first != name:
                tied[plain_name(name)] = plain_name(first)
                continue
            is_parameter = isinstance(tensor, nn.Parameter)
            # Buffers may differ between ranks (statistics of batches): save those of rank 0.
            shard = (
                self.shard_of(name, tensor) if is_parameter else first_rank_shard(name, tensor, self.world)
            )
            if shard.storage.is_meta:
                raise ConfigError(
                    f"{plain_name(name)} is on the meta device, where tensors have no values: first load the "
                    "model, or initialise it (to_empty, then its own initialiser)"
                )
            trained = is_parameter and tensor.requires_grad
            tensors.append(LogicalTensor(plain_name(name), name, shard, is_parameter, trained))
        return tensors, tied

    def drop_gathered(self) -> None:
        """Drop gathered copies of parameters after their shards have changed."""
        for engine in engine_families():
            engine.drop_gathered(self.parameters.values())

    @property
    def plain_names(self) -> Mapping[str, str]:
        """Names in the unsharded model by state-dict name, tied names included."""
        # Keep the name of a loaded tensor, even if it looks like a wrapper's (`base_layer`).
        parts = find_loaded_parts(self.module)
        loaded = {prefix + name for prefix, _, record in parts for name in record.recipes}
        return {name: name if name in loaded else plain_name(name) for name, _, _ in state_names(self.module)}

    def check_loaded(self) -> None:
        """Raise ConfigError if zerostart loaded no part of the model."""
        if not find_loaded_parts(self.module):
            get_record(self.wrapper)
