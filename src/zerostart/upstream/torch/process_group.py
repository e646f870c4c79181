"""The end of torch's process groups: what still goes on over one is finished before it goes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.distributed import distributed_c10d

from zerostart.upstream.patches import RefCountedPatches, replaced_wherever_imported
from zerostart.upstream.registry import Lasts, PatchPoint, misfit
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import TORCH

_DESTROY = PatchPoint(
    library=TORCH,
    owner="torch.distributed.distributed_c10d",
    names=("destroy_process_group",),
    why="a checkpoint that is being written in the background is finished before its process group goes",
    lasts=Lasts.SAVE,
    shapes=(Shape("torch.distributed.distributed_c10d:destroy_process_group", leads=("group",)),),
)
TOUCHED = (_DESTROY,)


class BeforeTheEnd(RefCountedPatches):
    """Calls ``finish`` before all process groups go; what it raises is raised when they are gone."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__(self._enter)
        self._finish = finish

    def _enter(self, stack: ExitStack) -> None:
        if misfit(TOUCHED):
            return  # the save that is broken off says so, and the process ends with an error
        parts: Any = distributed_c10d
        original = parts.destroy_process_group

        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            try:
                if group is None or group == parts.GroupMember.WORLD:
                    self._finish()
            finally:
                original(group)

        stack.enter_context(
            replaced_wherever_imported(_DESTROY, _DESTROY.names[0], original, destroy_process_group)
        )
