"""Registered model libraries: zerostart's own and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from zerostart.checkpoint.strict_json import JsonObject
from zerostart.errors import ConfigError
from zerostart.models.library import ModelLibrary
from zerostart.upstream.registry import Registry

#: Entry points of other packages: a name and a subclass of ``ModelLibrary``.
GROUP = "zerostart.model_libraries"
#: Module and class of each library, in the order of search; the last two accept anything.
_OWN = {
    "diffsynth": ("zerostart.models.libraries.plain", "DiffSynth"),
    "diffusers": ("zerostart.models.libraries.diffusers", "Diffusers"),
    "transformers": ("zerostart.models.libraries.transformers", "Transformers"),
    "plain": ("zerostart.models.libraries.plain", "Plain"),
}
_registry = Registry[ModelLibrary]("a model library", GROUP, _OWN)


def register_model_library(kind: type[ModelLibrary]) -> type[ModelLibrary]:
    """Register a library before zerostart's own; also a decorator.

    Raises ConfigError for a name that another library has.
    """
    return _registry.register(kind)


def model_library_names() -> list[str]:
    """Return the libraries' names, in the order of search."""
    return _registry.names()


def library_of(model: nn.Module | type) -> ModelLibrary:
    """Return the library of a model or class.

    Raises ConfigError if an installed library cannot be imported.
    """
    kind = model if isinstance(model, type) else type(model)
    return next(library for library in _registry.instances() if library.handles(kind))


def recognise_tensors(
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[ModelLibrary, JsonObject] | None:
    """Recognise a checkpoint without configuration by its tensors.

    Returns the library and the configuration, or None. Raises BuildError if the configuration is not
    available.
    """
    found = ((library, library.configuration_of(shapes)) for library in _registry.instances())
    return next(((library, config) for library, config in found if config is not None), None)


def library_in(root: str | None) -> ModelLibrary:
    """Return the library of a configuration. Raises as ``library_of`` does."""
    return next(library for library in _registry.instances() if library.describes(root))


def find_maker(
    model: object, dtype: torch.dtype | None
) -> tuple[Callable[[], nn.Module], torch.dtype | None]:
    """Return a builder for a configuration, and its dtype.

    Classes and callables are returned unchanged. Raises ConfigError for anything else, and as ``library_of``
    does.
    """
    for library in _registry.instances():
        if (found := library.of_configuration(model, dtype)) is not None:
            return found
    if not callable(model):
        raise ConfigError(
            f"model is a {type(model).__name__}, and without a source it must be a configuration, a class or "
            "a callable that builds a module, or a module"
        )
    return model, None
