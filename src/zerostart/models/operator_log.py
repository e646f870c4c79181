"""Log operators on tensors without data, and replay them to compute values.

Models are built and initialised on meta, where tensors take no memory. If the checkpoint lacks a tensor (a
rotary table, a mask, a missing head), only the operators that its value depends on are run. Element-wise
initialisers run in chunks, so that no whole parameter has to exist.
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
from zerostart.upstream.torch.tensors import intercept_truncated_normal
from zerostart.upstream.types import Arguments, Keywords


@dataclass(frozen=True)
class Op:
    """One operator call."""

    #: An operator, or a Python function that changes its first argument (see ``opaque``).
    func: Any
    #: Arguments as they were before the call: copies of real tensors, views of meta tensors.
    args: Arguments
    kwargs: Keywords
    #: Result of the call; its tensors are on meta.
    result: Any

    @functools.cached_property
    def writes(self) -> list[torch.Tensor]:
        """Meta tensors that the call made or changed."""
        tensors = _meta_tensors(self.result)
        if self.opaque:
            return [*tensors, self.args[0]]
        for place in _written_arguments(self.func):
            tensors += _meta_tensors(self.args[place : place + 1])
        return tensors

    @property
    def opaque(self) -> bool:
        """True for a Python function that changes its first argument."""
        return not isinstance(self.func, torch._ops.OpOverload)

    @property
    def random(self) -> bool:
        """True if the call draws random numbers."""
        return self.opaque or torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def overwritten(self) -> int | None:
        """Key of the storage that the call overwrites as a whole, or None."""
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
        """True if the result is a view of an argument."""
        results = _tensors(self.result)
        if not results or _written_arguments(self.func):
            return False
        bases = {storage_key(t) for t in self.reads}
        return all(_is_meta(t) and storage_key(t) in bases for t in results)


aten = torch.ops.aten
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a function mode sees this getter
_FILLING = {aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default}
_OVERWRITING = {*_FILLING, aten.fill_.Tensor, aten.copy_.default}


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[int, ...]:
    return tuple(
        place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in a value, a list or a tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _meta_tensors(value: object) -> list[torch.Tensor]:
    return [t for t in _tensors(value) if t.device.type == "meta"]


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _snapshot(value: Any) -> Any:
    """Copy arguments or a result: real tensors with their values, meta tensors as views.

    It runs for every logged operator, where torch's general tree walk would take most of the time.
    """
    if isinstance(value, torch.Tensor):
        return value.detach() if _is_meta(value) else value.detach().clone()
    if isinstance(value, dict):
        return {name: _snapshot(item) for name, item in value.items()}
    return type(value)(map(_snapshot, value)) if type(value) in (list, tuple) else value


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


class _PythonVisibility(TorchFunctionMode):
    """Mode in which Python code runs as on a real device, and is logged.

    ``torch.tensor([...])`` keeps its numbers: it is made on the CPU and then moved. ``is_meta`` is False,
    since parts of ``torch.nn.init`` skip meta tensors.
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
    """A reentrant context that logs operators on meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> OperatorLog:
        stack = contextlib.ExitStack()
        # This initialiser loops in Python over values: log it as one step.
        stack.enter_context(intercept_truncated_normal(self._log_function))
        stack.enter_context(_PythonVisibility())
        self._entered.append(stack)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def _log_function(
        self, function: Callable[..., object], tensor: torch.Tensor, *args: object, **kwargs: object
    ) -> Any:
        if tensor.device.type != "meta":
            return function(tensor, *args, **kwargs)
        self.ops.append(Op(function, (tensor, *args), kwargs, None))
        return tensor

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _FILLING and _is_meta(args[0]):
            # The call itself changes nothing on meta, and takes most of the time of initialisers.
            with torch._C.DisableTorchFunction():
                kept = _snapshot(args)
                self.ops.append(Op(func, kept, kwargs, kept[0]))
            return args[0]
        if self._asks_values(func, args, kwargs):
            with torch._C.DisableTorchFunction():
                return func(*self.values([args[0]], torch.device("cpu")), *args[1:], **kwargs)
        arguments = (args, kwargs)
        # The log's own code is not part of the construction, so function modes must not see it.
        with torch._C.DisableTorchFunction():
            changing = bool(_written_arguments(func)) and bool(_meta_tensors((args, *kwargs.values())))
            if changing:
                # Copy before the call, which changes these arguments.
                arguments = _snapshot(arguments)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            op = Op(func, arguments[0], arguments[1], result)
            # Views need no step: `_Replay.real` makes them from the base.
            if op.writes and not op.is_view:
                kept_args, kept_kwargs = arguments if changing else _snapshot(arguments)
                self.ops.append(Op(func, kept_args, kept_kwargs, _snapshot(result)))
        return result

    def _asks_values(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> bool:
        """Return True if the call needs a value that depends on no random call."""
        to_host = func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        asks = to_host or func is aten._local_scalar_dense.default
        return asks and _is_meta(args[0]) and not self.draws(args[0])

    def values(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        states: Mapping[int, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Compute the values of meta tensors by running the calls that they depend on.

        ``states`` maps the position of a random call to the state of torch's generator before it. Raises
        BuildError for a tensor that no logged call makes.
        """
        steps, settled = self._find_calls(tensors)
        replay = _Replay(device, settled)
        for at, op in steps:
            # Start each draw in the state that it has in the unsharded model.
            if states is not None and at in states:
                torch.set_rng_state(states[at])
            replay.run(op)
        return [replay.real(t) for t in tensors]

    def draws(self, tensor: torch.Tensor) -> list[int]:
        """Return positions of the random calls that a tensor depends on."""
        return [at for at, op in self._find_calls([tensor])[0] if op.random]

    def _find_calls(self, tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, Op]], dict[int, int]]:
        needed = {storage_key(t) for t in tensors}
        # Size by key of storages whose earlier contents do not matter, since a later step overwrites them.
        settled: dict[int, int] = {}
        steps: list[tuple[int, Op]] = []
        # Go backwards, and take each call that writes a storage that is still needed.
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
                del settled[key]  # read before it was overwritten, so its earlier contents matter
        steps.reverse()
        return steps, settled

    def writers(self, tensor: torch.Tensor) -> Iterator[tuple[int, Op]]:
        """Return the calls that wrote a tensor's storage, with positions."""
        key = storage_key(tensor)
        return ((at, op) for at, op in enumerate(self.ops) if any(storage_key(t) == key for t in op.writes))


class _Replay:
    """A run of logged calls on real storages."""

    def __init__(self, device: torch.device, sizes: Mapping[int, int]) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        for key, nbytes in sizes.items():  # storages that are overwritten before they are read
            self._storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the real tensor for a meta tensor."""
        storage = self._storages.get(storage_key(tensor))
        if storage is None:
            raise BuildError(
                f"a tensor of shape {tuple(tensor.shape)} has no known value: it was made before the "
                "construction of the model began. Pass a callable that builds the whole model"
            )
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def run(self, op: Op) -> None:
        """Run one call on real tensors."""
        args, kwargs = tree_map(self._get_argument, (op.args, op.kwargs))
        result = op.func(*args, **kwargs)
        if op.opaque:
            return
        for meta, made in zip(tree_leaves(op.result), tree_leaves(result), strict=True):
            if _is_meta(meta):
                self._storages[storage_key(meta)] = made.untyped_storage()

    def _get_argument(self, value: Any) -> object:
        if _is_meta(value):
            return self.real(value)
        if isinstance(value, torch.device):
            return self._device
        return value
