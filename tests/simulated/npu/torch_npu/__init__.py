"""An accelerator that is none: torch's backend for others under the name ``npu``, which computes on the host.

With the folder that this package lies in on ``PYTHONPATH``, torch finds it as it finds a vendor's, by the
group ``torch.backends``, and so does every process of a launch. There are eight devices (or
``ZEROSTART_TEST_NPU_DEVICES``), and nothing is initialised by asking. What makes it unlike the host is in
``csrc``: the host cannot touch a device's memory; copies and kernels happen when somebody waits for them, or
``ZEROSTART_TEST_NPU_DELAY`` milliseconds later, so that a wait that is missing gives wrong bytes; page-locked
memory comes in powers of two; memory is counted, and limited; collectives refuse what NCCL refuses, and are
gloo's under the name ``hccl``. What is random comes from generators of its own. Attention is CUDA's "flash"
by name and signature, which torch's ring knows.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_npu.compiling import compiled

__all__ = ["begin"]
__version__ = "0"

KIND = "npu"
#: A directory that gets from each process, at its end, a file with the number of operators that ran on it.
COUNTED = "ZEROSTART_TEST_NPU_OPERATORS"
_LOWER = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")
_FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss")
_libraries: list[torch.library.Library] = []
device: Any = None  # the compiled part
attention: Any = None  # its kernels of attention


def begin() -> None:
    """What torch calls when it is imported."""
    global attention, device
    os.environ.setdefault("ASCEND_HOME_PATH", str(Path(__file__).parent))  # DeepSpeed asks for a toolkit
    device = compiled()
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    aten = torch.library.Library("aten", "IMPL")
    for name, dtype in [*((name, None) for name in _LOWER), *((name, torch.float32) for name in _FLOAT32)]:
        aten.impl(name, _cast(name, dtype), "AutocastPrivateUse1")
    attention = torch.library.Library("aten", "IMPL")
    attention.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    attention.impl("_scaled_dot_product_flash_attention", _flash, "PrivateUse1")
    attention.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "PrivateUse1")
    _libraries.append(aten)
    import torch.distributed as dist

    dist.Backend.register_backend("hccl", _hccl, devices=[KIND])
    atexit.register(device.stop)
    if COUNTED in os.environ:
        atexit.register(
            lambda: Path(os.environ[COUNTED], str(os.getpid())).write_text(str(device.operators()))
        )


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    import torch.distributed as dist

    return device.collectives(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, "hccl")


def _index(given: Any) -> int:
    if given is None or (isinstance(given, (str, torch.device)) and torch.device(given).index is None):
        return int(device.current_device())
    return given if isinstance(given, int) else int(torch.device(given).index)


class _Device:
    """``with torch.npu.device(1):``."""

    def __init__(self, given: Any) -> None:
        self._index = _index(given)

    def __enter__(self) -> None:
        self._before = device.current_device()
        device.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        device.set_device(self._before)


class Stream(torch.Stream):
    """``torch.npu.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Any:
        if options:
            return super().__new__(cls, priority=priority, **options)
        begin_device()
        return super().__new__(cls, device=torch.device(KIND, _index(device)), priority=priority)


