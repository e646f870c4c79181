"""Edits of parameters that FSDP2 has sharded, between the load and the first forward.

A view that cuts through shards is a copy, so DTensor loses what is written there. And on CPUs it draws the
same random numbers for the shard of each rank. Such functions run on the whole parameter, as in one process;
then each rank takes its share of rank 0's result.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.utils._pytree import tree_leaves, tree_map

from zerostart.engines.shard import plain_name
from zerostart.errors import EngineError
from zerostart.upstream.guard import Function
from zerostart.upstream.torch.fsdp2 import has_begun, whole_tensor
from zerostart.upstream.torch.tensors import intercept_functions, is_edit, overloads, shares_storage
from zerostart.upstream.types import Arguments, Keywords

#: Functions that draw random numbers for a new tensor.
_DRAWING = ("bernoulli", "dropout", "normal", "rand_like", "randint_like", "randn_like")
#: Attribute of a view that is not a sharded tensor by itself.
_PART = "_zerostart_part"
_ASSIGNMENTS = ("fill_", "zero_", "copy_", "zeros_", "ones_", "constant_")
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Part:
    """A view of ``base``, which ``take`` repeats on any tensor of its shape, after ``seen`` edits."""

    base: DTensor
    take: Callable[[torch.Tensor], torch.Tensor]
    seen: int = 0

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copies of a view are no views.
        return type(None), ()


@dataclass(frozen=True)
class _Call:
    """A torch function whose first argument ``target`` is a part of a sharded tensor."""

    function: Function
    args: Arguments
    kwargs: Keywords
    target: torch.Tensor
    part: _Part

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", ""))

    @property
    def is_exact_on_shards(self) -> bool:
        values = [v for v in tree_leaves((self.args, self.kwargs)) if isinstance(v, torch.Tensor)]
        if any(value.dim() and not isinstance(value, DTensor) for value in values):
            return False
        pointwise = any(torch.Tag.pointwise in each.tags for each in overloads(self.name))
        return _shares_shard(self.target, self.part) and (pointwise or self.name in _ASSIGNMENTS)

    def run_on(self, target: torch.Tensor, convert: Callable[[DTensor], torch.Tensor]) -> Any:
        """Run the function on ``target``, and what ``convert`` makes of the other DTensors."""

        def replace(value: Any) -> Any:
            if value is self.target:
                return target
            return convert(value) if isinstance(value, DTensor) else value

        return self.function(*tree_map(replace, self.args), **tree_map(replace, self.kwargs))

    def take(self, number: int, base: torch.Tensor) -> torch.Tensor:
        """Return result ``number`` of the function on the same part of another ``base``."""
        leaf: torch.Tensor = tree_leaves(self.run_on(self.part.take(base), _whole))[number]
        return leaf

    def views(self) -> list[bool]:
        """Tell for each result of the function if it is a view of the target."""
        if self.name.startswith("__") and self.name not in ("__get__", "__getitem__"):
            return []
        target = self.part.take(_on_meta(self.part.base))
        try:
            results = tree_leaves(self.run_on(target, _on_meta))
        except (RuntimeError, TypeError, IndexError):
            return []  # such as an index by values, which copies
        return [isinstance(r, torch.Tensor) and r.is_meta and shares_storage(r, target) for r in results]


_waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_edits = itertools.count()
_last_edit = 0


def keep_edits(model: nn.Module) -> None:
    """Apply edits of the parameters of ``model``, or of parts of them, to its shards until it runs."""
    _waiting.add(model)
    intercept_functions(_run)


def _run(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Run a torch function that has a DTensor among its arguments."""
    if all(map(has_begun, _waiting)):
        intercept_functions(None)
        return function(*args, **kwargs)
    if function == _SET_DATA and not isinstance(args[1], DTensor):
        function = torch.Tensor.copy_  # over the values: FSDP2 keeps the memory of its shard
    out = kwargs.get("out")
    if isinstance(out, DTensor):
        result = function(*args, **{key: value for key, value in kwargs.items() if key != "out"})
        return _run(torch.Tensor.copy_, (out, result), {})
    target = next(itertools.chain(args, kwargs.values()), None)
    part = _part_of(target)
    if part is None or target is None:
        return function(*tree_map(_current, args), **tree_map(_current, kwargs))
    call = _Call(function, args, kwargs, target, part)
    if call.name in _DRAWING:
        return _share(part.base, _result_on_whole(call))
    if is_edit(call.name):
        return function(*args, **kwargs) if call.is_exact_on_shards else _edit(call)
    views = call.views()
    try:
        result = function(*tree_map(_current, args), **tree_map(_current, kwargs))
    except RuntimeError:
        if not any(views):
            raise
        # DTensor does not take such views of shards.
        result = tree_map(functools.partial(_replicated, part.base), _result_on_whole(call))
    for number, (leaf, is_view) in enumerate(zip(tree_leaves(result), views, strict=False)):
        if is_view and isinstance(leaf, DTensor) and leaf is not target:
            found = _Part(part.base, functools.partial(call.take, number), _last_edit)
            if leaf.shape != part.base.shape or not _shares_shard(leaf, found):
                setattr(leaf, _PART, found)
    return result


