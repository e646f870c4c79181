"""Apply edits of FSDP2's sharded parameters between the load and the first forward.

A view that cuts through shards is a copy, so DTensor loses writes to it. On CPUs DTensor also draws the same
random numbers for the shard of each rank. Such functions run on the whole parameter, as in one process; then
each rank takes its share of rank 0's result.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

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
from zerostart.upstream.torch.tensors import (
    edited_argument,
    intercept_functions,
    is_edit,
    overloads,
    shares_storage,
)
from zerostart.upstream.types import Arguments, Keywords

#: Functions that draw random numbers for a new tensor.
_DRAWING = re.compile(
    "(feature_)?(alpha_)?dropout([123]d)?|bernoulli|gumbel_softmax|multinomial|normal|poisson"
    "|rand(int|n)?_like|rrelu"
)
#: Attributes of views of parameters, and of new tensors derived from parameters.
_PART, _DERIVED = "_zerostart_part", "_zerostart_derived"
_ASSIGNMENTS = ("fill_", "zero_", "copy_", "zeros_", "ones_", "constant_")
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Part:
    """A view of ``base`` that ``take`` repeats on any tensor of its shape.

    ``seen`` is the number of the last edit when it was made.
    """

    base: DTensor
    take: Callable[[torch.Tensor], torch.Tensor]
    seen: int = 0

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copies of a view are no views.
        return type(None), ()


@dataclass(frozen=True)
class _PartOperation:
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
        """Run the function on ``target``, with the other DTensors converted."""

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
        """Return for each result of the function if it is a view of the target."""
        if self.name.startswith("__") and self.name not in ("__get__", "__getitem__"):
            return []
        target = self.part.take(_on_meta(self.part.base))
        try:
            results = tree_leaves(self.run_on(target, _on_meta))
        except (RuntimeError, TypeError, IndexError):
            return []  # such as an index by values, which copies
        return [isinstance(r, torch.Tensor) and r.is_meta and shares_storage(r, target) for r in results]


#: Models that have not run, and the number of changes of this set.
_waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_changes = 0
#: Attribute of a parameter: number of changes so far, and True if a waiting model had it then.
_WAITS = "_zerostart_waits"
_edits = itertools.count(1)
_last_edit = 0


def keep_edits(model: nn.Module) -> None:
    """Apply edits of parameters, or of their parts, to the shards until ``model`` runs."""
    global _changes
    _waiting.add(model)
    _changes += 1
    intercept_functions(_run)


def expire_views() -> None:
    """Make each view read its parameter again, since shards may have changed."""
    global _last_edit
    _last_edit = next(_edits)


def _run(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Run a torch function that has a DTensor among its arguments."""
    global _changes
    for model in list(filter(has_begun, _waiting)):
        _waiting.discard(model)
        _changes += 1
    if not _waiting:
        intercept_functions(None)
        return function(*args, **kwargs)
    target = edited_argument(args, kwargs)
    if function == _SET_DATA and isinstance(target, nn.Parameter) and _part_of(target) is not None:
        if (args[1].dtype, args[1].shape) != (target.dtype, target.shape):
            _refuse(target, "its data keep their dtype and shape (a load has dtype=)")
        with torch.no_grad():  # over the values: FSDP2 keeps the memory of its shard
            return _run(torch.Tensor.copy_, args, {})
    name = str(getattr(function, "__name__", ""))
    if isinstance(target, list | tuple) and is_edit(name, kwargs):
        for one in target:
            if (part := _part_of(one)) is not None and not _shares_shard(one, part):
                _refuse(part.base, f"{name} of parts would be lost")
    out = kwargs.get("out")
    if isinstance(out, DTensor):
        result = function(*args, **{key: value for key, value in kwargs.items() if key != "out"})
        return _run(torch.Tensor.copy_, (out, result), {})
    part = _part_of(target)
    if part is None or target is None:
        return function(*tree_map(_current, args), **tree_map(_current, kwargs))
    call = _PartOperation(function, args, kwargs, target, part)
    if is_edit(name, kwargs):
        if not call.is_exact_on_shards:
            return _edit(call)
        result = function(*tree_map(_current, args), **tree_map(_current, kwargs))
        expire_views()
        return result
    if _DRAWING.fullmatch(name):
        return _share(part.base, _result_on_whole(call))
    views = call.views()
    try:
        result = function(*tree_map(_current, args), **tree_map(_current, kwargs))
    except RuntimeError:
        if not any(views):
            raise
        # DTensor does not take such views of shards.
        result = tree_map(functools.partial(_replicated, part.base), _result_on_whole(call))
    for number, (leaf, is_view) in enumerate(itertools.zip_longest(tree_leaves(result), views)):
        if is_view and isinstance(leaf, DTensor) and leaf is not target:
            setattr(leaf, _PART, _Part(part.base, functools.partial(call.take, number), _last_edit))
        elif isinstance(leaf, DTensor) and leaf is not target:
            setattr(leaf, _DERIVED, True)
    return result


def _edit(call: _PartOperation) -> Any:
    """Run a function that writes to a part on the whole tensor; collective."""
    base, target = call.part.base, call.target
    with torch.no_grad():
        whole = _whole(base)
        call.run_on(call.part.take(whole), _whole)
        base._local_tensor.copy_(_share(base, whole)._local_tensor)
        expire_views()
        if not _shares_shard(target, call.part):
            target._local_tensor.copy_(call.part.take(whole))  # type: ignore[attr-defined]
    return None if call.name == "__setitem__" else target


def _result_on_whole(call: _PartOperation) -> Any:
    return call.run_on(call.part.take(_whole(call.part.base)), _whole)


def _share(base: DTensor, whole: torch.Tensor) -> DTensor:
    """Return rank 0's ``whole``, sharded like ``base``; collective."""
    mesh = base.device_mesh
    if mesh.size() != dist.get_world_size():
        _refuse(base, "tensor or expert parallelism cuts it, so that ranks would not write the same")
    whole = whole.detach().contiguous()
    dist.broadcast(whole, 0)
    return distribute_tensor(whole, mesh, base.placements, src_data_rank=None)


def _refuse(base: torch.Tensor, why: str) -> NoReturn:
    named = itertools.chain.from_iterable(model.named_parameters() for model in _waiting)
    name = plain_name(next((name for name, parameter in named if parameter is base), "a parameter"))
    raise EngineError(
        f"{name} is sharded by FSDP2, and {why}: change it inside "
        f"`with zerostart.gathered(model, {name!r}, modifier_rank=0)`"
    )


def _part_of(tensor: object) -> _Part | None:
    """Return ``tensor`` as a part of a waiting model's parameter, None for others."""
    if not isinstance(tensor, DTensor):
        return None
    part: _Part = getattr(tensor, _PART, None) or _Part(tensor, lambda whole: whole)
    sharded = any(isinstance(placement, ShardPlacement) for placement in part.base.placements)
    if sharded and hasattr(part.base, _DERIVED):
        return part
    if not sharded or not isinstance(part.base, nn.Parameter):
        return None
    axes = dict(zip(part.base.device_mesh.mesh_dim_names or (), part.base.placements, strict=False))
    if {"expert", "shard"} <= axes.keys() and axes[
        "shard"
    ].is_replicate():  # an adapter's, whose local tensor is its own
        return None
    changes, waits = getattr(part.base, _WAITS, (None, False))
    if changes != _changes:
        waits = any(parameter is part.base for model in _waiting for parameter in model.parameters())
        setattr(part.base, _WAITS, (_changes, waits))
    return part if waits else None


def _current(value: Any) -> Any:
    """Return a part again if an edit has followed it."""
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
