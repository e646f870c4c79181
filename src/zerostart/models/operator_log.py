"""A log of what happened to tensors without data, and giving them their values afterwards.

A model is built, and initialised, on the meta device, where a tensor of any size costs nothing. The log
notes each operator. The value of a tensor that the checkpoint does not supply is then had by running just
the operators that lead to it, for real: a rotary table, a mask, a missing head. An initialiser that works
element by element is run in chunks, so that not even one whole parameter needs to exist.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zerostart.errors import BuildError
from zerostart.upstream.torch.tensors import truncated_normal_goes_to
from zerostart.upstream.types import Arguments, Keywords


@dataclass(frozen=True)
class Op:
    """One operator call."""

    #: An operator, or a Python function that changes its first argument (see ``opaque``).
    func: Any
    #: As they were before the call: real tensors as copies, meta ones as views.
    args: Arguments
    kwargs: Keywords
    #: Meta tensors that the call made, or anything else.
    result: Any

    @functools.cached_property
    def writes(self) -> list[torch.Tensor]:
        """Meta tensors that the call made or changed."""
        made = _meta_tensors(self.result)
        if self.opaque:
            return [*made, self.args[0]]
        for place in _written_arguments(self.func):
            made += _meta_tensors(self.args[place : place + 1])
        return made

    @property
    def opaque(self) -> bool:
        """Whether it is a Python function that changes its first argument, and no operator."""
        return not isinstance(self.func, torch._ops.OpOverload)

    @property
    def random(self) -> bool:
        """Whether the call moves the random generator on."""
        return self.opaque or torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def overwritten(self) -> int | None:
        """Key of the storage that the call fills whatever was there before, if it does so."""
        if not (self.opaque or self.func in _OVERWRITING):
            return None
        target: torch.Tensor = self.args[0]
        size = target.untyped_storage().nbytes()
        whole = target.is_contiguous() and target.numel() * target.itemsize == size
        return storage_key(target) if _is_meta(target) and whole else None

    @functools.cached_property
    def reads(self) -> list[torch.Tensor]:
        """Meta tensors among the arguments."""
        return _meta_tensors((self.args, *self.kwargs.values()))

    @property
    def is_view(self) -> bool:
        """Whether the result only looks at an argument's storage, and nothing is computed."""
        results = _tensors(self.result)
        if not results or _written_arguments(self.func):
            return False
        given = {storage_key(t) for t in self.reads}
        return all(_is_meta(t) and storage_key(t) in given for t in results)


