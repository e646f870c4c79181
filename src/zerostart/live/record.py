"""The record of a load: the join that it made, kept with the model for whatever comes later.

A model may be wrapped by libraries, and be put together out of several loads: both are looked through here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines import Engine, Placements, Shard
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Parallelism
from zerostart.live.report import Report
from zerostart.recipe import Recipe


@dataclass(frozen=True)
class LoadRecord:
    """What one model was loaded from and for; it holds none of its tensors, and dies with it.

    ``catalog`` and ``recipes`` say which checkpoint elements make up which parameter or buffer, by its first
    name (what is not there has been initialised); ``engine``, ``parallelism`` and ``placements`` who has
    which of them; ``report`` is this rank's.
    """

    catalog: Catalog
    recipes: Mapping[str, Recipe]
    engine: Engine
    parallelism: Parallelism
    placements: Placements
    report: Report

    def shards(self, model: nn.Module) -> dict[str, Shard]:
        """The shards of the live ``model`` of this record as they are now, by parameter name."""
        return self.engine.shards_of(model, self.parallelism, self.report.rank)


#: Figures of a report that add up over loads one after the other; peaks too, as each begins where the last
#: one ended.
_SUMMED = ("read_bytes", "planned_bytes", "exchanged_bytes", "peak_host_bytes", "peak_device_bytes")
#: What is the same of all loads, or not said of the whole.
_SHARED = ("reading", "engine", "tier")
#: Packages whose modules wrap models.
_WRAPPERS = ("torch", "deepspeed", "accelerate", "peft")
_records: weakref.WeakKeyDictionary[nn.Module, LoadRecord] = weakref.WeakKeyDictionary()


def keep(model: nn.Module, record: LoadRecord) -> None:
    """Remember the record of ``model`` for as long as the model lives."""
    _records[model] = record


def loaded_model(model: nn.Module) -> nn.Module:
    """The loaded model inside the wrappers of engines, of torch.compile and of PEFT, or ``model`` itself."""
    inner: nn.Module | None = model
    while inner is not None and inner not in _records:
        inner = wrapped(inner)
    return model if inner is None else inner


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of libraries, whoever has loaded it."""
    inner = loaded_model(model)
    while inner not in _records and type(inner).__module__.partition(".")[0] in _WRAPPERS:
        inside = wrapped(inner)
        if inside is None:
            break
        inner = inside
    return inner


def wrapped(wrapper: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for a module that is none."""
    names: tuple[str, ...] = ("module", "_orig_mod")
    if type(wrapper).__module__.partition(".")[0] == "peft":
        names += ("base_model", "model")
    found = (wrapper._modules.get(name) for name in names)
    return next((module for module in found if module is not None), None)


def loaded_models(model: nn.Module) -> Iterator[nn.Module]:
    """All loaded models that ``model`` is or contains."""
    return (module for module in model.modules() if module in _records)


def loaded_around(module: nn.Module) -> Iterator[nn.Module]:
    """All loaded models that ``module`` is a part of."""
    return (model for model in list(_records) if any(part is module for part in model.modules()))


def kept_record(model: nn.Module) -> LoadRecord | None:
    """The record of ``model`` itself; None if zerostart did not load it."""
    return _records.get(model)


def record_of(model: nn.Module) -> LoadRecord:
    """The record of ``model``; raises ConfigError if zerostart did not load it."""
    found = _records.get(loaded_model(model))
    if found is None:
        raise ConfigError(
            f"this {type(model).__name__} was not loaded by zerostart, so there is no report of it"
        )
    return found


def loaded_parts(model: nn.Module) -> list[tuple[str, nn.Module, LoadRecord]]:
    """Prefix, module and record of each load that is part of ``model``: of the model itself, it alone."""
    found: list[tuple[str, nn.Module, LoadRecord]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        record = kept_record(module)
        if record is not None and id(module) not in inside:
            found.append((f"{name}." if name else "", module, record))
            inside.update(id(part) for part in module.modules())
    return found


def report_of(model: nn.Module) -> Report:
    """What the load of ``model`` did, or all loads of its parts together.

    Raises ConfigError where no part of it was loaded.
    """
    inner = bare_model(model)
    parts = loaded_parts(inner)
    if not parts:
        return record_of(inner).report  # which raises
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
