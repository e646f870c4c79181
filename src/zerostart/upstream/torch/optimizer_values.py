"""Read and set what optimizers keep besides the states of parameters."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from zerostart.errors import ConfigError

#: What ``torch.optim.Optimizer`` itself has in a state dict, and keeps as attributes.
_COMMON = ("state", "param_groups")


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


def _shell(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer like ``optimizer``, without its states, which engines keep under tensors of their own."""
    shell: object = object.__new__(type(optimizer))
    vars(shell).update(vars(optimizer), state=defaultdict(dict))
    return shell
