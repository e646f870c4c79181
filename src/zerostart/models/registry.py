"""Registered model libraries: zerostart's own and those of other packages."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

import torch
from torch import nn

from zerostart.checkpoint.strict_json import JsonObject
from zerostart.errors import ConfigError
from zerostart.models.library import ModelLibrary

#: Entry points of other packages: a name and a subclass of ``ModelLibrary``.
GROUP = "zerostart.model_libraries"
#: Module and class of each library, in the order of search; the last two accept anything.
_OWN = {
    "diffsynth": ("zerostart.models.libraries.plain", "DiffSynth"),
    "diffusers": ("zerostart.models.libraries.diffusers", "Diffusers"),
    "transformers": ("zerostart.models.libraries.transformers", "Transformers"),
    "plain": ("zerostart.models.libraries.plain", "Plain"),
}
_registered: dict[str, ModelLibrary] = {}


def register_model_library(kind: type[ModelLibrary]) -> type[ModelLibrary]:
    """Register a library before zerostart's own; also a decorator.

    Raises ConfigError for a name that another library has.
    """
    present = _registered.get(kind.name)
    package = kind.__module__.partition(".")[0]
    installed = entry_points(group=GROUP, name=kind.name)
    is_installed = any(point.module.partition(".")[0] != package for point in installed)
    if is_installed or kind.name in _OWN or (present is not None and type(present) is not kind):
        raise ConfigError(f"a model library named {kind.name!r} is already registered; choose another name")
    if present is None:
        _registered[kind.name] = kind()
    return kind


def model_library_names() -> list[str]:
    """Return the libraries' names, in the order of search."""
    return [library.name for library in _list_libraries()]


def library_of(model: nn.Module | type) -> ModelLibrary:
    """Return the library of a model or class.

    Raises ConfigError if an installed library cannot be imported.
    """
    kind = model if isinstance(model, type) else type(model)
    return next(library for library in _list_libraries() if library.handles(kind))


def recognise_tensors(
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[ModelLibrary, JsonObject] | None:
    """Recognise a checkpoint without configuration by its tensors.

    Returns the library and the configuration, or None. Raises BuildError if the configuration is not
    available.
    """
    for library in _list_libraries():
        if (found := library.configuration_of(shapes)) is not None:
            return library, found
    return None


def library_in(root: str | None) -> ModelLibrary:
    """Return the library of a configuration. Raises as ``library_of`` does."""
    return next(library for library in _list_libraries() if library.describes(root))


def find_maker(
    model: object, dtype: torch.dtype | None
) -> tuple[Callable[[], nn.Module], torch.dtype | None]:
    """Return a builder for a configuration, and its dtype.

    Classes and callables are returned unchanged. Raises ConfigError for anything else, and as ``library_of``
    does.
    """
    for library in _list_libraries():
        if (found := library.of_configuration(model, dtype)) is not None:
            return found
    if not callable(model):
        raise ConfigError(
            f"model is a {type(model).__name__}, and without a source it must be a configuration, a class or "
            "a callable that builds a module, or a module"
        )
    return model, None


def _list_libraries() -> tuple[ModelLibrary, ...]:
    return (*_registered.values(), *_installed(), *_load_own())


@functools.cache
def _load_own() -> tuple[ModelLibrary, ...]:
    return tuple(getattr(importlib.import_module(module), name)() for module, name in _OWN.values())


@functools.cache
def _installed() -> tuple[ModelLibrary, ...]:
    return tuple(map(_instantiate, entry_points(group=GROUP)))


def _instantiate(point: EntryPoint) -> ModelLibrary:
    try:
        library: ModelLibrary = point.load()()
    except Exception as error:
        raise ConfigError(
            f"the model library {point.name} ({point.value}), which another package brings, cannot be "
            f"imported: {type(error).__name__}: {error}; repair that package, or uninstall it"
        ) from error
    return library
