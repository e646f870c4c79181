"""Private parts of torch: FSDP2's references to local tensors, and an initialiser that skips meta tensors.

Also the count of a storage's users, and what torch says of memory that a tensor does not have.

Known for the versions in ``SUPPORTED``. Used of it: ``FSDPModule._apply``, which resets the references that
the parameter groups keep, as it does after any ``Module.to``; ``DTensor._local_tensor``, ``DTensor._spec``
and the constructor that takes the two; and ``nn.init._no_grad_trunc_normal_``, which samples by rejection,
looks at values, and so does nothing on meta.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.upstream.versions import demand

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "SUPPORTED",
    "adopt_local_tensors",
    "asks_for_memory",
    "hide_padding",
    "over",
    "require",
    "storage_users",
    "truncated_normal_goes_to",
]

#: First known and first unknown version.
SUPPORTED = ((2, 11), (2, 14))


@functools.cache
def require() -> None:
    """Raise UnsupportedVersionError unless everything that this file uses is there."""
    from torch.distributed.fsdp import FSDPModule

    demand(
        torch,
        SUPPORTED,
        (
            (FSDPModule, ("_apply",)),
            (nn.init, ("_no_grad_trunc_normal_",)),
            (torch._C, ("_storage_Use_Count",)),
        ),
    )


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors share ``storage``, and this handle of it."""
    require()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def asks_for_memory(error: Exception) -> bool:
    """Whether torch raised ``error`` because something reached for the memory that it lacks."""
    said = (
        "data pointer",
        "not allocated yet",
        "invalid python storage",
        "not supported for tensor subclasses",
    )
    return isinstance(error, RuntimeError) and any(part in str(error) for part in said)


def adopt_local_tensors(model: nn.Module) -> None:
    """Make FSDP2's parameter groups look at the parameters that the modules now hold."""
    require()
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def over(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the sharding of ``sharded`` whose local tensor is ``local``, wherever that lies.

    ``DTensor.from_local`` moves it to the mesh's device, and with offloading it has to stay on the host.
    ``FSDPParam.to_sharded_dtensor`` does the same.
    """
    require()
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    made: DTensor = make(local, sharded._spec, requires_grad=False)
    return made


def hide_padding(parameter: nn.Parameter, owned: int) -> None:
    """Narrow the local tensor of a sharded parameter to its real rows, ``owned`` elements.

    Only dimension 0 may be sharded unevenly.

    FSDP2 keeps storage for a full chunk on every rank, and shows the rows that are real: gradients come in
    that shape. ``FSDPParam._init_sharded_param`` does the same.
    """
    sharded: Any = parameter
    local = sharded._local_tensor
    if local.numel() == owned:
        return
    below = max(1, local[:1].numel())
    sharded._local_tensor = local.narrow(0, 0, owned // below)


@contextlib.contextmanager
def truncated_normal_goes_to(handler: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside, ``trunc_normal_`` calls ``handler(original, tensor, ...)``, however it was imported."""
    require()
    module: Any = nn.init
    original = module._no_grad_trunc_normal_
    module._no_grad_trunc_normal_ = functools.partial(handler, original)
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = original
