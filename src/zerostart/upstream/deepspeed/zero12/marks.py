"""What a parameter of a load for ZeRO stages 1 and 2 tells DeepSpeed's optimizers: a mark of zerostart."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zerostart.upstream.patches import Ticket

#: Fills 1-D tensors with runs of what this rank has of parameters: ``(name, first element, tensor)``.
#: Collective, with the same parameters in the same order; the runs are each rank's own.
RunReader = Callable[[Sequence[tuple[str, int, torch.Tensor]]], None]

_ATTRIBUTE = "_zerostart_flat"


class Keeper(Protocol):
    """What holds the flat buffers of one loaded model.

    ``optimizer`` refers to DeepSpeed's optimizer of the model, once an engine has been made.
    """

    optimizer: weakref.ref[Any] | None

    def bring(self) -> None:
        """Move buffers that wait in host memory to the device; collective."""
        ...

    def adopt(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        partitions: Sequence[int],
        round_robin: bool,
        aligned: bool,
    ) -> list[torch.Tensor | None]:
        """Of each group its flat buffer, with the parameters in it as the optimizer wants them; else None.

        ``partitions`` is the number of ranks that share each group.
        """
        ...


@dataclass(frozen=True)
class Mark:
    """What a parameter tells the engine; it pickles as None, since it means nothing without the buffer."""

    name: str
    keeper: Keeper
    #: How its master is read; None if it is not.
    reader: RunReader | None
    #: Keeps the patches in place while the parameter lives.
    ticket: Ticket

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


def remark(parameter: torch.Tensor, new: Mark) -> None:
    """Change the mark of a parameter."""
    setattr(parameter, _ATTRIBUTE, new)


def marked(parameter: torch.Tensor) -> Mark | None:
    """The mark of a parameter, if it has one."""
    return getattr(parameter, _ATTRIBUTE, None)


def mark_expert_of(parameter: Any, ticket: Ticket) -> None:
    """Mark an expert that ranks share, whose ``group_name`` is that of its process groups."""
    parameter._zerostart_flat_expert = ticket


def expert_of(parameter: Any) -> str | None:
    """The name of the process groups of an expert of ours; None for other parameters."""
    return parameter.group_name if hasattr(parameter, "_zerostart_flat_expert") else None
