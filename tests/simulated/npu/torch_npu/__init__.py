"""A pretend accelerator ``npu``: torch's private-use backend, which computes on the host.

With the folder of this package on ``PYTHONPATH``, torch finds it like a vendor's backend, by the entry point
group ``torch.backends``. There are eight devices, or ``ZEROSTART_TEST_NPU_DEVICES``. ``csrc`` imitates them:

- The host cannot touch a device's memory.
- Copies and kernels happen when somebody waits for them, or after ``ZEROSTART_TEST_NPU_DELAY`` milliseconds:
  a missing wait gives wrong bytes.
- Page-locked memory comes in powers of two. Memory is counted and limited.
- Collectives are gloo's under the name ``hccl``, and refuse what NCCL refuses.
- Random numbers come from the device's own generators.

Attention has the name and signature of CUDA's "flash" operator, which torch's ring attention needs.
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

from torch_npu.compiling import load_extension

__all__ = ["begin"]
__version__ = "0"

KIND = "npu"
#: Environment variable: folder to which each process writes its number of operators at exit.
OPERATORS = "ZEROSTART_TEST_NPU_OPERATORS"
_LOWER = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")
_FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss")
_libraries: list[torch.library.Library] = []
device: Any = None  # the compiled part
attention: Any = None  # its kernels of attention


def begin() -> None:
    """Register the backend; torch calls this when it is imported."""
    global attention, device
    os.environ.setdefault("ASCEND_HOME_PATH", str(Path(__file__).parent))  # DeepSpeed looks for a toolkit
    device = load_extension()
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
    if OPERATORS in os.environ:
        atexit.register(
            lambda: Path(os.environ[OPERATORS], str(os.getpid())).write_text(str(device.operators()))
        )


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    import torch.distributed as dist

    return device.collectives(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, "hccl")


def _index(value: Any) -> int:
    if value is None or (isinstance(value, (str, torch.device)) and torch.device(value).index is None):
        return int(device.current_device())
    return value if isinstance(value, int) else int(torch.device(value).index)


class _Device:
    """Context manager ``torch.npu.device``."""

    def __init__(self, value: Any) -> None:
        self._index = _index(value)

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
    """Initialise the accelerator, for everything that needs a device."""
    device.begin()
    sys.modules[f"torch.{KIND}"]._initialized = True  # type: ignore[attr-defined]  # read by torch's checkpointing


def current_stream(value: Any = None) -> Any:
    begin_device()
    return torch.accelerator.current_stream(_index(value))


def default_stream(value: Any = None) -> Any:
    begin_device()
    return torch.Stream(
        stream_id=0, device_index=_index(value), device_type=int(torch._C._autograd.DeviceType.PrivateUse1)
    )


def set_stream(stream: Any) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(value: Any) -> Iterator[None]:
    if value is None:
        yield
        return
    with value:
        yield


def _module() -> types.ModuleType:
    """Return the module ``torch.npu``."""
    module = types.ModuleType(f"torch.{KIND}")

    def current_device() -> int:
        begin_device()  # like torch.cuda's
        return int(device.current_device())

    def set_device(value: Any) -> None:
        begin_device()
        device.set_device(_index(value))

    def synchronize(value: Any = None) -> None:
        begin_device()
        device.synchronize(_index(value))

    def generator(value: Any = KIND) -> torch.Generator:
        return device.default_generator(_index(value))  # type: ignore[no-any-return]

    def manual_seed(seed: int) -> None:
        generator().manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for index in range(device.device_count()):
            generator(index).manual_seed(int(seed))

    def get_rng_state(value: Any = KIND) -> torch.Tensor:
        return generator(value).get_state()

    def set_rng_state(state: torch.Tensor, value: Any = KIND) -> None:
        generator(value).set_state(state)

    def get_device_properties(value: Any = None) -> types.SimpleNamespace:
        total = torch.accelerator.get_memory_info(_index(value))[1]
        return types.SimpleNamespace(name="pretend", total_memory=total)

    def npurt() -> types.SimpleNamespace:
        return types.SimpleNamespace(
            npuHostRegister=lambda address, nbytes, flags: device.register_host(address, nbytes),
            npuHostUnregister=device.unregister_host,
        )

    memory = torch.accelerator
    attributes = {
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
    attributes |= {
        "mem_get_info": memory.get_memory_info,
        "reset_max_memory_allocated": memory.reset_peak_memory_stats,
    }
    attributes |= {"memory_cached": memory.memory_reserved, "max_memory_cached": memory.max_memory_reserved}
    attributes |= {
        "Stream": Stream,
        "Event": Event,
        "BFloat16Tensor": torch.Tensor,
        "FloatTensor": lambda values: torch.tensor(values, dtype=torch.float32, device=KIND),
        "current_device": current_device,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "device": _Device,
        "device_count": device.device_count,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda value=None: "pretend",
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
    module.__dict__.update(attributes)
    sys.modules[module.__name__] = module
    return module


def _cast(name: str, dtype: torch.dtype | None) -> Any:
    """Return an operator under autocast, in ``dtype`` or autocast's own dtype."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        target = dtype or torch.get_autocast_dtype(KIND)

        def cast(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(target) if floats else value

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
        result, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # Like the replaced operator; "math" adds the mask.
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        result, *_ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return result  # type: ignore[no-any-return]


def _flash(query: Any, key: Any, value: Any, *options: Any, scale: float | None = None) -> tuple[Any, ...]:
    """Compute attention, also for grouped query heads."""
    dropout, causal = options[0] if options else 0.0, options[1] if len(options) > 1 else False
    flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    heads_per_key = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(heads_per_key, 1) for x in (key, value))
    out, sums = flash_on_cpu(query, keys, values, dropout, causal, scale=scale)
    none, number = query.new_empty(0), query.new_empty(())
    return out, sums, None, None, query.shape[2], key.shape[2], number, number, none


def _flash_backward(gradient: Any, *rest_of_arguments: Any, scale: float | None = None) -> tuple[Any, ...]:
    query, key, value, out, sums, _, _, _, _, dropout, causal, _, _ = rest_of_arguments
    flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    heads_per_key = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(heads_per_key, 1) for x in (key, value))
    query_gradient, *other_gradients = flash_on_cpu(
        gradient, query, keys, values, out, sums, dropout, causal, scale=scale
    )
    return query_gradient, *(x.unflatten(1, (-1, heads_per_key)).sum(2) for x in other_gradients)


def npu_fusion_attention(*_: Any, **__: Any) -> Any:
    """Imported by transformers, and called only for flash attention."""
    raise NotImplementedError("this device has no kernels of its own")


def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, None]:
    """Called by diffusers, which takes the first of the two results."""
    return torch.nn.functional.rms_norm(x, gamma.shape, gamma, epsilon), None
