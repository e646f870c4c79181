"""Private parts of torch: FSDP2's references to local tensors, and an initialiser that skips meta tensors.

Also the count of a storage's users, and what torch says of memory that a tensor does not have.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.guard import Use, misfit, need
from zerostart.upstream.patches import replaced

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TRUNCATED_NORMAL = Use(
    "torch.nn.init",
    "_no_grad_trunc_normal_(tensor, mean, std, a, b, *, generator), trunc_normal_",
    "does nothing on meta, and is logged as it is called",
)
_SPEC = Use("torch.distributed.tensor:DTensor", "_spec", "a DTensor with the sharding of another")
_GROUPS = Use(
    "torch.distributed.fsdp:FSDPModule",
    "_apply",
    "FSDP2's parameter groups look again at what the modules hold",
)
_USERS = Use(
    "torch._C",
    "_storage_Use_Count",
    "whether somebody keeps a view of a buffer that is about to be rearranged",
)
_TABLES = Use(
    "torch.nn:Module",
    "._parameters, ._buffers, ._non_persistent_buffers_set",
    "a module's tensors are looked up and put back in its own tables",
)
TOUCHED = (_TRUNCATED_NORMAL, _SPEC, _GROUPS, _USERS, _TABLES)


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors share ``storage``, and this handle of it; where torch does not say, very many."""
    if not _counts_users():
        return sys.maxsize
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


@functools.cache
def _counts_users() -> bool:
    return not misfit((_USERS,))


def asks_for_memory(error: Exception) -> bool:
    """Whether torch raised ``error`` because something reached for the memory that it lacks."""
    # Four places in torch say it, each in words of its own, and by no class of error.
    said = (
        "data pointer",
        "not allocated yet",
        "invalid python storage",
        "not supported for tensor subclasses",
    )
    return isinstance(error, RuntimeError) and any(part in str(error) for part in said)


def adopt_local_tensors(model: nn.Module) -> None:
    """Make FSDP2's parameter groups look at the parameters that the modules now hold."""
    need(_GROUPS)
    # What changes nothing: FSDP2 hooks ``_apply``, and looks at its parameters when it is done.
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def over(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the sharding of ``sharded`` whose local tensor is ``local``, wherever that lies.

    ``DTensor.from_local`` moves it to the mesh's device, and with offloading it has to stay on the host.
    ``FSDPParam.to_sharded_dtensor`` does the same.
    """
    need(_SPEC)
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
    # Elements of one row: rows that are real follow from the elements that are.
    below = max(1, local[:1].numel())
    sharded._local_tensor = local.narrow(0, 0, owned // below)


@contextlib.contextmanager
def truncated_normal_goes_to(handler: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside, ``trunc_normal_`` calls ``handler(original, tensor, ...)``, however it was imported."""
    module: ModuleType = nn.init
    original = getattr(module, "_no_grad_trunc_normal_", None)
    if original is None:
        yield  # and whoever calls it fails by itself
        return
    wrong = misfit((_TRUNCATED_NORMAL,))

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedVersionError(f"{wrong}. Initialise the model without trunc_normal_")

    new = refuse if wrong else functools.partial(handler, original)
    with replaced(module, "_no_grad_trunc_normal_", new):
        yield


@contextlib.contextmanager
def row_major(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Inside, the elements of ``tensor`` in row-major order as 1-D memory; what is changed there is changed.

    That is a view of it, or a copy where its strides (of ``channels_last``, say) allow none.
    """
    flat = tensor.reshape(-1)
    yield flat
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
