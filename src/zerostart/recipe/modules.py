"""What a module's own ``load_state_dict`` makes of a checkpoint, recorded on symbolic tensors.

A module may change names and tensors on their way to it: with hooks, with a ``_load_from_state_dict`` of its
own, by what it reads of versions. All of it runs here as it would in torch, on the module on meta: which
tensor is copied into which is noted, and of several into one the last stays. What the module computes out of
its own tensors is logged with its construction.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zerostart.errors import ConversionError
from zerostart.recipe.recording import recorded
from zerostart.recipe.refusals import refusal
from zerostart.recipe.stored import copies_of
from zerostart.recipe.symbolic import SymbolicTensor, settled

aten = torch.ops.aten
_MISMATCH = re.compile(
    r"size mismatch for (.+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[([\d, ]*)\]\)\."
)
_KEYS = re.compile(r"(?:Missing|Unexpected) key\(s\) in state_dict: ")
_REMEDY = "Pass a converter that makes the state dict the module's own, and build the module without it"


@dataclass(frozen=True)
class Loaded:
    """Tensors by the names of the parameters and buffers that they fill, and what is left over.

    ``mismatched`` maps a name to (shape in the checkpoint, shape in the model).
    """

    tensors: dict[str, SymbolicTensor]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


def load_module(
    model: nn.Module,
    tensors: Mapping[str, SymbolicTensor],
    targets: Collection[str],
    versions: Mapping[str, Mapping[str, Any]] | None,
    log: AbstractContextManager[object],
) -> Loaded:
    """Run ``model.load_state_dict`` on ``tensors``; ``versions`` is what torch saves as ``_metadata``.

    ``targets`` are the names of the model's state dict. What the model, on meta, does to its own tensors
    happens inside ``log``. Raises ConversionError for a model whose loading needs values, is random, or keeps
    tensors elsewhere.
    """
    state: Any = OrderedDict(copies_of(tensors))
    if versions is not None:
        state._metadata = OrderedDict((name, dict(entry)) for name, entry in versions.items())
    kind = type(model).__name__
    copies = _Copies(kind)
    keys: list[Any] = []
    watched: Any = model
    handle = watched.register_load_state_dict_post_hook(lambda _, found: keys.append(deepcopy(found)))
    errors = ""

    assigned: dict[str, SymbolicTensor] = {}

    def load() -> Any:
        try:
            with log, copies:
                return model.load_state_dict(state, strict=False)
        finally:
            assigned.update(_assigned(model))

    try:
        with _as_torch_does():
            returned = recorded(f"the loading of {kind}", load)
        keys = keys or [returned]
    except ConversionError:
        raise
    except RuntimeError as error:
        errors = str(error)
    except Exception as error:
        raise ConversionError(
            f"the loading of {kind} failed: {type(error).__name__}: {error}. {_REMEDY}"
        ) from error
    finally:
        handle.remove()
    filled = {**copies.by_name(model), **assigned}
    missing, unexpected = _left(keys, [name for name in targets if name not in filled])
    return Loaded(filled, missing, unexpected, _mismatched(errors, kind))


class _Copies(TorchDispatchMode):
    """Notes which symbolic tensor is copied into which tensor of a module; all else happens."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a copy; refuse what would need the values that were to be copied."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(_is_constant(t) for t in given) and any(t.device.type == "meta" for t in given):
            args, kwargs = tree_map(_with_elements, (args, kwargs))  # for the log
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        symbolic = [t for t in given if isinstance(t, SymbolicTensor)]
        if func is aten.copy_.default and len(symbolic) == 1 and symbolic[0] is args[1]:
            # As it is now: the module may go on to change what it took from the checkpoint.
            symbol = symbolic[0]
            if symbol.shape != args[0].shape:
                symbol = symbol.expand(args[0].shape)
            self._made.append((args[0], settled(symbol)))
            self._memory.add(_memory(args[0]))
            return args[0]
        if func is aten.copy_.default and not symbolic and _place(args[0]) == _place(args[1]):
            return args[0]  # what is missing keeps the value that it has
        if not func.is_view and func is not aten.detach.default:
            own = [t for t in given if not isinstance(t, SymbolicTensor)]
            mixed = symbolic and any(t.device.type == "meta" for t in own)
            if mixed or any(_memory(t) in self._memory for t in own):
                raise refusal(
                    f"the loading of {self._kind} calls {func} on a tensor of the module, whose values are "
                    f"not there before the load. {_REMEDY}"
                )
        return func(*args, **(kwargs or {}))

    def by_name(self, model: nn.Module) -> dict[str, SymbolicTensor]:
        """What each parameter and buffer gets: of several copies the last, and in the order of these."""
        names: dict[tuple[Any, ...], list[str]] = {}
        for name, tensor in _names(model).items():
            if isinstance(tensor, SymbolicTensor):
                continue  # assigned, and not copied: see ``_assigned``
            names.setdefault(_place(tensor), []).append(name)
        made: dict[tuple[Any, ...], SymbolicTensor] = {}
        for target, symbol in self._made:
            assert isinstance(symbol, SymbolicTensor), "what is made of a symbolic tensor is one"
            made.pop(_place(target), None)
            made[_place(target)] = symbol
        if made.keys() - names.keys():
            raise ConversionError(
                f"the loading of {self._kind} copies tensors of the checkpoint into a part of a tensor, or "
                f"into one that is registered nowhere. {_REMEDY}"
            )
        return {name: symbol for place, symbol in made.items() for name in names[place]}


@contextlib.contextmanager
def _as_torch_does() -> Iterator[None]:
    """Inside, parameters are copied and not swapped."""
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)


def _is_constant(value: Any) -> bool:
    return isinstance(value, SymbolicTensor) and value.memory.is_constant


def _with_elements(value: Any) -> Any:
    return value.elements if _is_constant(value) else value


def _memory(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which elements of which memory a tensor is; equal for two that are the same."""
    return _memory(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied names included."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _assigned(model: nn.Module) -> dict[str, SymbolicTensor]:
    """Tensors of the checkpoint that the module has taken as its own; it gets empty ones for them."""
    found: dict[str, SymbolicTensor] = {}
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            slots: dict[str, Any] = held
            for leaf, tensor in slots.items():
                if isinstance(tensor, SymbolicTensor):
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    own = held is module._parameters
                    slots[leaf] = nn.Parameter(empty, tensor.requires_grad) if own else empty
                    found[f"{prefix}.{leaf}" if prefix else leaf] = tensor.copied()
    return found


def _left(keys: list[Any], unfilled: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Missing and unexpected names as torch reports them; a method that reports none leaves them to us."""
    found = keys[-1] if keys else None
    missing = getattr(found, "missing_keys", None)
    unexpected = getattr(found, "unexpected_keys", None)
    if missing is None or unexpected is None:
        return tuple(unfilled), ()
    return tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(unexpected))


def _mismatched(errors: str, kind: str) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes that differ, out of the message of ``load_state_dict``; it has no other form for them."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for line in errors.split("\n\t")[1:]:
        match = _MISMATCH.match(line)
        if match is not None:
            have, want = (tuple(int(n) for n in match[i].split(",") if n.strip()) for i in (2, 3))
            found[match[1]] = (have, want)
        elif not _KEYS.match(line):
            raise ConversionError(f"the loading of {kind} failed: {line}")
    if errors and "\n\t" not in errors:
        raise ConversionError(f"the loading of {kind} failed: {errors}. {_REMEDY}")
    return found
