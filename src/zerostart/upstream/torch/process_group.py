"""Store, timeout, creation and end of torch's process groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zerostart.upstream.guard import Function, Use, find_misfits, need
from zerostart.upstream.patches import RefCountedPatches, wrap

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_DESTROY = Use(
    "torch.distributed.distributed_c10d",
    "destroy_process_group(group)",
    "a background save ends before its process group is destroyed",
)
_STORE = Use(
    "torch.distributed.distributed_c10d",
    "_get_default_store, _world",
    "a rank that is alone in a call is detected without a collective",
)
#: Environment variable that makes gloo connect two ranks at their first message.
LAZY_CONNECT = "TORCH_GLOO_LAZY_INIT"


def store_of(prefix: str) -> Store:
    """Return the default group's store, with ``prefix`` before all keys."""
    need(_STORE)
    parts: ModuleType = distributed_c10d
    store: Store = parts.PrefixStore(prefix, parts._get_default_store())
    return store


def group_timeout() -> timedelta:
    """Return the timeout of the default process group."""
    need(_STORE)
    parts: ModuleType = distributed_c10d
    group = parts.group.WORLD
    for kind in ("cpu", *sorted({device.type for device in group._device_types} - {"cpu"})):
        with contextlib.suppress(AttributeError, RuntimeError):  # no backend, or one without a timeout
            own: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return own
    stores: timedelta = parts._get_default_store().timeout
    return stores


def list_groups() -> list[dist.ProcessGroup]:
    """List all process groups."""
    parts: ModuleType = distributed_c10d
    return list(parts._world.pg_map) if torch.distributed.is_initialized() else []


def share_timeout(before: Sequence[dist.ProcessGroup]) -> None:
    """Set the default group's timeout on groups created since ``before``."""
    for group in [group for group in list_groups() if group not in before]:
        for device in group._device_types:
            with contextlib.suppress(AttributeError, RuntimeError):  # a foreign backend
                group._get_backend(device)._set_default_timeout(group_timeout())


def messages_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks with the default timeout; collective."""
    with lazy_connections():
        group: dist.ProcessGroup = torch.distributed.new_group(backend="gloo", timeout=group_timeout())
        return group


@contextlib.contextmanager
def lazy_connections() -> Iterator[None]:
    """Let gloo groups of the block connect two ranks only when needed."""
    before = os.environ.get(LAZY_CONNECT)
    os.environ[LAZY_CONNECT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[LAZY_CONNECT]
        else:
            os.environ[LAZY_CONNECT] = before


class BeforeDestroy(RefCountedPatches):
    """Calls ``finish`` before all process groups end; its error is raised afterwards."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__(self._enter)
        self._finish = finish

    def _enter(self, stack: ExitStack) -> None:
        if find_misfits((_DESTROY,)):
            return  # an interrupted save reports itself
        wrap(stack, distributed_c10d, "destroy_process_group", self._destroy, everywhere=True)

    def _destroy(self, original: Function, group: dist.ProcessGroup | None = None) -> None:
        parts: ModuleType = distributed_c10d
        try:
            if group is None or group == parts.GroupMember.WORLD:
                self._finish()
        finally:
            original(group)
