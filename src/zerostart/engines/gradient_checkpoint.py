"""Gradient checkpointing: recompute a function's results in the backward.

Tensors anywhere in the arguments of a call (keywords, lists, tuples, dictionaries) become the inputs of the
checkpoint; other arguments are passed unchanged. Lists and dictionaries are copied for each run of the
function, with their contents before the first run. A cache that the function fills (``cache[i] = x``,
``index[0] += 1``) is therefore filled once for the caller, and the second run starts from the same contents
as the first.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from zerostart.engines.module_names import matching_modules
from zerostart.errors import ConfigError

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


def run_checkpointed(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], offload: bool
) -> Any:
    """Call ``function`` as a checkpoint; see ``zerostart.gradient_checkpoint``.

    Raises ConfigError for a non-empty cache of past tokens.
    """
    # Without gradients nothing is saved or computed again.
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _CheckpointedCall.of(function, args, kwargs)
    hooks = torch.autograd.graph.saved_tensors_hooks(_Saved, _Saved.value)
    with hooks if offload else contextlib.nullcontext():
        return torch_checkpoint.checkpoint(call.run, *call.tensors, use_reentrant=False)


class _Saved:
    """An input of a checkpoint; trained activations of a device are kept in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device, self._tensor, self._version = tensor.device, tensor, tensor._version
        # Inputs without gradients belong to the caller for all layers, and parameters to the model.
        parameter = isinstance(tensor, nn.Parameter)
        if tensor.device.type != "cpu" and tensor.requires_grad and not parameter:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            # On the computing stream: later writes to the tensor come after the copy.
            self._tensor.copy_(tensor.detach(), non_blocking=True)
            self._version = self._tensor._version

    def value(self) -> torch.Tensor:
        """Return the tensor on its device. Raises ConfigError if it was written to since."""
        if self._tensor._version != self._version:
            raise ConfigError(
                f"a tensor of shape {tuple(self._tensor.shape)} was an input of gradient checkpointing and "
                "was changed in place before the backward, which computes from it again; let the function "
                "write to a clone()"
            )
        return self._tensor.to(self._device, non_blocking=True)


