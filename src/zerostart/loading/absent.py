"""What stands in the place of a parameter whose values are at rest elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerostart.errors import EngineError
from zerostart.upstream.torch.wrapper import make_wrapper


class _Absent(torch.Tensor):
    """Shape, dtype and device of a parameter, and nothing in it; what would compute with it is told."""

    _name: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, cls))
        if func is torch.ops.aten.detach.default:
            return _made(own, own._name, own.device)
        raise own._asked_for_by(func)

    def _asked_for_by(self, what: object) -> EngineError:
        return EngineError(
            f"{self._name} is offloaded and not there now: its values are there during the forward of its "
            f"module alone, and {what} asked for them outside of that. Place the component "
            "'replicate' or 'shard'"
        )

    def storage(self) -> Any:
        """Where files are written from; there is none. Raises EngineError."""
        raise self._asked_for_by("storage")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def absent(parameter: torch.Tensor, name: str, device: torch.device) -> nn.Parameter:
    """A parameter like ``parameter``, [any shape], that is on ``device`` as far as anybody asks."""
    return nn.Parameter(_made(parameter, name, device), requires_grad=False)


def _made(like: torch.Tensor, name: str, device: torch.device) -> _Absent:
    made = make_wrapper(_Absent, like.shape, like.stride(), 0, like.dtype, device=device)
    made._name = name
    return made