aten = torch.ops.aten
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a getter, for a function mode
_OVERWRITING = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.copy_.default,
}


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[int, ...]:
    """Places of the arguments that an operator writes into."""
    return tuple(
        place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _tensors(value: object) -> list[torch.Tensor]:
    """Tensors among the arguments or results of an operator, which are in lists and tuples at most.

    Called for every operator of a model's construction, where a general walk would be most of the cost.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _meta_tensors(value: object) -> list[torch.Tensor]:
    return [t for t in _tensors(value) if t.device.type == "meta"]


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _snapshot(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if _is_meta(value) else value.detach().clone()


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage that ``tensor`` looks at."""
    key: int = tensor.untyped_storage()._cdata
    return key


class _Attention(TorchFunctionMode):
    """Makes Python code above the operators leave something to log.

    ``torch.tensor([...])`` keeps its numbers: made on the CPU, then moved where the log sees it. And a tensor
    says that it is not on meta, for some of ``torch.nn.init`` does nothing if it is.
    """

    def __torch_function__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func == _IS_META:
            return False
        constant = func in (torch.tensor, torch.as_tensor, torch.from_numpy) and kwargs.get("device") is None
        if constant and torch.get_default_device().type == "meta":
            on_host = {} if func is torch.from_numpy else {"device": "cpu"}
            value = func(*args, **kwargs | on_host)
            return value if value.device.type == "meta" else value.to("meta")
        return func(*args, **kwargs)


class OperatorLog(TorchDispatchMode):
    """Context that logs operators on meta tensors; may be entered several times."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> OperatorLog:
        stack = contextlib.ExitStack()
        # Python code that loops over values, which a meta tensor has none of: noted as one step, run when
        # replayed.
        stack.enter_context(truncated_normal_goes_to(self._opaque))
        stack.enter_context(_Attention())
        self._entered.append(stack)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def _opaque(
        self, function: Callable[..., object], tensor: torch.Tensor, *args: object, **kwargs: object
    ) -> Any:
        if tensor.device.type != "meta":
            return function(tensor, *args, **kwargs)
        self.ops.append(Op(function, (tensor, *args), kwargs, None))
        return tensor

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        """Run the operator on meta and note it, if a meta tensor comes out of it or is changed by it."""
        kwargs = kwargs or {}
        if self._asks_values(func, args, kwargs):
            with torch._C.DisableTorchFunction():
                return func(*self.values([args[0]], torch.device("cpu")), *args[1:], **kwargs)
        given = (args, kwargs)
        # What looks at a tensor in here is no part of the construction, and nothing for function modes.
        with torch._C.DisableTorchFunction():
            changing = bool(_written_arguments(func)) and bool(_meta_tensors((args, *kwargs.values())))
            if changing:
                # After it, an argument that is written would be what the call has made of it.
                given = tree_map(_snapshot, given)  # before the call
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            op = Op(func, given[0], given[1], result)
            # A view needs no step: its storage is that of its base, and `_Replay.real` makes the same view of
            # the real one.
            if op.writes and not op.is_view:
                kept_args, kept_kwargs = given if changing else tree_map(_snapshot, given)
                self.ops.append(Op(func, kept_args, kept_kwargs, tree_map(_snapshot, result)))
        return result

    def _asks_values(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> bool:
        """True for ``item()`` or ``tolist()`` of a meta tensor that no random call leads to."""
        to_host = func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        asks = to_host or func is aten._local_scalar_dense.default
        return asks and _is_meta(args[0]) and not self.draws(args[0])

    def values(
        self,
        wanted: Sequence[torch.Tensor],
        device: torch.device,
        states: Mapping[int, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The real values of meta tensors, by running what leads to them on ``device``.

        ``states`` has what torch's generator is to be before calls, by their places. Raises BuildError for a
        tensor that nothing in the log makes.
        """
        steps, settled = self._leading_to(wanted)
        replay = _Replay(device, settled)
        for at, op in steps:
            # The generator is put where it was in the unsharded model, just before the call that draws.
            if states is not None and at in states:
                torch.set_rng_state(states[at])
            replay.run(op)
        return [replay.real(t) for t in wanted]

    def draws(self, wanted: torch.Tensor) -> list[int]:
        """Places of the random calls that lead to a meta tensor."""
        return [at for at, op in self._leading_to([wanted])[0] if op.random]

    def _leading_to(self, wanted: Sequence[torch.Tensor]) -> tuple[list[tuple[int, Op]], dict[int, int]]:
        needed = {storage_key(t) for t in wanted}
        # Storages whose earlier values do not matter, since a later step overwrites them.
        settled: dict[int, int] = {}
        steps: list[tuple[int, Op]] = []
        # Backwards, from what is wanted to what made it: a call counts if it writes a storage that is still
        # needed.
        for at in reversed(range(len(self.ops))):
            op = self.ops[at]
            if not any(storage_key(t) in needed and storage_key(t) not in settled for t in op.writes):
                continue
            steps.append((at, op))
            overwritten = op.overwritten
            read = {storage_key(t) for t in op.reads} - {overwritten}
            needed |= read
            if overwritten is not None:
                settled[overwritten] = op.args[0].untyped_storage().nbytes()
            for key in read & settled.keys():
                del settled[key]  # looked at before it was overwritten: what it held then matters again
        steps.reverse()
        return steps, settled

    def writers(self, tensor: torch.Tensor) -> Iterator[tuple[int, Op]]:
        """The calls that made or changed the storage of ``tensor``, in order, with places in the log."""
        key = storage_key(tensor)
        return ((at, op) for at, op in enumerate(self.ops) if any(storage_key(t) == key for t in op.writes))


class _Replay:
    """Runs logged calls on real storages; a meta tensor stands for the same view of the real storage."""

    def __init__(self, device: torch.device, sizes: Mapping[int, int]) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        for key, nbytes in sizes.items():  # overwritten before they are read
            self._storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real tensor that ``tensor`` stands for."""
        storage = self._storages.get(storage_key(tensor))
        if storage is None:
            raise BuildError(
                f"a tensor of shape {tuple(tensor.shape)} has no known value: it was made before the "
                "construction of the model began. Pass a callable that builds the whole model"
            )
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def run(self, op: Op) -> None:
        """Run one call for real."""
        args, kwargs = tree_map(self._argument, (op.args, op.kwargs))
        result = op.func(*args, **kwargs)
        if op.opaque:
            return
        for meta, made in zip(tree_leaves(op.result), tree_leaves(result), strict=True):
            if _is_meta(meta):
                self._storages[storage_key(meta)] = made.untyped_storage()

    def _argument(self, value: Any) -> object:
        if _is_meta(value):
            return self.real(value)
        if isinstance(value, torch.device):
            return self._device
        return value
