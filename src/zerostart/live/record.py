"""The record of a load: the join that it made, kept with the model for whatever comes later."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
