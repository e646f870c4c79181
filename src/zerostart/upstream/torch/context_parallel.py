"""Ring attention of torch, also with the CPU's kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zerostart.errors import ConfigError
from zerostart.upstream.guard import Use, demand
from zerostart.upstream.patches import RefCountedPatches, patch
from zerostart.upstream.types import Arguments, Keywords

TOUCHED = (
    Use(
        "torch.distributed.tensor.experimental._context_parallel._attention",
        "custom_ops, _enable_cp_dtensor_dispatcher, _templated_ring_attention(group, seq_dim, op, query, "
        "key, value, is_causal), _templated_ring_attention_backward(group, seq_dim, op, grad_out, "
        "grad_out_name, query, key, value, out, *, logsumexp, is_causal)",
        "attention on DTensors of the CPU goes around the ring as it does on accelerators",
    ),
    Use(
        "torch._C",
        "_dispatch_has_kernel_for_dispatch_key, _dispatch_key_for_device",
        "whether a device has one of the kernels of attention that go around the ring",
    ),
)
#: Kernels of CUDA in torch's ring attention.
_KERNELS = tuple(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
_SEQUENCE = 2  # of [rows, heads, length, size]


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless torch's ring attention is as expected."""
    demand(TOUCHED, "Use sequence_parallel=1")


def check_kernels(kind: str) -> None:
    """Raise ConfigError for an accelerator without ring attention."""
    key = torch._C._dispatch_key_for_device(kind)
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in _KERNELS):
        raise ConfigError(
            f"sequence_parallel on fsdp2 is torch's ring attention, which knows CUDA's kernels, and {kind} "
            "has none of them; use engine='deepspeed', whose sequence parallelism (Ulysses) needs none, or "
            "sequence_parallel=1"
        )


def ring_on_cpu(model: nn.Module) -> None:
    """Enable ring attention on CPUs while ``model`` lives."""
    require_version()
    _patches.hold(model)


def _enter(stack: ExitStack) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    module: ModuleType = _attention
    kernels: Any = torch.ops.aten
    # torch's table for DTensors has only CUDA's kernels.
    ours = {
        kernels._scaled_dot_product_flash_attention_for_cpu.default: _forward,
        kernels._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
    }
    stack.enter_context(patch(module, "custom_ops", {**module.custom_ops, **ours}))


_patches = RefCountedPatches(_enter)


def _forward(op: OpOverload, args: Arguments, kwargs: Keywords) -> tuple[DTensor, ...]:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    # The dispatcher leaves out default arguments.
    query, key, value, *more = args
    dropout = more[0] if more else 0.0
    causal = more[1] if len(more) > 1 else False
    results = _attention._templated_ring_attention(
        query.device_mesh.get_group(),
        _SEQUENCE,
        op,
        query.to_local(),
        key.to_local(),
        value.to_local(),
        is_causal=causal,
        dropout_p=dropout,
        **kwargs,
    )
    return _sharded(results, query.device_mesh)


def _backward(op: OpOverload, args: Arguments, kwargs: Keywords) -> tuple[DTensor, ...]:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    *tensors, dropout, causal = args
    gradient, query, key, value, out, logsumexp = (tensor.to_local() for tensor in tensors)
    results = _attention._templated_ring_attention_backward(
        tensors[1].device_mesh.get_group(),
        _SEQUENCE,
        op,
        gradient,
        "grad_out",
        query,
        key,
        value,
        out,
        logsumexp,
        causal,
        dropout_p=dropout,
        **kwargs,
    )
    return _sharded(results, tensors[1].device_mesh)


def _sharded(results: Iterable[torch.Tensor], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(result, mesh, [Shard(_SEQUENCE)], run_check=False) for result in results)
