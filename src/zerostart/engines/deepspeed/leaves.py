"""Experts that are modules of their own, under ZeRO-3: what of a model is gathered as one.

ZeRO-3 gathers a module's parameters when it runs, and reduces gradients as they come, on all ranks alike.
Where each expert is a module and runs only if a token reaches it, ranks whose tokens go to other experts
would wait for each other for ever. DeepSpeed's remedy is a leaf module: its parameters are gathered together
when it runs, and experts that no token has reached get gradients of zero.
"""

from __future__ import annotations

from torch import nn


def expert_leaves(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that run some of several experts, each a module of its own.

    The container called ``experts``, if it is run itself, and else the module that has it.
    """
    found: dict[nn.Module, None] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if "experts" in name and _several(child):
                runs = type(child).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)
                found[child if runs else parent] = None
    return list(found)


def _several(module: nn.Module) -> bool:
    """Whether a module is a list or dictionary of several alike with parameters."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(module) < 2:
        return False
    parts = list(module.children())
    return len({type(part) for part in parts}) == 1 and next(parts[0].parameters(), None) is not None
