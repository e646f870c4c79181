"""What an optimizer keeps beside the states of its parameters: kept with it, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerostart.errors import CheckpointError, ConfigError
from zerostart.state.resuming.rules import class_of
from zerostart.state.resuming.values import decoded, encoded_whole
from zerostart.upstream.torch.optimizer_values import inner_optimizers, own_values, set_own_values
from zerostart.upstream.torch.stepped import Stepped

#: What its class adds to a state dict, and what lies in its ``state`` under no parameter.
_VALUES, _STATE = "values", "state"


def own_of(steps: Sequence[Stepped], plain: bool, tensors: dict[str, torch.Tensor]) -> Any:
    """What the optimizers keep beside, each by its place among them, as ``encoded_whole`` has it.

    ``plain``: what they step are parameters. Raises ConfigError for what would be lost.
    """
    found = {}
    for number, optimizer in enumerate(_optimizers(steps)):
        check_alone(optimizer)
        own = own_values(optimizer)
        state = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        if plain:
            stepped = {id(step.tensor) for step in steps}
            others = [k for k, v in optimizer.state.items() if isinstance(k, torch.Tensor) and v]
            if any(id(key) not in stepped for key in others):
                raise ConfigError(
                    f"the optimizer {type(optimizer).__name__} has a state of a tensor that none of its "
                    "groups has, and it would be lost: remove it from optimizer.state, or give it a group"
                )
        if own or state:
            found[str(number)] = {_VALUES: own, _STATE: state}
    return encoded_whole(found, "optimizer", tensors) if found else {}


def check_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer around another one, of which two states would have to be kept."""
    for name, inner in inner_optimizers(optimizer).items():
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} keeps another one, a {type(inner).__name__}, in its "
            f"attribute {name}, whose state is not saved with it: give the inner one as optimizer and what "
            "the outer one keeps in extra, or train with one optimizer"
        )


def check_own(steps: Sequence[Stepped], document: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the running optimizers take what the saved ones kept beside.

    ConfigError for an optimizer around another one.
    """
    optimizers = _optimizers(steps)
    for optimizer in optimizers:
        check_alone(optimizer)
    if document.get("own") and any(class_of(one) != document["class"] for one in optimizers):
        raise CheckpointError(
            f"the state was saved by {document['class']}, which keeps values of its own beside the states of "
            "parameters, and cannot be resumed with another class: resume with the optimizer that it was "
            "saved with"
        )


def restore_own(
    steps: Sequence[Stepped], document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give the optimizers what ``own_of`` had of them."""
    found = decoded(document.get("own", {}), tensors)
    for number, optimizer in enumerate(_optimizers(steps)):
        for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
            del optimizer.state[key]
        if str(number) in found:
            optimizer.state.update(found[str(number)][_STATE])
            if found[str(number)][_VALUES]:
                set_own_values(optimizer, found[str(number)][_VALUES])


def _optimizers(steps: Sequence[Stepped]) -> list[torch.optim.Optimizer]:
    return list({id(step.optimizer): step.optimizer for step in steps}.values())
