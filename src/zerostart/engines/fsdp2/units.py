"""Which modules become FSDP2 units, where parameters of several dtypes are in the way.

FSDP2 wants the trainable parameters of a unit in one dtype, and its policy casts all of a unit alike. So a
module whose parameters differ in dtype from those around it (a router that is kept in fp32 in a bf16 model)
becomes a unit of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.errors import EngineError

_ATTRIBUTE = "_zerostart_computes_in"

#: The dtype in which parameters are held, and the one in which they compute.
Kind = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Unit:
    """A module to be sharded as a unit, and the kind of its own parameters (None: none of them trains)."""

    module: nn.Module
    kind: Kind | None

    def options(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """``given``, arguments of ``fully_shard``, for this unit: its policy casts what it may, and no other.

        What the model keeps in fp32 is neither cast nor fed casts.
        """
        policy = given.get("mp_policy")
        cast_to = policy.param_dtype if policy is not None else None
        if policy is None or cast_to is None or self.kind is None or self.kind[1] == cast_to:
            return given
        kept = replace(policy, param_dtype=None, output_dtype=None, cast_forward_inputs=False)
        return {**given, "mp_policy": kept}


def let_cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Note that a policy may cast ``parameter`` to ``dtype``; one without the note computes as it is held."""
    setattr(parameter, _ATTRIBUTE, dtype)


def scalars_of(model: nn.Module) -> set[nn.Parameter]:
    """The parameters without dimensions, which ``fully_shard`` takes for none of its own if it is told so.

    They are whole on every rank, and not trained: nothing would reduce their gradients.
    """
    return {parameter for parameter in model.parameters() if not parameter.dim()}


def check_frozen(model: nn.Module) -> None:
    """Raise EngineError, naming them, where parameters without dimensions are to be trained."""
    trained = [name for name, p in model.named_parameters() if not p.dim() and p.requires_grad]
    if trained:
        raise EngineError(
            f"FSDP2 cannot train parameters without dimensions ({', '.join(trained[:4])}): it shards none, "
            "and reduces no gradient of one; freeze them (requires_grad_(False)), give them a dimension, "
            "or use engine='deepspeed'"
        )


def _kind(parameter: nn.Parameter) -> Kind:
    return parameter.dtype, getattr(parameter, _ATTRIBUTE, parameter.dtype)


def units_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """The ``blocks`` (innermost first), the model itself, and the modules that must be units beside them.

    What is sharded already is left out. In the order in which they are to be wrapped. Raises EngineError,
    naming the parameters, where one module holds parameters of several dtypes itself.
    """
    names = {id(module): name for name, module in model.named_modules()}
    done = {id(module) for module in model.modules() if isinstance(module, FSDPModule)}
    units: list[Unit] = []
    for block in dict.fromkeys((*blocks, model)):
        if id(block) in done:
            continue
        inner, kind = _split(block, done, names)
        units += [*inner, Unit(block, kind)]
        done.add(id(block))
    return units


def _split(module: nn.Module, done: set[int], names: dict[int, str]) -> tuple[list[Unit], Kind | None]:
    """Units to be made inside ``module``, and the one kind of what is left in it (None: nothing)."""
    own: dict[Kind, str] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and parameter.dim():
            own.setdefault(_kind(parameter), f"{names[id(module)]}.{name}".lstrip("."))
    if len(own) > 1:
        found = ", ".join(f"{name} is {_spelled(kind)}" for kind, name in own.items())
        raise EngineError(
            f"FSDP2 shards a module's own parameters in one dtype, and {type(module).__name__} mixes them: "
            f"{found}. Freeze the smaller ones, or use engine='deepspeed'"
        )
    units: list[Unit] = []
    left: list[tuple[nn.Module, Kind]] = []
    for child in module.children():
        if id(child) not in done:
            inner, kind = _split(child, done, names)
            units += inner
            if kind is not None:
                left.append((child, kind))
    kinds = {kind for _, kind in left} | set(own)
    if len(kinds) < 2:
        return units, next(iter(kinds), None)
    # A parameter of the module itself can be in no other unit; else as few elements as can be move out.
    keep = next(iter(own)) if own else max(kinds, key=lambda kind: _elements(left, kind))
    for child, kind in left:
        if kind != keep:
            parts = _callable_parts(child, done)
            units += [Unit(part, kind) for part in parts]
            done.update(id(part) for part in parts)
    return units, keep


def _spelled(kind: Kind) -> str:
    held, computing = (str(dtype).removeprefix("torch.") for dtype in kind)
    return held if held == computing else f"{held} (computing in {computing})"


def _elements(modules: Sequence[tuple[nn.Module, Kind]], kind: Kind) -> int:
    return sum(p.numel() for module, its in modules if its == kind for p in module.parameters())


def _callable_parts(module: nn.Module, done: set[int]) -> list[nn.Module]:
    """``module``, or what it lists if it is a container that is never called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        parts = [c for c in module.children() if id(c) not in done]
        return [p for child in parts for p in _callable_parts(child, done)]
    return [module] if any(True for _ in module.parameters()) else []
