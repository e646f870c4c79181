"""Local tensors of DTensors, initialisers on meta, and wrapper tensors in torch."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.guard import Use, find_misfits, need
from zerostart.upstream.patches import patch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TRUNCATED_NORMAL = Use(
    "torch.nn.init",
    "_no_grad_trunc_normal_(tensor, mean, std, a, b, *, generator), trunc_normal_",
    "does nothing on meta, and is logged as it is called",
)
#: In-place methods that change no element.
_METADATA = ("requires_grad_", "share_memory_", "detach_", "rename_")
_SPEC = Use("torch.distributed.tensor:DTensor", "_spec", "a DTensor with the sharding of another")
_FUNCTIONS = Use(
    "torch.distributed.tensor:DTensor",
    "__torch_function__, ._local_tensor",
    "edits of parts reach the shards",
)
_GROUPS = Use(
    "torch.distributed.fsdp:FSDPModule",
    "_apply",
    "FSDP2's parameter groups read the modules' tensors again",
)
_USERS = Use(
    "torch._C",
    "_storage_Use_Count",
    "whether a view exists of a buffer that is about to be rearranged",
)
_SAVING = Use(
    "torch._C._autograd",
    "_top_saved_tensors_default_hooks",
    "experts with adapters do not replace the caller's hooks on saved tensors",
)
_TABLES = Use(
    "torch.nn:Module",
    "._parameters, ._buffers, ._non_persistent_buffers_set",
    "the tensors of a module are replaced in its own tables",
)


def intercept_functions(handler: Callable[..., Any] | None) -> None:
    """Run torch functions of DTensors by ``handler(function, args, kwargs)``; None ends it."""
    need(_FUNCTIONS)
    from torch.distributed.tensor import DTensor

    def run(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return handler(function, args, kwargs or {})  # type: ignore[misc]

    kind: Any = DTensor
    kind.__torch_function__ = torch._C._disabled_torch_function_impl if handler is None else classmethod(run)


def bypass_interception() -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which torch functions of DTensors run directly."""
    return torch._C.DisableTorchFunctionSubclass()


def edited_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that a torch function or initialiser would change."""
    return args[0] if args else kwargs.get("input", kwargs.get("tensor"))


def is_edit(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the torch function ``name`` changes its first argument's elements."""
    inner = name.removeprefix("__i")
    augmented = inner != name and inner not in ("nt__", "ndex__", "nvert__")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _METADATA
    return augmented or in_place or name == "__setitem__" or bool(kwargs.get("inplace"))


