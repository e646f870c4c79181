"""The tensors of a live model: one answer, whichever engine holds it and whoever has loaded it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.checkpoint.catalog import Catalog
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
    """What one model was loaded from and for; it holds none of its tensors, and dies with it."""

    catalog: Catalog
    #: Which checkpoint elements make up which parameter or buffer, by its first name; what is not there has
    #: been initialised.
    recipes: Mapping[str, Recipe]
    engine: Engine
    parallelism: Parallelism
    #: With the engine and the parallelism: who has which of them.
    placements: Placements
    #: This rank's.
    report: Report

    def shards(self, model: nn.Module) -> dict[str, Shard]:
        """The shards of the live ``model`` of this record as they are now, by parameter name."""
        return self.engine.shards_of(model, self.parallelism, self.report.rank)


#: Figures of a report that add up over loads one after the other; peaks too, as each begins where the last
#: one ended.
_SUMMED = ("read_bytes", "planned_bytes", "exchanged_bytes", "peak_host_bytes", "peak_device_bytes")
#: What is the same of all loads, or not said of the whole.
_SHARED = ("reading", "engine", "engine_reason", "tier")
#: Packages whose modules wrap models.
_WRAPPERS = ("torch", "deepspeed", "accelerate", "peft")
_records: weakref.WeakKeyDictionary[nn.Module, LoadRecord] = weakref.WeakKeyDictionary()


def remember_load(model: nn.Module, record: LoadRecord) -> None:
    """Remember the record of ``model`` for as long as the model lives."""
    _records[model] = record


def unwrap_loaded(model: nn.Module) -> nn.Module:
    """The loaded model inside the wrappers of engines, of torch.compile and of PEFT, or ``model`` itself."""
    inner: nn.Module | None = model
    # A record outranks the wrapper's kind: a loaded model may itself be of a class that looks like a wrapper.
    while inner is not None and inner not in _records:
        inner = inner_module(inner)
    return model if inner is None else inner


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of libraries, whoever has loaded it."""
    inner = unwrap_loaded(model)
    # Only libraries' own classes are opened: a script's class with a child called ``module`` is a model, not
    # a wrapper.
    while inner not in _records and _library(inner) in _WRAPPERS:
        inside = inner_module(inner)
        if inside is None:
            break
        inner = inside
    return inner


