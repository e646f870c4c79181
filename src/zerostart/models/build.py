"""Building a model without its weights: parameters on the meta device, in the dtype of the load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.source import config_path
from zerostart.errors import BuildError, ConfigError
from zerostart.models.library import Built, ModelLibrary, Stored
from zerostart.models.operator_log import OperatorLog
from zerostart.models.registry import described_by_tensors, library_in, library_of
from zerostart.models.tensors import recast, replace_tensor, state_names
from zerostart.upstream.transformers.models import check_built, without_weights

ModelLike = nn.Module | type[nn.Module] | Callable[[], nn.Module] | Built | None


def from_config(model: ModelLike) -> bool:
    """Whether building ``model`` takes a configuration from beside the weights."""
    return model is None or (isinstance(model, type) and library_of(model).from_config)


def require(model: ModelLike, root: str | None, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Import the model's library and class, where the source names them. Raises BuildError.

    ``shapes`` are those of its tensors, by which one without a configuration is known.
    """
    if model is None:
        if root and shapes and config_path(root) is None and described_by_tensors(shapes) is not None:
            return
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
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Built:
    """Build ``model``, or without one the class that the configuration in ``root`` names.

    ``stored`` is the dtype of the checkpoint's first floating tensor, ``main`` that of most of its elements;
    ``trusted`` and ``shapes`` are as in ``Stored``.
    One that is ``Built`` already is left as it is. Raises BuildError or ConfigError.
    """
    if isinstance(model, Built):
        return model
    # Four ways to a model, in this order: built already, from a configuration, from a class with one, from a
    # callable.
    known = Stored(root, dtype, stored, main, trusted, shapes or {})
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
    library = library_of(kind) if kind is not None else _library(stored)
    how, log = library.construction(kind, stored), OperatorLog()
    with without_weights(how.building), log, explained(how.name):
        made = how.make()
    check_built(made)
    return Built(made, log, how.dtype, True, library)


def _library(stored: Stored) -> ModelLibrary:
    """The library of a checkpoint, by its configuration, or by its tensors where it has none."""
    bare = stored.root and stored.shapes and config_path(stored.root) is None
    found = described_by_tensors(stored.shapes) if bare else None
    return library_in(stored.root) if found is None else found[0]


def _called(make: type[nn.Module] | Callable[[], nn.Module], stored: Stored) -> Built:
    """A class, or a callable that builds the model."""
    if not callable(make):
        raise ConfigError(
            f"model={make!r} is a {type(make).__name__}; pass a class, a callable that builds the model, or "
            "a module whose parameters are on the meta device"
        )
    name, log = getattr(make, "__name__", repr(make)), OperatorLog()
    loader: Any = make
    with without_weights(torch.get_default_dtype()), log, explained(name):
        made = loader()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model={name} returned a {type(made).__name__}, not a torch.nn.Module")
    check_built(made)
    library = library_of(made)
    return Built(made, log, library.whole_dtype(made, stored, False), True, library)


def _given(model: nn.Module, stored: Stored) -> Built:
    """A module that the caller built; its parameters must be on meta, or they would be paid for twice."""
    real = [name for name, p in model.named_parameters() if p.device.type != "meta"]
    if real:
        raise ConfigError(
            f"model has {len(real)} parameters that are not on the meta device ({real[0]}, ...). "
            "Build it inside `with torch.device('meta'):`, or pass the class or a callable that "
            "builds it"
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


def set_dtypes(built: Built, stored: dict[str, torch.dtype]) -> None:
    """Give the meta tensors their final dtypes, before anything is allocated.

    With a dtype for the whole model, every floating tensor in the model's main dtype changes to it; one
    that the constructor made in another dtype on purpose keeps it. Without one (a plain module), each
    tensor takes the dtype in which the checkpoint stores it.
    """
    model = built.model
    floating = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    # The first one's dtype is the model's main one: constructors make all in one, and few on purpose in
    # another.
    main = floating[0] if floating else None
    # By identity, so that tied names stay tied.
    changed: dict[int, torch.Tensor] = {}
    for name, tensor, _ in list(state_names(model)):
        want = built.dtype if built.dtype is not None and tensor.dtype == main else tensor.dtype
        if built.dtype is None and tensor.dtype.is_floating_point:
            want = stored.get(name, tensor.dtype)
        if want == tensor.dtype or tensor.device.type != "meta":
            continue
        if id(tensor) not in changed:
            changed[id(tensor)] = recast(tensor, want)
        replace_tensor(model, name, changed[id(tensor)])


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every floating parameter, on meta, the dtype that an engine would cast all of them to."""
    changed: dict[int, torch.Tensor] = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        if old.dtype.is_floating_point and old.dtype != dtype:
            if id(old) not in changed:
                changed[id(old)] = recast(old, dtype)
            replace_tensor(model, name, changed[id(old)])


def let_cast(
    built: Built, computing: torch.dtype, masters: bool, note: Callable[[nn.Parameter, torch.dtype], None]
) -> None:
    """Tell, through ``note``, which parameters an engine may cast to ``computing`` when it computes.

    That is all but those that the constructor made in a dtype of their own, or that the model keeps in
    another one when it is loaded in ``computing``. With ``masters`` those that are to be in ``computing`` are
    put in fp32 instead, as masters of the engine's casts.
    """
    kept = built.library.dtype_plan(built.model, computing)
    seen: dict[int, nn.Parameter] = {}
    for name, old in list(built.model.named_parameters(remove_duplicate=False)):
        own = built.dtype is not None and old.dtype != built.dtype
        if own or not old.dtype.is_floating_point or any(pattern.search(name) for pattern, _ in kept):
            continue
        if id(old) not in seen:
            new = recast(old, torch.float32) if masters and old.dtype == computing else old
            assert isinstance(new, nn.Parameter)
            note(new, computing)
            seen[id(old)] = new
        replace_tensor(built.model, name, seen[id(old)])