@functools.cache
def overloads(name: str) -> list[Any]:
    """Return the operators of torch that a function of this name may run."""
    packet: Any = getattr(torch.ops.aten, name, None)
    # ``__repr__`` and the like are no operators.
    is_operator = isinstance(packet, torch._ops.OpOverloadPacket)
    return [getattr(packet, each) for each in packet.overloads()] if is_operator else []


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return the number of references to ``storage``, or a huge number if unknown."""
    if not _counts_users():
        return sys.maxsize
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


@functools.cache
def _counts_users() -> bool:
    return not find_misfits((_USERS,))


def has_saving_hooks() -> bool:
    """Return True inside ``saved_tensors_hooks``."""
    need(_SAVING)
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def asks_for_memory(error: Exception) -> bool:
    """Return True for an error of torch about a tensor without memory."""
    # torch has no class for this error, and four texts.
    texts = (
        "data pointer",
        "not allocated yet",
        "invalid python storage",
        "not supported for tensor subclasses",
    )
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def adopt_local_tensors(model: nn.Module) -> None:
    """Update FSDP2's parameter groups after a replacement of parameters."""
    need(_GROUPS)
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def wrap_local(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor over ``local``, sharded as ``sharded``."""
    need(_SPEC)
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    result: DTensor = make(local, sharded._spec, requires_grad=False)
    return result


def hide_padding(parameter: nn.Parameter, owned: int) -> None:
    """Narrow a local tensor sharded in dimension 0 to its ``owned`` elements."""
    sharded: Any = parameter
    local = sharded._local_tensor
    if local.numel() == owned:
        return
    below = max(1, local[:1].numel())
    sharded._local_tensor = local.narrow(0, 0, owned // below)


@contextlib.contextmanager
def intercept_truncated_normal(handler: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Send ``trunc_normal_`` to ``handler(original, tensor, ...)`` inside the block."""
    module: ModuleType = nn.init
    original = getattr(module, "_no_grad_trunc_normal_", None)
    if original is None:
        yield
        return
    wrong = find_misfits((_TRUNCATED_NORMAL,))

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedVersionError(f"{wrong}. Initialise the model without trunc_normal_")

    new = refuse if wrong else functools.partial(handler, original)
    with patch(module, "_no_grad_trunc_normal_", new):
        yield


@contextlib.contextmanager
def row_major(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of ``tensor`` as a row-major 1-D tensor; write changes back."""
    flat = tensor.reshape(-1)
    yield flat
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


WRAPPER_TOUCHED = (
    Use(
        "torch:Tensor",
        "_make_wrapper_subclass",
        "a tensor without memory that has the strides of one with it",
    ),
    Use(
        "torch:_C",
        "_set_throw_on_mutable_data_ptr, _set_conj, _set_neg, _dispatch_keys, "
        "_additional_keys_to_prop_for_wrapper_tensors, _DisableTorchDispatch",
        "such a tensor raises an error where its memory is asked for, and has the bits of what it wraps",
    ),
)
T = TypeVar("T", bound=torch.Tensor)
_CPU = torch.device("cpu")


def make_wrapper(
    cls: type[T],
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    bits: torch.Tensor | None = None,
    device: torch.device = _CPU,
) -> T:
    """Return a tensor of class ``cls`` without memory, with the bits of ``bits``."""
    need(*WRAPPER_TOUCHED)
    native: ModuleType = torch._C
    make: Any = torch.Tensor._make_wrapper_subclass
    if bits is None:
        wrapper: T = make(cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device)
    else:
        # Only the conjugate and negative bits, as in torch's own wrappers.
        keys = native._additional_keys_to_prop_for_wrapper_tensors & native._dispatch_keys(bits)
        options = (None, dtype, torch.strided, device, False, False, None, False, False, keys)
        wrapper = make(cls, shape, strides, offset, *options)
    # Otherwise a read would use an invalid address.
    native._set_throw_on_mutable_data_ptr(wrapper)
    return wrapper


def become_wrapper(wrapper: torch.Tensor, source: torch.Tensor) -> None:
    """Give ``wrapper`` the dtype, shape, strides and bits of the wrapper ``source``."""
    offset = int(source.storage_offset())
    bare = make_wrapper(type(wrapper), source.shape, source.stride(), offset, source.dtype)
    # ``bare`` has no bits.
    _set_bits(wrapper, conj=False, neg=False)
    if wrapper.dtype == source.dtype:  # also in inference mode
        with without_dispatch():
            torch.ops.aten.set_.source_Tensor(wrapper, bare)
    else:
        # ``set_`` keeps the dtype; the setter of ``data`` may change it.
        torch.Tensor.data.__set__(wrapper, bare)  # type: ignore[attr-defined]
    _set_bits(wrapper, conj=source.is_conj(), neg=source.is_neg())


def _set_bits(wrapper: torch.Tensor, conj: bool, neg: bool) -> None:
    native: ModuleType = torch._C
    if wrapper.is_conj() != conj:  # only complex tensors have it
        native._set_conj(wrapper, conj)
    if wrapper.is_neg() != neg:
        native._set_neg(wrapper, neg)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors, also on meta, share a storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def without_dispatch() -> contextlib.AbstractContextManager[None]:
    """Skip ``__torch_dispatch__`` of modes and classes inside the block."""
    guard: contextlib.AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard
