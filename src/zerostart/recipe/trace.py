"""Make recipes by running converters and loaders on symbolic tensors.

A model library combines these steps: describe the tensors of the checkpoint (``stored``), convert them
(``run_converter``), and then match them by name (``match_names``, ``assemble_recipes``) or trace the
module's ``load_state_dict`` (``trace_loading``).
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zerostart import geometry
from zerostart.errors import ConversionError
from zerostart.recipe.operators import cast
from zerostart.recipe.recipe import Coverage, Recipe, Recipes, Target
from zerostart.recipe.recording import trace_call
from zerostart.recipe.refusals import refusal
from zerostart.recipe.symbolic import SymbolicTensor, snapshot
from zerostart.upstream.types import Arguments, Keywords


def run_converter(
    converter: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    symbols: Mapping[str, SymbolicTensor],
    known_as: str | None = None,
) -> dict[str, SymbolicTensor]:
    """Run the converter on a state dict of symbolic tensors.

    Messages use the name ``known_as``, by default the function's. Raises ConversionError for a conversion
    that fails, is random, or depends on values of weights.
    """
    name = known_as or str(getattr(converter, "__name__", type(converter).__name__))
    # The copies share memory as the tensors do. A converter may write.
    state_dict: dict[str, torch.Tensor] = {**deepcopy(dict(symbols))}

    def run() -> dict[str, SymbolicTensor]:
        return _check_result(name, converter(state_dict))

    try:
        return trace_call(f"the converter {name}", run)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"the converter {name} failed{_describe_line(error)}: {type(error).__name__}: {error}"
            f"{_suggest_name(error, state_dict)}"
        ) from error


def _describe_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [at for at, frame in enumerate(frames) if frame.filename == __file__]
    called = frames[ours[-1] + 1 :] if ours else []
    return f" in line {called[0].lineno} of {called[0].filename}" if called else ""


def _suggest_name(error: Exception, names: Mapping[str, object]) -> str:
    if not isinstance(error, KeyError) or not error.args or not isinstance(error.args[0], str):
        return ""
    close = get_close_matches(error.args[0], list(names)[:5000], n=1, cutoff=0.6)
    return f"; the checkpoint has {close[0]!r}" if close else ""


def _check_result(name: str, result: object) -> dict[str, SymbolicTensor]:
    if not isinstance(result, Mapping):
        raise ConversionError(f"the converter {name} returned a {type(result).__name__}, not a mapping")
    strange = [key for key, value in result.items() if not isinstance(value, torch.Tensor)]
    if strange:
        kind = type(result[strange[0]]).__name__
        raise ConversionError(
            f"the converter {name} returned a {kind} for {strange[0]!r}, and {len(strange) - 1} more "
            "values that are not tensors; return tensors only"
        )
    return {str(key): snapshot(value) for key, value in result.items()}


def match_names(
    tensors: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
    ignored: tuple[str, ...] = (),
    dropped: tuple[str, ...] = (),
) -> Recipes:
    """Make recipes for a state dict with the model's names.

    The names ``dropped`` are reported as unexpected. Raises ConversionError as ``assemble_recipes`` does.
    """
    unexpected = [*(key for key in tensors if key not in targets), *dropped]
    return assemble_recipes(tensors, targets, unexpected, frozenset(tensors), (), ignored)


def _named_tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return parameters and buffers, and whether each is a buffer."""
    return {
        **{name: (t, False) for name, t in model.named_parameters(remove_duplicate=False)},
        **{name: (t, True) for name, t in model.named_buffers(remove_duplicate=False)},
    }


def assemble_recipes(
    tensors: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
    unexpected: list[str],
    converted: frozenset[str],
    conversions: tuple[object, ...],
    ignored: tuple[str, ...] = (),
) -> Recipes:
    """Match the result of a conversion with the expected tensors.

    ``converted`` has the names of tensors whose values may differ from the checkpoint's. Raises
    ConversionError for a cast that cannot be traced.
    """
    by_name: dict[str, Recipe] = {}
    missing: list[str] = []
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, target in targets.items():
        tensor = tensors.get(name)
        if tensor is None:
            missing.append(name)
        elif tuple(tensor.shape) != target.shape:
            mismatched[name] = (tuple(tensor.shape), target.shape)
        else:
            if target.as_stored and tensor.dtype.is_floating_point:
                target = replace(target, dtype=tensor.dtype)
            changed = name in converted and not _is_as_stored(name, tensor)
            by_name[name] = Recipe(target, cast(tensor.value, target.dtype).pieces, changed)
    coverage = Coverage(tuple(missing), tuple(unexpected), mismatched, ignored)
    return Recipes(by_name, coverage, conversions)