def inner_module(wrapper: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for a module that is none."""
    names: tuple[str, ...] = ("module", "_orig_mod")
    if _library(wrapper) == "peft":
        # PeftModel has the tuner in ``base_model``, and the tuner the model in ``model``. In other libraries
        # these are names of parts of a model.
        names += ("base_model", "model")
    found = (wrapper._modules.get(name) for name in names)
    return next((module for module in found if module is not None), None)


def _library(module: nn.Module) -> str:
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return kind.__module__.partition(".")[0]


def find_loaded_models(model: nn.Module) -> Iterator[nn.Module]:
    """All loaded models that ``model`` is or contains."""
    return (module for module in model.modules() if module in _records)


def find_surrounding_loads(module: nn.Module) -> Iterator[nn.Module]:
    """All loaded models that ``module`` is a part of."""
    return (model for model in list(_records) if any(part is module for part in model.modules()))


def find_record(model: nn.Module) -> LoadRecord | None:
    """The record of ``model`` itself; None if zerostart did not load it."""
    return _records.get(model)


def get_record(model: nn.Module) -> LoadRecord:
    """The record of ``model``; raises ConfigError if zerostart did not load it."""
    found = _records.get(unwrap_loaded(model))
    if found is None:
        raise ConfigError(
            f"this {type(model).__name__} was not loaded by zerostart, so there is no report of its load"
        )
    return found


def find_loaded_parts(model: nn.Module) -> list[tuple[str, nn.Module, LoadRecord]]:
    """Prefix, module and record of each load that is part of ``model``: of the model itself, it alone."""
    found: list[tuple[str, nn.Module, LoadRecord]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        record = find_record(module)
        if record is not None and id(module) not in inside:
            found.append((f"{name}." if name else "", module, record))
            # named_modules goes from the outside to the inside: the outermost load counts, and loads within
            # it are its parts.
            inside.update(id(part) for part in module.modules())
    return found


def get_report(model: nn.Module) -> Report:
    """What the load of ``model`` did, or all loads of its parts together.

    Raises ConfigError where no part of it was loaded.
    """
    inner = unwrap_model(model)
    parts = find_loaded_parts(inner)
    if not parts:
        return get_record(inner).report  # which raises
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
    # Each figure is of its own field's type, which a dictionary of them all cannot say.
    return replace(first, **joined, **sums, **shared, phases=phases)  # type: ignore[arg-type]


def _sum(values: list[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _common(values: Iterable[object]) -> object:
    found = list(dict.fromkeys(values))
    if len(found) == 1:
        return found[0]
    return ", ".join(map(str, found)) if isinstance(found[0], str) else None


#: Packages whose modules are put around a whole model; PEFT's have parameters of their own.
_AROUND = ("torch", "deepspeed", "accelerate")


@dataclass(frozen=True)
class LogicalTensor:
    """One parameter or persistent buffer of a live model, whole by its name, of which a rank has a shard."""

    #: The one that it was loaded under.
    name: str
    #: The one in the model as it is now, where wrappers may have come between.
    current_name: str
    shard: Shard
    is_parameter: bool
    #: Whether it takes gradients.
    trained: bool
    #: If any, it is asked for what is saved in the place of some elements, with the place of the first in the
    #: shard's storage.
    change: Callable[[int, torch.Tensor], torch.Tensor] | None = None


def find_shards(module: nn.Module, world: World) -> dict[str, Shard]:
    """The shards in which any engine holds parameters of ``module``, by name, aliases included."""
    found: dict[str, Shard] = {}
    for engine in engine_families():
        found.update(engine.find_shards(module, world))
    return found


class LiveModel:
    """The tensors of a model as they are now, ties once, and this rank's share of each.

    ``wrapper`` is the model as it was passed; ``module`` is the one inside all wrappers of libraries;
    ``record`` is that of its load, None for a model that zerostart has not loaded. A view: it holds as long
    as no forward, step or load replaces parameters.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        """``model`` may be inner_module by an engine, torch, accelerate or PEFT."""
        # Parameters are told by their objects in all that follows, and a forward may have left others there.
        for engine in engine_families():
            engine.put_to_rest(model)
        self.world = world
        self.module = unwrap_model(model)
        self.record: LoadRecord | None = find_record(self.module)
        self.wrapper = model
        self._outer = model
        while _library(self._outer) in _AROUND:
            if (inner := inner_module(self._outer)) is None:
                break
            self._outer = inner

    # The shards: engines are asked once, and by the parameters' objects all else is looked up.

    @cached_property
    def sharded(self) -> Mapping[int, Shard]:
        """This rank's share of each parameter that an engine has sharded, by the parameter's ``id``."""
        outer, parts = self._outer, find_loaded_parts(self._outer)
        named = dict(outer.named_parameters(remove_duplicate=False))
        loaded = {id(p) for _, part, _ in parts for p in part.parameters()}
        # Engines search the whole model, which takes its time: only where a parameter is no load's (the model
        # is not ours, or adapters were added to it).
        added = any(id(p) not in loaded for p in named.values())
        shards = find_shards(outer, self.world) if added else {}
        # A record knows more than can be seen: experts and slices look like whole tensors.
        for prefix, part, record in parts:
            shards.update({prefix + name: shard for name, shard in record.shards(part).items()})
        return {id(named[name]): shard for name, shard in shards.items()}

    def shard_of(self, name: str, parameter: torch.Tensor) -> Shard:
        """This rank's share of ``parameter``, which every rank has whole where no engine has sharded it.

        Raises EngineError for an expert that has other values under one name on other ranks.
        """
        if (shard := self.sharded.get(id(parameter))) is not None:
            return shard
        if any(engine.has_own_values(parameter) for engine in engine_families()):
            raise EngineError(
                f"{name} belongs to an expert of DeepSpeed's MoE, and other ranks have other experts "
                "of that name, so it cannot be saved as one tensor; use DeepSpeed's save_checkpoint"
            )
        return whole_shard(name, parameter, self.world)

    def named_shards(self) -> dict[str, Shard]:
        """This rank's share of every parameter and buffer by its current name, aliases included."""
        module = self.module
        shards = {n: self.shard_of(n, p) for n, p in module.named_parameters(remove_duplicate=False)}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            shards[name] = whole_shard(name, buffer, self.world)
        return shards

    # By first names, as training states have them: of tied parameters the first in the model's order.

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, by its first name; of what lies around ``module`` by the name there."""
        return {name: p for name, p in self._named() if self._names[id(p)] == name}

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """This rank's share of each of ``parameters``. Raises EngineError as ``shard_of``."""
        return {name: self.shard_of(name, p) for name, p in self.parameters.items()}

    @cached_property
    def ties(self) -> dict[str, str]:
        """The first name of each other name of a tied parameter."""
        return {name: first for name, p in self._named() if (first := self._names[id(p)]) != name}

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers, whole on every rank."""
        return {plain_name(name): tensor for name, tensor, buffer in state_names(self.module) if buffer}

    @cached_property
    def wrapper_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of what is inner_module around ``module`` (``AveragedModel.n_averaged``)."""
        inside = {id(tensor) for _, tensor, buffer in state_names(self.module) if buffer}
        return {n: t for n, t, buffer in state_names(self.wrapper) if buffer and id(t) not in inside}

    def name_of(self, parameter: torch.Tensor) -> str:
        """The first name of a parameter; raises ConfigError for one that is not the model's."""
        if (name := self._names.get(id(parameter))) is not None:
            return name
        raise ConfigError(
            "the optimizer has a parameter that is not in the model; pass the model and the "
            "optimizer that were trained together, and make the optimizer from the model's "
            "present parameters"
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
        # Then what wrappers have added around the model (adapters of PEFT, say), which the model does not
        # see. After the model's own, so that a first name is the model's where both have one.
        for name, parameter in self._outer.named_parameters():
            if id(parameter) not in inside:
                yield plain_name(name), parameter

    # By the names of the checkpoint, as saves and digests have them.

    def tensors(self) -> tuple[list[LogicalTensor], dict[str, str]]:
        """Parameters and persistent buffers in the order of the state dict, and which name follows which.

        A tied tensor has the name that it was loaded under, so that it goes back to where it was. Raises
        EngineError as ``shard_of``, and ConfigError for a tensor without values.
        """
        recipes = self.record.recipes if self.record is not None else {}
        followers = set(library_of(self.module).ties(self.module))
        chosen: dict[int, str] = {}
        named = list(state_names(self.module))
        for name, tensor, _ in named:
            before = chosen.get(id(tensor))
            # The name that it was loaded under, then one that follows no other, then the first.
            if (
                before is None
                or (plain_name(before) not in recipes and plain_name(name) in recipes)
                or (before in followers and name not in followers and plain_name(before) not in recipes)
            ):
                chosen[id(tensor)] = name
        found, tied = [], {}
        for name, tensor, _ in named:
            first = chosen[id(tensor)]
            if first != name:
                tied[plain_name(name)] = plain_name(first)
                continue
            is_parameter = isinstance(tensor, nn.Parameter)
            # Ranks may have buffers with other values (statistics of their batches): the first's count.
            shard = (
                self.shard_of(name, tensor) if is_parameter else first_rank_shard(name, tensor, self.world)
            )
            if shard.storage.is_meta:
                raise ConfigError(
                    f"{plain_name(name)} is on the meta device, where tensors have no values: load the "
                    "model, or give it values (to_empty, and its own initialiser), first"
                )
            trained = is_parameter and tensor.requires_grad
            found.append(LogicalTensor(plain_name(name), name, shard, is_parameter, trained))
        return found, tied

    def drop_gathered(self) -> None:
        """Drop gathered copies of parameters whose shards have changed, for engines that keep such."""
        for engine in engine_families():
            engine.drop_gathered(self.parameters.values())

    @property
    def plain_names(self) -> Mapping[str, str]:
        """Of each name of the state dict the one in the unsharded model, tied names included."""
        # A name that was loaded is one, though it reads like a wrapper's (`base_layer`).
        parts = find_loaded_parts(self.module)
        loaded = {prefix + name for prefix, _, record in parts for name in record.recipes}
        return {name: name if name in loaded else plain_name(name) for name, _, _ in state_names(self.module)}

    def check_loaded(self) -> None:
        """Raise ConfigError where no part of the model was loaded by zerostart."""
        if not find_loaded_parts(self.module):
            get_record(self.wrapper)  # which says so
