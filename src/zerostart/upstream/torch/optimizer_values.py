"""What optimizers keep beside states of parameters, and states that are tensors of a class of theirs."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from zerostart.errors import CheckpointError, ConfigError

#: What ``torch.optim.Optimizer`` itself has in a state dict, and keeps as attributes.
_COMMON = ("state", "param_groups")
#: Classes of tensors made of plain ones, by the package that brings them: torchao's quantised states.
_QUANTISED = {
    f"torchao.optim.{module}.{name}": module
    for module, name in (
        ("subclass_8bit", "OptimState8bit"),
        ("subclass_4bit", "OptimState4bit"),
        ("subclass_fp8", "OptimStateFp8"),
    )
}


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Other optimizers that ``optimizer`` keeps, by the attributes in which they are, lists and dicts too."""
    found = {}
    for name, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value
        for one in several if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(one, torch.optim.Optimizer):
                found[name] = one
    return found


def own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's class adds to a state dict. Raises ConfigError where it cannot be asked."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    try:
        found = _shell(optimizer).state_dict()
        return {key: value for key, value in found.items() if key not in _COMMON}
    except Exception as error:  # its own code, whatever that raises
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} cannot be saved, because its state_dict() "
            f"fails ({error})"
        ) from error


def set_own_values(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Have the class's own ``load_state_dict`` take ``values``; states and groups stay as they are."""
    shell = _shell(optimizer)
    shell.load_state_dict({**shell.state_dict(), **values})
    vars(optimizer).update({key: value for key, value in vars(shell).items() if key not in _COMMON})


def _shell(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer like ``optimizer``, without its states, which engines keep under tensors of their own."""
    shell: object = object.__new__(type(optimizer))
    vars(shell).update(vars(optimizer), state=defaultdict(dict))
    return shell


def taken_apart(tensor: torch.Tensor, where: str) -> tuple[str, dict[str, torch.Tensor], object]:
    """The class of a tensor, the plain tensors that it is made of, and what says how; "" for a plain one.

    Raises ConfigError, naming it by ``where``, for a class that is not known here.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return "", {"": tensor}, None
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if name not in _QUANTISED:
        raise ConfigError(
            f"{where} is a {name}, a tensor of a class that is not known here, and cannot be saved; use "
            "another optimizer, or save its state_dict() by yourself"
        )
    unknown: Any = tensor
    attributes, context = unknown.__tensor_flatten__()
    return name, {key: getattr(tensor, key) for key in attributes}, context


def put_together(
    name: str, parts: Mapping[str, torch.Tensor], context: object, like: torch.Tensor
) -> torch.Tensor:
    """What ``taken_apart`` took apart, a tensor of the size of ``like``; raises CheckpointError."""
    if not name:
        return parts[""]
    kind = getattr(sys.modules.get(f"torchao.optim.{_QUANTISED.get(name)}"), name.rpartition(".")[2], None)
    if kind is None:
        raise CheckpointError(
            f"a state of the optimizer is a {name}, a class that is not imported in this process; "
            "import it before"
        )
    made: torch.Tensor = kind.__tensor_unflatten__(dict(parts), context, like.size(), like.stride())
    return made