class _SavedLast(torch.autograd.Function):
    """A node that saves a tensor, and is part of nothing that is computed."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty((0,), device="cpu")

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> object:
        raise AssertionError("nothing leads here")


def _recompute_first(results: list[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
    """Run the function again, to its end, before the backward of anything in it begins.

    An engine's hooks gather a module's parameters for its forward and release them after it. That must not
    happen during the backward of that very module, which needs them gathered, too. So a tensor is saved last
    of all, and requested before the first of the nodes that made the results.
    """
    # An input that is returned unchanged has a node from outside, whose backward comes after this one's.
    outside = {tensor.grad_fn for tensor in inputs} | {None}
    computed = [tensor for tensor in results if tensor.grad_fn not in outside]
    if not computed:
        return
    save: Any = _SavedLast.apply
    # No gradient ever flows to it. It keeps its node, which releases its saved tensor when the result is
    # freed (torch below 2.13).
    last = save(torch.zeros((), device="cpu", requires_grad=True), computed[0].detach())
    is_requested = False

    def begin(_: object) -> None:
        nonlocal is_requested
        is_requested = False

    def ask(_: object) -> None:
        nonlocal is_requested
        if not is_requested:
            is_requested = True
            _ = last.grad_fn.saved_tensors  # whose unpacking runs the function again

    # Once in each backward: a graph may be retained for several. Hooks of tensors run before those of nodes,
    # among them an engine's, which gathers parameters for a backward that the second run needs, too.
    register_multi_grad_hook(computed, begin, mode="any")
    for node in {tensor.grad_fn for tensor in computed}:
        assert node is not None, "left out above"
        node.register_prehook(ask)


@dataclass
class _CheckpointedCall:
    """A call taken apart: its argument ``leaves`` in the order of ``spec``, without tensors.

    ``tensors[i]`` belongs at ``leaves[places[i]]``; ``callers`` are the arguments as the caller has them.
    """

    function: Callable[..., object]
    callers: tuple[tuple[object, ...], Mapping[str, object]] | None
    leaves: list[object]
    spec: TreeSpec
    tensors: list[torch.Tensor]
    places: list[int]

    @classmethod
    def of(
        cls, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> _CheckpointedCall:
        callers = (args, dict(kwargs))
        leaves, spec = tree_flatten(callers, is_leaf=_is_cache)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[n] for n in places]
        leaves_without_tensors = [
            None if isinstance(leaf, torch.Tensor) else _without_past(leaf) for leaf in leaves
        ]
        return cls(function, callers, leaves_without_tensors, spec, tensors, places)

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments in new containers, with these tensors in their places."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def run(self, *tensors: torch.Tensor) -> object:
        args, kwargs = self.arguments(tensors)
        # The pytree opens plain containers. Containers of other classes are leaves, and are shared between
        # runs.
        whole = [
            leaf for leaf in self.leaves if isinstance(leaf, (dict, list))
        ]  # containers of other classes
        # Compared by identity afterwards: a second run must find the same contents.
        before = [_parts(leaf) for leaf in whole]
        result = self.function(*args, **kwargs)
        for leaf, parts in zip(whole, before, strict=True):
            _check_unchanged(leaf, parts)
        if self.callers is not None:  # the first run; later ones only compute for a backward
            _give_back(self.callers, (args, kwargs))
            self.callers = None  # not to be kept alive
        _recompute_first([leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)], tensors)
        return result


def _parts(container: dict[object, object] | list[object]) -> list[object]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _check_unchanged(container: dict[object, object] | list[object], before: list[object]) -> None:
    """Raise ConfigError if a function has changed a container that its second run shares."""
    if not _same_objects(_parts(container), before):
        raise ConfigError(
            f"a function under gradient checkpointing changed a {type(container).__name__} that it "
            "received, so its second run would see other contents; pass a list, a dict or a deque"
        )


def _is_cache(value: object) -> TypeGuard[Cache]:
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def _without_past(leaf: object) -> object:
    """None for a cache: nothing is generated while gradients are computed."""
    if not _is_cache(leaf):
        return leaf
    if _has_past(leaf):
        raise ConfigError(
            "a layer under gradient checkpointing received a cache that already has tokens, and its "
            "second run would add them again; pass use_cache=False, and no past_key_values"
        )
    return None


def _has_past(cache: Cache) -> bool:
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # of layers that count no tokens, such as Mamba's
        return bool(cache.has_previous_state())


def _give_back(own: Any, used: Any) -> object:
    """Copy changes of the containers ``used`` back to the caller's containers ``own``.

    Inner containers also remain the caller's. Returns the object for the place of ``used``: ``own`` if it can
    hold the contents, otherwise ``used`` itself.
    """
    if _is_cache(own):
        return own
    if own is used or type(own) is not type(used):
        return used
    if isinstance(own, MutableMapping):
        # Recursively first, so that the caller's inner containers remain the same objects.
        merged = {key: _give_back(own[key], value) if key in own else value for key, value in used.items()}
        if len(merged) != len(own) or any(own.get(key) is not value for key, value in merged.items()):
            own.clear()
            own.update(merged)
        return own
    if not isinstance(own, (MutableSequence, tuple)):
        return used
    items = [_give_back(own[n], value) if n < len(own) else value for n, value in enumerate(used)]
    if _same_objects(own, items):
        return own
    if isinstance(own, tuple):
        return used
    own.clear()  # a deque has no slices
    own.extend(items)
    return own


def _same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


class CheckpointedForward:
    """Replaces the ``forward`` of one module.

    Hooks remain outside: parameters that an engine gathers before a module's forward it also gathers for its
    backward, in which the forward runs again.
    """

    def __init__(self, module: nn.Module, offload: bool) -> None:
        functools.update_wrapper(self, module.forward)  # its signature, for whoever asks
        self.original = module.forward
        self.offload = offload

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The block's forward, as a checkpoint."""
        return run_checkpointed(self.original, args, kwargs, self.offload)


def checkpoint_blocks(
    model: nn.Module,
    blocks: Sequence[str | type[nn.Module]] | None = None,
    offload: bool = False,
    every: int = 1,
) -> tuple[str, ...]:
    """See ``zerostart.checkpoint_blocks``. Raises ConfigError where there is nothing to checkpoint."""
    if not all(isinstance(one, (str, type)) for one in blocks or ()):
        raise ConfigError(f"blocks={blocks!r} must be a list of classes or names, such as ['EncoderLayer']")
    if every < 1:
        raise ConfigError(f"every={every} must be 1 (each block) or more (every second, third, ... block)")
    blocks_by_name = _blocks(model, blocks)
    if not blocks_by_name:
        raise ConfigError(
            f"{type(model).__name__} does not say which modules are its blocks; pass a class, "
            "blocks=['EncoderLayer'], or names of modules, blocks=['encoder.layers.*']"
        )
    chosen = dict(list(blocks_by_name.items())[::every])
    for module in chosen.values():
        if isinstance(module.forward, CheckpointedForward):
            # Undone first: otherwise a checkpoint would run inside a checkpoint.
            module.forward = module.forward.original  # again, with other settings
        module.forward = CheckpointedForward(module, offload)
    return tuple(chosen)


def _blocks(model: nn.Module, entries: Sequence[str | type[nn.Module]] | None) -> dict[str, nn.Module]:
    """The blocks by name: no block inside another."""
    setting = None if entries is None else "blocks names"
    if entries is None:
        named = dict(model.named_modules())
        kinds = [kind for part in named.values() for kind in getattr(part, "_no_split_modules", None) or ()]
        entries = kinds or [f"{n}.*" for n, part in named.items() if isinstance(part, nn.ModuleList)]
    outermost: dict[str, nn.Module] = {}
    for name, module in matching_modules(model, entries, setting).items():
        # Outer modules come before inner ones, so looking back is enough.
        if name and not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = module
    return outermost