class Event(torch.Event):
    """``torch.npu.Event``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, device=KIND, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)


def begin_device() -> None:
    """Initialise; everything that needs a device does."""
    device.begin()
    sys.modules[f"torch.{KIND}"]._initialized = True  # type: ignore[attr-defined]  # torch's checkpointing looks


def current_stream(given: Any = None) -> Any:
    begin_device()
    return torch.accelerator.current_stream(_index(given))


def default_stream(given: Any = None) -> Any:
    begin_device()
    return torch.Stream(
        stream_id=0, device_index=_index(given), device_type=int(torch._C._autograd.DeviceType.PrivateUse1)
    )


def set_stream(stream: Any) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(given: Any) -> Iterator[None]:
    if given is None:
        yield
        return
    with given:
        yield


def _module() -> types.ModuleType:
    """``torch.npu``."""
    made = types.ModuleType(f"torch.{KIND}")

    def current_device() -> int:
        begin_device()  # as torch.cuda's
        return int(device.current_device())

    def set_device(given: Any) -> None:
        begin_device()
        device.set_device(_index(given))

    def synchronize(given: Any = None) -> None:
        begin_device()
        device.synchronize(_index(given))

    def generator(given: Any = KIND) -> torch.Generator:
        return device.default_generator(_index(given))  # type: ignore[no-any-return]

    def manual_seed(seed: int) -> None:
        generator().manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for index in range(device.device_count()):
            generator(index).manual_seed(int(seed))

    def get_rng_state(given: Any = KIND) -> torch.Tensor:
        return generator(given).get_state()

    def set_rng_state(state: torch.Tensor, given: Any = KIND) -> None:
        generator(given).set_state(state)

    def get_device_properties(given: Any = None) -> types.SimpleNamespace:
        total = torch.accelerator.get_memory_info(_index(given))[1]
        return types.SimpleNamespace(name="pretend", total_memory=total)

    def npurt() -> types.SimpleNamespace:
        return types.SimpleNamespace(
            npuHostRegister=lambda address, nbytes, flags: device.register_host(address, nbytes),
            npuHostUnregister=device.unregister_host,
        )

    memory = torch.accelerator
    own = {
        name: getattr(memory, name)
        for name in (
            "empty_cache",
            "max_memory_allocated",
            "max_memory_reserved",
            "memory_allocated",
            "memory_reserved",
            "memory_stats",
            "reset_peak_memory_stats",
        )
    }
    own |= {
        "mem_get_info": memory.get_memory_info,
        "reset_max_memory_allocated": memory.reset_peak_memory_stats,
    }
    own |= {"memory_cached": memory.memory_reserved, "max_memory_cached": memory.max_memory_reserved}
    own |= {
        "Stream": Stream,
        "Event": Event,
        "BFloat16Tensor": torch.Tensor,
        "current_device": current_device,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "device": _Device,
        "device_count": device.device_count,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda given=None: "pretend",
        "get_device_properties": get_device_properties,
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(index) for index in range(device.device_count())],
        "initial_seed": lambda: generator().initial_seed(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda: True,
        "is_initialized": device.is_begun,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "npurt": npurt,
        "set_device": set_device,
        "set_rng_state": set_rng_state,
        "set_rng_state_all": lambda states: [set_rng_state(s, i) for i, s in enumerate(states)],
        "set_stream": set_stream,
        "stream": stream,
        "synchronize": synchronize,
        "_is_in_bad_fork": lambda: False,
        "_lazy_call": lambda callback: callback(),
        "_lazy_init": begin_device,
    }
    made.__dict__.update(own)
    sys.modules[made.__name__] = made
    return made


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


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    aten = torch.ops.aten
    if attn_mask is None and not dropout_p:
        found, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # The operator that this one stands for does so, and math adds what it is given.
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        found, *_ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return found  # type: ignore[no-any-return]


def _flash(query: Any, key: Any, value: Any, *more: Any, scale: float | None = None) -> tuple[Any, ...]:
    """Also where several heads of queries have one of keys."""
    dropout, causal = more[0] if more else 0.0, more[1] if len(more) > 1 else False
    of_host = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    every = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(every, 1) for x in (key, value))
    out, sums = of_host(query, keys, values, dropout, causal, scale=scale)
    none, number = query.new_empty(0), query.new_empty(())
    return out, sums, None, None, query.shape[2], key.shape[2], number, number, none


def _flash_backward(gradient: Any, *more: Any, scale: float | None = None) -> tuple[Any, ...]:
    query, key, value, out, sums, _, _, _, _, dropout, causal, _, _ = more
    of_host = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    every = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(every, 1) for x in (key, value))
    of_query, *others = of_host(gradient, query, keys, values, out, sums, dropout, causal, scale=scale)
    return of_query, *(x.unflatten(1, (-1, every)).sum(2) for x in others)


def npu_fusion_attention(*_: Any, **__: Any) -> Any:
    """Asked for by transformers, on import, and called for flash attention alone."""
    raise NotImplementedError("this device has no kernels of its own")
