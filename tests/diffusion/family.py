"""Description of a small model of DiffSynth-Studio's own classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """Class returned by ``model()``, its forward ``call(model)``, and its file layout ``to_file``.

    ``converter`` is a function in DiffSynth's ``utils.state_dict_converters``, as ``module:name``.
    """

    model: Callable[[], type[nn.Module]]
    call: Callable[[Any], Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    to_file: Callable[[Tensors], Any] = dict
    converter: str = ""
    trained: bool = False
    pth: bool = False
    dtype: torch.dtype = torch.float32

    def find_converter(self) -> Any:
        """Return the converter, or None without one."""
        module, _, name = self.converter.partition(":")
        return (
            getattr(import_module(f"diffsynth.utils.state_dict_converters.{module}"), name) if name else None
        )


def noise(*shape: int, seed: int = 5, grad: bool = False) -> torch.Tensor:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return tensor.requires_grad_() if grad else tensor


def add_prefix(prefix: str, extra_names: tuple[str, ...] = ()) -> Callable[[Tensors], Tensors]:
    """Return a layout with a name prefix and the extra tensors of another component."""

    def layout(state: Tensors) -> Tensors:
        return {prefix + n: t for n, t in state.items()} | {n: torch.ones(3) for n in extra_names}

    return layout


def remove_prefix(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda state: {name.removeprefix(prefix): tensor for name, tensor in state.items()}
