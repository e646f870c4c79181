"""An accelerator that is none: torch's backend for others under the name ``npu``, which computes on the host.

With the folder that this package lies in on ``PYTHONPATH``, torch finds it as it finds a vendor's, by the
group ``torch.backends``, and so does every process of a launch. A tensor of it has memory of the host; an
operator gets the host's view of that memory. What is random comes from a generator of its own.
Collectives are gloo's under the name ``hccl``. There is one device, and nothing counts its memory.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as trees
from torch.utils import backend_registration as parts

__all__ = ["begin"]

KIND = "npu"
#: A directory that gets from each process, at its end, a file with the number of operators that ran on it.
COUNTED = "ZEROSTART_TEST_NPU_OPERATORS"
#: DLPack's numbers of devices.
_HOST, _OTHER = 1, 12
_LOWER = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")
_FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss")
_COPIES = ("aten::_copy_from", "aten::_copy_from_and_resize")
_generator = torch.Generator(device="cpu")
_libraries: list[torch.library.Library] = []
_operators = 0


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Head(ctypes.Structure):
    """How DLPack describes a tensor begins so."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


class Module(parts._DummyBackendModule):
    """``torch.npu``."""

    _initialized = True  # or torch's checkpointing leaves the generator alone

    @staticmethod
    def device(device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        _generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = KIND) -> torch.Tensor:
        return _generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = KIND) -> None:
        _generator.set_state(state)


def begin() -> None:
    """What torch calls when it is imported."""
    parts._setup_privateuseone_for_python_backend(KIND, Module())
    # What no guard that is written in Python can be asked for.
    torch.accelerator.set_device_index = Module().set_device
    torch.accelerator.synchronize = lambda device=None: None  # type: ignore[assignment]
    for name in ("empty", "empty_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_on_the_host, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, dtype in [*((name, None) for name in _LOWER), *((name, torch.float32) for name in _FLOAT32)]:
        aten.impl(name, _cast(name, dtype), "AutocastPrivateUse1")
    # Of these torch has one for all backends, which says that theirs is missing.
    convolution = functools.partial(_on_the_host, torch.ops.aten.convolution.default)
    aten.impl("convolution_overrideable", convolution, "PrivateUse1")
    _libraries.extend((everything, aten))
    _collectives()
    if COUNTED in os.environ:
        atexit.register(lambda: Path(os.environ[COUNTED], str(os.getpid())).write_text(str(_operators)))


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A backend that is written in Python can have no page-locked memory: it is as good as any other here."""

    @functools.wraps(function)
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return allocate


def _as(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """The same memory as a tensor of the other device, which has no float64."""
    if kind == _OTHER and tensor.dtype == torch.float64:
        raise TypeError(f"{KIND} has no tensors of float64")
    capsule = torch._C._to_dlpack(tensor.detach())  # type: ignore[attr-defined]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    head = _Head.from_address(address(capsule, b"dltensor"))
    head.device.kind, head.device.number = kind, 0  # there is one
    made: torch.Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    return made


def _on_the_host(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: on the host's views of what it takes, and back."""
    global _operators
    _operators += 1
    if operator is torch.ops.aten.record_stream.default:  # streams do nothing, and memory waits for none
        return None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == KIND:
            # Without elements it may be what the result is to be written into, of whatever size.
            empty = value.numel() == 0
            own = torch.empty(value.shape, dtype=value.dtype, device="cpu") if empty else _as(value, _HOST)
            pairs.append((own, value))
            return own
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == KIND else value

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for own, given in pairs:
            if own is value:
                return given
        return _as(value, _OTHER)

    args, kwargs = trees.tree_map(to_host, (args, kwargs))
    with _own_random(operator):
        if operator._schema.name in _COPIES:
            result = args[1].copy_(args[0])
        else:
            result = operator(*args, **kwargs)
    for own, given in pairs:
        if own.shape != given.shape:
            given.data = _as(own, _OTHER)
    return trees.tree_map(back, result)


@contextmanager
def _own_random(operator: Any) -> Iterator[None]:
    """What the operator draws, it draws from the device's generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        yield
        return
    host = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


def _cast(name: str, dtype: torch.dtype | None) -> Any:
    """An operator under autocast: in ``dtype``, or in autocast's own."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or torch.get_autocast_dtype(KIND)

        def cast(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(wanted) if floats else value

        with torch._C._ExcludeDispatchKeyGuard(without):
            return operator(*map(cast, args), **kwargs)

    return run


def _collectives() -> None:
    """On the host's views, by the group's backend for the host; its own only bears the name."""
    import torch.distributed as dist

    def hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("hccl", hccl, devices=[KIND])
    c10d = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch's kernel is no longer the one
        for name in ("allreduce_", "broadcast_", "allgather_"):
            operator = getattr(torch.ops.c10d, name).default
            c10d.impl(name, functools.partial(_on_the_host, operator), "PrivateUse1")
    _libraries.append(c10d)


def npu_fusion_attention(*_: Any, **__: Any) -> Any:
    """Asked for by transformers, on import, and called for flash attention alone."""
    raise NotImplementedError("this device has no kernels of its own")