def _edit(call: _Call) -> Any:
    """Run a function that writes to a part on the whole tensor, and share out the result; collective."""
    global _last_edit
    base, target = call.part.base, call.target
    with torch.no_grad():
        whole = _whole(base)
        call.run_on(call.part.take(whole), _whole)
        base._local_tensor.copy_(_share(base, whole)._local_tensor)
        _last_edit = next(_edits) + 1
        if not _shares_shard(target, call.part):
            target._local_tensor.copy_(call.part.take(whole))  # type: ignore[attr-defined]
    return None if call.name == "__setitem__" else target


def _result_on_whole(call: _Call) -> Any:
    return call.run_on(call.part.take(_whole(call.part.base)), _whole)


def _share(base: DTensor, whole: torch.Tensor) -> DTensor:
    """Return rank 0's ``whole``, sharded like ``base``; collective."""
    mesh = base.device_mesh
    if mesh.size() != dist.get_world_size():
        named = itertools.chain.from_iterable(model.named_parameters() for model in _waiting)
        whose = (
            n
            for n, p in named
            if isinstance(p, DTensor) and shares_storage(p._local_tensor, base._local_tensor)
        )
        name = plain_name(next(whose, "a tensor"))
        raise EngineError(
            f"{name} is cut by tensor or expert parallelism, so a change of a part of it, or random values "
            "for it, would not be those of one process: change it inside "
            f"`with zerostart.gathered(model, {name!r}, modifier_rank=0)`"
        )
    whole = whole.detach().contiguous()
    dist.broadcast(whole, 0)
    return distribute_tensor(whole, mesh, base.placements, src_data_rank=None)


def _part_of(tensor: object) -> _Part | None:
    if not isinstance(tensor, DTensor):
        return None
    found: _Part | None = getattr(tensor, _PART, None)
    if found is None and any(isinstance(placement, ShardPlacement) for placement in tensor.placements):
        return _Part(tensor, lambda whole: whole)
    return found


def _current(value: Any) -> Any:
    """Return a copy of a part anew if an edit has come after it."""
    part = getattr(value, _PART, None) if isinstance(value, DTensor) else None
    if part is None or part.seen == _last_edit or _shares_shard(value, part):
        return value
    return _replicated(part.base, part.take(_whole(part.base)))


def _shares_shard(tensor: Any, part: _Part) -> bool:
    return shares_storage(tensor._local_tensor, part.base._local_tensor)


def _replicated(base: DTensor, whole: Any) -> Any:
    if not isinstance(whole, torch.Tensor):
        return whole
    mesh = base.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _whole(tensor: DTensor) -> torch.Tensor:
    return whole_tensor(_current(tensor))


def _on_meta(tensor: DTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
