"""One small model of DiffSynth-Studio's own classes: how it is built, stored and called. For ranks alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One class: ``model()`` gives it, ``call(model)`` runs it; ``stored`` is the layout of its file.

    ``converter`` is the name of DiffSynth's in ``utils.state_dict_converters``, with its module.
    """

    model: Callable[[], type[nn.Module]]
    call: Callable[[Any], Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    stored: Callable[[Tensors], Any] = dict
    converter: str = ""
    trained: bool = False
    pth: bool = False
    dtype: torch.dtype = torch.float32

    def convert(self) -> Any:
        """The converter itself, None without one."""
        module, _, name = self.converter.partition(":")
        return (
            getattr(import_module(f"diffsynth.utils.state_dict_converters.{module}"), name) if name else None
        )


def noise(*shape: int, seed: int = 5, grad: bool = False) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_() if grad else made


def prefixed(prefix: str, others: tuple[str, ...] = ()) -> Callable[[Tensors], Tensors]:
    """Under a prefix, with tensors of another component beside it."""

    def stored(state: Tensors) -> Tensors:
        return {prefix + n: t for n, t in state.items()} | {n: torch.ones(3) for n in others}

    return stored


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda state: {name.removeprefix(prefix): tensor for name, tensor in state.items()}
