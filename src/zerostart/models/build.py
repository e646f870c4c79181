"""Building a model without its weights: parameters on the meta device, in the dtype of the load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerostart.errors import BuildError, ConfigError
from zerostart.models.library import Built, Stored
from zerostart.models.operator_log import OperatorLog
from zerostart.models.registry import library_in, library_of
from zerostart.upstream.transformers.models import check_built, without_weights

ModelLike = nn.Module | type[nn.Module] | Callable[[], nn.Module] | Built | None


def from_config(model: ModelLike) -> bool:
    """Whether building ``model`` takes a configuration from beside the weights."""
    return model is None or (isinstance(model, type) and library_of(model).from_config)


def require(model: ModelLike, root: str | None) -> None:
    """Import the model's library and class, where the source names them. Raises BuildError."""
    if model is None:
        library_in(root).require(None, root)
    elif isinstance(model, type):
        library_of(model).require(model, root)


def build(
    model: ModelLike,
    root: str | None,
    dtype: torch.dtype | None,
    stored: torch.dtype | None,
    main: torch.dtype | None = None,
    trusted: bool = False,
) -> Built:
    """Build ``model``, or without one the class that the configuration in ``root`` names.

    ``stored`` is the dtype of the checkpoint's first floating tensor, ``main`` that of most of its elements;
    ``trusted`` is as in ``Stored``.
    One that is ``Built`` already is left as it is. Raises BuildError or ConfigError.
    """
    if isinstance(model, Built):
        return model
    known = Stored(root, dtype, stored, main, trusted)
    if isinstance(model, nn.Module):
        built = _given(model, known)
    elif model is None:
        built = _configured(None, known)
    elif isinstance(model, type) and library_of(model).from_config:
        built = _configured(model, known)
    else:
        built = _called(model, known)
    return replace(built, quantizer=built.library.quantizer(built.model, root, built.dtype))


def _configured(kind: type[nn.Module] | None, stored: Stored) -> Built:
    """From the configuration beside the weights."""
    library = library_in(stored.root) if kind is None else library_of(kind)
    how, log = library.construction(kind, stored), OperatorLog()
    with without_weights(how.building), log, explained(how.name):
        made = how.make()
    check_built(made)
    return Built(made, log, how.dtype, True, library)


def _called(make: type[nn.Module] | Callable[[], nn.Module], stored: Stored) -> Built:
    """A class, or a callable that builds the model."""
    name, log = getattr(make, "__name__", repr(make)), OperatorLog()
    loader: Any = make
    with without_weights(torch.get_default_dtype()), log, explained(name):
        made = loader()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model={name} gave a {type(made).__name__}, and not a torch.nn.Module")
    check_built(made)
    library = library_of(made)
    return Built(made, log, library.whole_dtype(made, stored, False), True, library)


def _given(model: nn.Module, stored: Stored) -> Built:
    """A module that the caller built; its parameters must be on meta, or they would be paid for twice."""
    real = [name for name, p in model.named_parameters() if p.device.type != "meta"]
    if real:
        raise ConfigError(
            f"model has {len(real)} parameters that are not on the meta device ({real[0]}, ...). Build it "
            "inside `with torch.device('meta'):`, or pass the class or a callable that builds it"
        )
    library = library_of(model)
    return Built(model, OperatorLog(), library.whole_dtype(model, stored, True), False, library)


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Say what went wrong when a constructor cannot run without data. Raises BuildError."""
    try:
        yield
    except (BuildError, ConfigError):
        raise
    except Exception as error:
        raise BuildError(
            f"{name} cannot be built on the meta device: {type(error).__name__}: {error}. Its constructor "
            "may need the values of tensors; build it yourself with parameters on meta and pass the module"
        ) from error
