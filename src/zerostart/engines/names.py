"""Names of parameters as they were loaded, where wrappers inside the model have changed them since."""

from __future__ import annotations

from torch import nn

#: Names under which torch.compile, activation checkpointing and PEFT's layers keep what they wrap.
_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "base_layer"})


def plain_name(name: str) -> str:
    """Return ``name`` without the parts that wrappers of the model have added."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def loaded_names(model: nn.Module) -> dict[str, str]:
    """Of each name of a parameter, aliases included, the first one that it was loaded under."""
    first: dict[int, str] = {}
    return {
        alias: plain_name(first.setdefault(id(parameter), alias))
        for alias, parameter in model.named_parameters(remove_duplicate=False)
    }
