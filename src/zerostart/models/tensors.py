"""A model's tensors, by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor ``name``, and its name there."""
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf


def replace_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put ``tensor`` in the place of the parameter or buffer ``name``, past the setters.

    Raises KeyError if there is none.
    """
    owner, leaf = owner_of(model, name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = tensor  # type: ignore[assignment]  # a Parameter, by the caller's care
    elif leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        raise KeyError(name)


def state_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """``(name, tensor, is a buffer)`` of the state dict, tied names included, in its order."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield start + leaf, parameter, False
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield start + leaf, buffer, True


def recast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A meta tensor in another dtype; a parameter stays one, with its marks."""
    cast = torch.empty(tensor.shape, dtype=dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return cast
    parameter = nn.Parameter(cast, requires_grad=tensor.requires_grad and dtype.is_floating_point)
    parameter.__dict__.update(tensor.__dict__)
    return parameter
