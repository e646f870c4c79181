"""Whether an optimizer can go on with a state that another one kept: only by the same rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerostart.errors import CheckpointError
from zerostart.state.resuming.values import decoded
from zerostart.upstream.torch.stepped import computes, rule_of

#: Settings that change the rule, with the values that every class computes with.
_USUAL = {"amsgrad": False, "maximize": False, "bias_correction": True}


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The full name of its class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def check_rule(optimizer: torch.optim.Optimizer, document: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless ``optimizer`` steps by the rule by which the state was made."""
    saved_class, own = document["class"], class_of(optimizer)
    if saved_class in ("", own) and document.get("rule", rule_of(optimizer)) == rule_of(optimizer):
        return  # others do not say which it was
    lacking = _lacking(optimizer, document)
    if lacking:
        raise CheckpointError(
            f"the state was saved by {saved_class}, {lacking}, and cannot be resumed: resume "
            "with the optimizer that it was saved with, or load the weights alone (zerostart.load of the "
            "checkpoint's folder model/) and begin with a new optimizer"
        )


def _lacking(optimizer: torch.optim.Optimizer, document: Mapping[str, Any]) -> str:
    """What of the saved one's rule ``optimizer`` has not, in words; empty where it has all."""
    name = class_of(optimizer)
    settings = [group["settings"] for group in document["groups"]]
    numbers = [key for key, value in optimizer.defaults.items() if type(value) in (int, float, tuple)]
    missing = [key for key in numbers if any(key not in setting for setting in settings)]
    if missing:
        return f"which has no {', '.join(missing)} as {name} has"
    saved, own = document.get("rule"), rule_of(optimizer)  # states of before say no rule
    if saved not in (None, own) and not _same_with(optimizer, settings, {saved, own}):
        return f"which steps by the rule of {saved}, and {name} by that of {own}"
    for key, usual in _USUAL.items():
        for setting in settings:
            if setting.get(key, usual) != usual and not computes(optimizer, key):
                return f"with {key}={setting[key]}, which {name} does not go by"
        own_values = {group.get(key, usual) for group in optimizer.param_groups} - {usual}
        if own_values and any(key not in setting for setting in settings):
            return f"which knows no {key}, and {name} has {key}={own_values.pop()}"
    return ""


def _same_with(
    optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]], rules: set[str | None]
) -> bool:
    """Whether two rules are one with these settings: Adam's two with a setting, or without weight decay."""
    if rules != {"Adam", "AdamW"}:
        return False
    told = all("decoupled_weight_decay" in setting for setting in settings)
    return (told and computes(optimizer, "decoupled_weight_decay")) or not any(
        decoded(setting.get("weight_decay"), {}) for setting in settings
    )
