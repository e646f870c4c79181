"""Which modules become FSDP2 units, where parameters of several dtypes are in the way.

FSDP2 wants the trainable parameters of a unit in one dtype, and its policy casts all of a unit alike. So a
module whose parameters differ in dtype from those around it (a router that is kept in fp32 in a bf16 model)
becomes a unit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerostart.errors import EngineError

__all__ = ["Unit", "computing_dtype", "hold_master", "units_of"]

_ATTRIBUTE = "_zerostart_computes_in"


@dataclass(frozen=True)
class Unit:
    """A module to be sharded as a unit, and the dtype in which its own parameters compute."""

    module: nn.Module
    dtype: torch.dtype | None


def hold_master(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Note that ``parameter`` is the master of one that computes in ``dtype``."""
    setattr(parameter, _ATTRIBUTE, dtype)


def computing_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype in which a parameter that the model loads is computed with: its own, or its copy's."""
    found: torch.dtype = getattr(parameter, _ATTRIBUTE, parameter.dtype)
    return found


def units_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """The ``blocks`` (innermost first), the model itself, and the modules that must be units beside them.

    In the order in which they are to be wrapped. Raises EngineError, naming the parameters, where one module
    holds parameters of several dtypes itself.
    """
    names = {id(module): name for name, module in model.named_modules()}
    done: set[int] = set()
    units: list[Unit] = []
    for block in dict.fromkeys((*blocks, model)):
        inner, dtype = _split(block, done, names)
        units += [*inner, Unit(block, dtype)]
        done.add(id(block))
    return units


def _split(module: nn.Module, done: set[int], names: dict[int, str]) -> tuple[list[Unit], torch.dtype | None]:
    """Units to be made inside ``module``, and the one dtype of what is left in it (None: nothing)."""
    own: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            own.setdefault(computing_dtype(parameter), f"{names[id(module)]}.{name}".lstrip("."))
    if len(own) > 1:
        found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in own.items())
        raise EngineError(
            f"FSDP2 shards a module's own parameters in one dtype, and {type(module).__name__} mixes them: "
            f"{found}. Freeze the smaller ones, or use engine='deepspeed'"
        )
    units: list[Unit] = []
    left: list[Unit] = []
    for child in module.children():
        if id(child) not in done:
            inner, dtype = _split(child, done, names)
            units += inner
            if dtype is not None:
                left.append(Unit(child, dtype))
    dtypes = {unit.dtype for unit in left} | set(own)
    if len(dtypes) < 2:
        return units, next(iter(dtypes), None)
    # A parameter of the module itself can be in no other unit; else as few elements as can be move out.
    keep = next(iter(own)) if own else max(dtypes, key=lambda dtype: _elements(left, dtype))
    for unit in left:
        if unit.dtype != keep:
            for part in _callable_parts(unit.module, done):
                units.append(Unit(part, unit.dtype))
                done.add(id(part))
    return units, keep


def _elements(units: Sequence[Unit], dtype: torch.dtype | None) -> int:
    return sum(p.numel() for unit in units if unit.dtype == dtype for p in unit.module.parameters())


def _callable_parts(module: nn.Module, done: set[int]) -> list[nn.Module]:
    """``module``, or what it lists if it is a container that is never called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        parts = [c for c in module.children() if id(c) not in done]
        return [p for child in parts for p in _callable_parts(child, done)]
    return [module] if any(True for _ in module.parameters()) else []