def _is_as_stored(name: str, tensor: SymbolicTensor) -> bool:
    if len(tensor.pieces) != 1:
        return False
    (piece,) = tensor.pieces
    source = piece.source[0]
    return source == name and geometry.whole(source, tuple(tensor.shape)) == (piece,)


@contextmanager
def one_thread(enabled: bool = True) -> Iterator[None]:
    """Disable torch's own threads in the block, since results depend on their number.

    torch splits long loops among its threads, and rounds differently at the ends of the parts and in sums.
    Threads that start inside the block are limited too; zerostart's threads already use all processors.
    """
    before = torch.get_num_threads()
    if not enabled or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


aten = torch.ops.aten
_ADVICE = "Do this conversion in converter=, and pass a module whose load_state_dict does not"


# Hooks, ``_load_from_state_dict`` and versions of a module may change names and tensors while it loads. They
# all run here, on the meta device. Each copy into a tensor is recorded; the last one becomes its recipe.
# Operations on the module's own tensors are added to the log of its construction.
def trace_loading(
    model: nn.Module,
    symbols: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
    versions: Mapping[str, Mapping[str, object]] | None,
    log: AbstractContextManager[object],
) -> Recipes:
    """Trace the module's own ``load_state_dict`` on ``symbols``.

    ``versions`` is the ``_metadata`` that torch saves. ``log`` records operations on the model's own tensors.
    Raises ConversionError for a model whose loading needs values, is random, or copies into tensors that are
    not registered.
    """
    before = {name: tensor.dtype for name, (tensor, _) in _named_tensors(model).items()}
    state: Any = OrderedDict(deepcopy(dict(symbols)))
    if versions is not None:
        # Copy them, since torch changes entries.
        state._metadata = OrderedDict((name, dict(entry)) for name, entry in versions.items())
    kind = type(model).__name__
    copies = _CopyRecorder(kind)
    keys: list[Any] = []
    watched: Any = model
    # This hook runs last: the module's own hooks may change the lists.
    handle = watched.register_load_state_dict_post_hook(lambda _, found: keys.append(deepcopy(found)))
    failure: RuntimeError | None = None

    assigned: dict[str, SymbolicTensor] = {}

    def load() -> Any:
        try:
            with log, copies:
                return model.load_state_dict(state, strict=False)
        finally:
            # Also after an error: the module must not keep symbolic tensors.
            assigned.update(_take_assigned(model))

    try:
        with _use_torch_defaults():
            returned = trace_call(f"the loading of {kind}", load)
        # A module with its own `load_state_dict` may never run the hook.
        keys = keys or [returned]
    except ConversionError:
        raise
    except RuntimeError as error:  # raised below, unless shapes differ
        failure = error
    except Exception as error:
        raise ConversionError(
            f"the loading of {kind} failed: {type(error).__name__}: {error}. {_ADVICE}"
        ) from error
    finally:
        handle.remove()
    filled = {**copies.by_name(model), **assigned}
    unfilled = [name for name in targets if name not in filled]
    mismatched = {
        name: (tuple(symbols[name].shape), targets[name].shape)
        for name in unfilled
        if failure is not None and name in symbols and tuple(symbols[name].shape) != targets[name].shape
    }
    if failure is not None and not mismatched:
        raise ConversionError(f"the loading of {kind} failed: {failure}. {_ADVICE}") from failure
    incompatible = keys[-1] if keys else None
    missing = dict.fromkeys(getattr(incompatible, "missing_keys", unfilled))
    unexpected = dict.fromkeys(getattr(incompatible, "unexpected_keys", ()))
    by_name = _make_recipes(model, filled, targets, before)
    return Recipes(by_name, Coverage(tuple(missing), tuple(unexpected), mismatched))


