"""Gradient checkpointing: what a function computes is made again in the backward, and not kept until then.

A call is taken apart first. Its tensors, wherever they stand in its arguments (by keyword, in lists, tuples
and dictionaries), become the inputs of the checkpoint; all else stays as it is, keywords under their names.
Lists and dictionaries are made anew for each run of the function, from what was in them before the first, so
that a cache that the function fills (``cache[i] = x``, ``index[0] += 1``) is filled once for the caller, and
the second run finds in it what the first has found.
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


def checkpointed(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], offload: bool
) -> Any:
    """What ``function(*args, **kwargs)`` gives; see ``zerostart.gradient_checkpoint``.

    Raises ConfigError for a cache of past tokens with something in it.
    """
    # Nothing is saved then, and so nothing to be computed again.
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call.of(function, args, kwargs)
    hooks = torch.autograd.graph.saved_tensors_hooks(_Saved, _Saved.value)
    with hooks if offload else contextlib.nullcontext():
        return torch_checkpoint.checkpoint(call.run, *call.tensors, use_reentrant=False)


class _Saved:
    """An input of a checkpoint: a trained activation of a device in host memory, all else where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device, self._tensor, self._version = tensor.device, tensor, tensor._version
        # What needs no gradient is the caller's, for all layers alike, and parameters are the model's.
        parameter = isinstance(tensor, nn.Parameter)
        if tensor.device.type != "cpu" and tensor.requires_grad and not parameter:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            # On the stream that computes: what is written to the tensor later comes after the copy.
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
    """Have the function run again, to its end, before the backward of anything in it begins.

    An engine's hooks gather a module's parameters for its forward and give them back after it. That must not
    come in between the backward of that very module, which has them gathered, too. So a tensor is saved last
    of all, and asked for before the first of the nodes that made the results.
    """
    # An input that is handed through has a node from outside, whose backward comes after this one's.
    outside = {tensor.grad_fn for tensor in inputs} | {None}
    made = [tensor for tensor in results if tensor.grad_fn not in outside]
    if not made:
        return
    save: Any = _SavedLast.apply
    # No gradient ever flows to it. It is kept for its node, which lets go of what it saved when the result
    # goes (torch below 2.13).
    last = save(torch.zeros((), device="cpu", requires_grad=True), made[0].detach())
    asked = False

    def begin(_: object) -> None:
        nonlocal asked
        asked = False

    def ask(_: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            _ = last.grad_fn.saved_tensors  # whose unpacking runs the function again

    # Once in each backward: a graph may be retained for several. Hooks of tensors come before those of nodes,
    # among which are an engine's, which gathers for a backward what running again needs, too.
    register_multi_grad_hook(made, begin, mode="any")
    for node in {tensor.grad_fn for tensor in made}:
        assert node is not None, "left out above"
        node.register_prehook(ask)


@dataclass
class _Call:
    """A call taken apart: the ``leaves`` of its arguments in the order of ``spec``, None in place of tensors.

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
    ) -> _Call:
        callers = (args, dict(kwargs))
        leaves, spec = tree_flatten(callers, is_leaf=_is_cache)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[n] for n in places]
        others = [None if isinstance(leaf, torch.Tensor) else _without_past(leaf) for leaf in leaves]
        return cls(function, callers, others, spec, tensors, places)

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments in new containers, with these tensors in their places."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def run(self, *tensors: torch.Tensor) -> object:
        args, kwargs = self.arguments(tensors)
        # The pytree takes plain containers apart; those of classes of their own are leaves, and stay shared.
        whole = [leaf for leaf in self.leaves if isinstance(leaf, (dict, list))]  # of classes of their own
        # To be compared by identity afterwards: what a second run would find changed is an error.
        before = [_parts(leaf) for leaf in whole]
        made = self.function(*args, **kwargs)
        for leaf, parts in zip(whole, before, strict=True):
            _check_unchanged(leaf, parts)
        if self.callers is not None:  # the first run; later ones compute for a backward alone
            _give_back(self.callers, (args, kwargs))
            self.callers = None  # not to be kept alive
        _recompute_first([leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)], tensors)
        return made


def _parts(container: dict[object, object] | list[object]) -> list[object]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _check_unchanged(container: dict[object, object] | list[object], before: list[object]) -> None:
    """Raise ConfigError where a function has changed what is not made anew for its second run."""
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
    """Give the caller's containers ``own`` what the function has made of their copies ``used``.

    Containers inside of containers stay the caller's, too. Returns what stands for ``used`` then: ``own``
    where it can hold it, else ``used`` itself.
    """
    if _is_cache(own):
        return own
    if own is used or type(own) is not type(used):
        return used
    if isinstance(own, MutableMapping):
        # Recursively first, so that inner containers of the caller stay the ones that he holds.
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


def _same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


class CheckpointedForward:
    """Stands for the ``forward`` of one module.

    Hooks stay outside: what an engine gathers before a module's forward it gathers for its backward as well,
    in which the forward runs again.
    """

    def __init__(self, module: nn.Module, offload: bool) -> None:
        functools.update_wrapper(self, module.forward)  # its signature, for whoever asks
        self.original = module.forward
        self.offload = offload

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The block's forward, as a checkpoint."""
        return checkpointed(self.original, args, kwargs, self.offload)


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
    found = _blocks(model, blocks)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} does not say which modules are its blocks; pass a class, "
            "blocks=['EncoderLayer'], or names of modules, blocks=['encoder.layers.*']"
        )
    chosen = dict(list(found.items())[::every])
    for module in chosen.values():
        if isinstance(module.forward, CheckpointedForward):
            # Undone first: else a checkpoint would run inside a checkpoint.
            module.forward = module.forward.original  # again, with other settings
        module.forward = CheckpointedForward(module, offload)
    return tuple(chosen)


def _blocks(model: nn.Module, wanted: Sequence[str | type[nn.Module]] | None) -> dict[str, nn.Module]:
    """The blocks by name: no block inside another."""
    setting = None if wanted is None else "blocks names"
    if wanted is None:
        named = dict(model.named_modules())
        kinds = [kind for part in named.values() for kind in getattr(part, "_no_split_modules", None) or ()]
        wanted = kinds or [f"{n}.*" for n, part in named.items() if isinstance(part, nn.ModuleList)]
    found: dict[str, nn.Module] = {}
    for name, module in matching_modules(model, wanted, setting).items():
        # Outer modules come before inner ones, so looking back is enough.
        if name and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found