def _make_recipes(
    model: nn.Module,
    filled: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
    before: Mapping[str, torch.dtype],
) -> dict[str, Recipe]:
    # Loading may have changed the module's dtypes; keep them if the caller requested none.
    now = _named_tensors(model)
    # Compare identities: a tied tensor has several names, but is stored under only one of them.
    stored = {id(symbol) for name, symbol in filled.items() if _is_as_stored(name, symbol)}
    by_name: dict[str, Recipe] = {}
    for name, symbol in filled.items():
        tensor, buffer = now[name]
        expected = targets.get(name)
        dtype = expected.dtype if expected is not None and tensor.dtype.is_floating_point else tensor.dtype
        if expected is not None and expected.as_stored and symbol.dtype.is_floating_point:
            dtype = symbol.dtype if tensor.dtype == before.get(name) else tensor.dtype
        target = Target(name, tuple(symbol.shape), dtype, buffer)
        by_name[name] = Recipe(target, cast(symbol.value, dtype).pieces, id(symbol) not in stored)
    return by_name


class _CopyRecorder(TorchDispatchMode):
    """Dispatch mode that records copies into tensors of a module."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._memory: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(_is_constant(t) for t in tensors) and any(t.device.type == "meta" for t in tensors):
            args, kwargs = tree_map(
                lambda v: v.elements if _is_constant(v) else v, (args, kwargs)
            )  # for the log
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        symbolic = [t for t in tensors if isinstance(t, SymbolicTensor)]
        if func is aten.copy_.default and len(symbolic) == 1 and symbolic[0] is args[1]:
            # Copy now: the module may change the tensor later.
            symbol = symbolic[0]
            if symbol.shape != args[0].shape:
                symbol = symbol.expand(args[0].shape)
            self._copied.append((args[0], snapshot(symbol)))
            self._memory.add(_memory_key(args[0]))
            return args[0]
        if func is aten.copy_.default and not symbolic and _view_key(args[0]) == _view_key(args[1]):
            return args[0]  # a missing tensor keeps its value
        if not func.is_view and func is not aten.detach.default:
            own = [t for t in tensors if not isinstance(t, SymbolicTensor)]
            mixed = symbolic and any(t.device.type == "meta" for t in own)
            if mixed or any(_memory_key(t) in self._memory for t in own):
                raise refusal(
                    f"while loading, {self._kind} calls {func} on a tensor of the module, which has no "
                    f"values before the load. {_ADVICE}"
                )
        return func(*args, **(kwargs or {}))

    def by_name(self, model: nn.Module) -> dict[str, SymbolicTensor]:
        names: dict[tuple[Any, ...], list[str]] = {}
        for name, (tensor, _) in _named_tensors(model).items():
            if isinstance(tensor, SymbolicTensor):
                continue  # found by ``_take_assigned``
            names.setdefault(_view_key(tensor), []).append(name)
        symbols: dict[tuple[Any, ...], SymbolicTensor] = {}
        for target, symbol in self._copied:
            assert isinstance(symbol, SymbolicTensor), "snapshots of symbolic tensors are symbolic"
            # Remove it first, so that the order is that of the last copies.
            symbols.pop(_view_key(target), None)
            symbols[_view_key(target)] = symbol
        if symbols.keys() - names.keys():
            raise ConversionError(
                f"while loading, {self._kind} copies tensors of the checkpoint into a part of a "
                f"tensor, or into a tensor that is not registered. {_ADVICE}"
            )
        return {name: symbol for place, symbol in symbols.items() for name in names[place]}


@contextlib.contextmanager
def _use_torch_defaults() -> Iterator[None]:
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)


def _is_constant(value: object) -> bool:
    return isinstance(value, SymbolicTensor) and value.memory.is_constant


def _memory_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _view_key(tensor: torch.Tensor) -> tuple[object, ...]:
    return _memory_key(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _take_assigned(model: nn.Module) -> dict[str, SymbolicTensor]:
    symbols: dict[str, SymbolicTensor] = {}
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            slots: dict[str, object] = held
            for leaf, tensor in slots.items():
                if isinstance(tensor, SymbolicTensor):
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    own = held is module._parameters
                    slots[leaf] = nn.Parameter(empty, tensor.requires_grad) if own else empty
                    symbols[f"{prefix}.{leaf}" if prefix else leaf] = tensor.copied()
    return symbols
