"""Calls of modules whose parameters FSDP2 gathers, as the modules' own code means them.

FSDP2's hooks run around the forward of each unit. They rebuild lists and dicts among the arguments where
tensors are cast, moved or need gradients. Other methods than the forward run without them, and so does a
unit's module that is called while its unit is not.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from zerostart.engines.calls import (
    OutsideInferenceMode,
    Rebuilt,
    find_rebuilt,
    leave_inference_mode,
    write_back,
)
from zerostart.engines.fsdp2.units import find_scalars, refuse_trained_scalars
from zerostart.errors import EngineError
from zerostart.models import Alias
from zerostart.upstream.torch.fsdp2 import begin_at, has_sharded_parameters, in_backward
from zerostart.upstream.types import Arguments, Keywords


def keep_calls(model: nn.Module, entries: Sequence[str]) -> None:
    """Give units the caller's own containers, and gather no inference tensors.

    ``entries`` are methods next to the forward that run the model, and that need its parameters gathered too.
    A unit may also be called while the model is not running.
    """
    root = _Root(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            guard = _UnitHooks(root.begin)
            # Two hooks around FSDP2's own pre-hook: one before it has rebuilt the arguments, one after.
            module.register_forward_pre_hook(guard.before, prepend=True, with_kwargs=True)
            module.register_forward_pre_hook(guard.within, with_kwargs=True)
            module.register_forward_hook(guard.after, always_call=True)
            if module is model:
                root.running = guard.running
                for name in entries:
                    _add_entry(module, name, guard)


class _Root:
    """A model whose units, and modules outside the units, may be called while it does not run.

    FSDP2 gathers the parameters outside all units, such as an embedding, only in the model's forward, and
    reduces their gradients there. PEFT's prompt tuning and other wrappers call such modules directly.
    """

    def __init__(self, model: nn.Module) -> None:
        self.running: Sequence[object] = ()
        self._model = model
        self._begun = self._has_gradients = False
        units = (m for m in model.modules() if m is not model and isinstance(m, FSDPModule))
        inside = {id(parameter) for unit in units for parameter in unit.parameters()}
        own = {m: name for name, m in model.named_modules() if _holds_any(m, inside)}
        # Pipelines read a model's own few parameters, such as a padding token, between calls.
        self._is_bare = list(own) == [model]
        self._scalars = bool(find_scalars(model))
        for module, name in own.items():
            if module is not model:
                module.register_forward_pre_hook(functools.partial(self._gather, name))

    def __deepcopy__(self, memo: object) -> _Root:
        """Return itself: PEFT copies modules with their hooks, which belong to the same model."""
        return self

    def begin(self, module: nn.Module) -> None:
        """Prepare the model for the unit ``module``, and gather the model's own few parameters.

        Raises EngineError if these are to be trained, or any without dimensions.
        """
        if self._scalars and torch.is_grad_enabled():
            refuse_trained_scalars(self._model)
        if not self._begun:
            begin_at(self._model)
            self._begun = True
        if module is self._model:
            self._has_gradients = torch.is_grad_enabled()
        if self._is_bare:
            self._gather("", self._model)

    def _gather(self, name: str, module: nn.Module, *_: object) -> None:
        # A layer that runs again in the backward of a checkpoint ran inside the model's forward, or has
        # passed here before. A gather in the middle of a backward would outlast the step.
        if self.running or in_backward() or not isinstance(self._model, FSDPModule):
            return
        reduces = self._has_gradients and not has_sharded_parameters(self._model)
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(recurse=False))
        if trains and not reduces:
            title = type(self._model).__name__.removeprefix("FSDP")
            raise EngineError(
                f"the parameters of {name or title} are used outside the forward of {title}, and FSDP2 "
                "gathers them and reduces their gradients only there: call model(...) itself, and not its "
                "parts or model.forward(...), freeze them, or use engine='deepspeed'"
            )
        self._model.unshard()


def _holds_any(module: nn.Module, inside: set[int]) -> bool:
    """Return whether ``module`` itself holds parameters with dimensions that are not ``inside``."""
    return any(p.dim() and id(p) not in inside for p in module.parameters(recurse=False))


class _UnitHooks:
    """The hooks of one unit, before and after the engine's."""

    def __init__(self, begin: Callable[[nn.Module], None]) -> None:
        self.begin = begin
        self.running: list[_Frame] = []

    def before(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> Any:
        left, args, kwargs = leave_inference_mode(args, kwargs)
        self.running.append(_Frame(left, (args, kwargs)))
        self.begin(module)
        return args, kwargs

    def within(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        # The innermost call: a module may be called again within its own forward.
        self.running[-1].compare(args, kwargs)

    def after(self, module: nn.Module, args: Any, output: object) -> None:
        if self.running:
            self.running.pop().end()


class _Frame:
    """One running call of a unit."""

    def __init__(
        self, outside: OutsideInferenceMode | None, arguments: tuple[tuple[object, ...], dict[str, object]]
    ) -> None:
        self._left = outside
        self._given = arguments
        self._pairs: list[Rebuilt] = []

    def compare(self, args: Arguments, kwargs: Keywords) -> None:
        given_args, given_kwargs = self._given
        self._pairs = list(find_rebuilt(given_args, args))
        for key in given_kwargs.keys() & kwargs.keys():
            self._pairs += find_rebuilt(given_kwargs[key], kwargs[key])

    def end(self) -> None:
        write_back(self._pairs)
        if self._left is not None:
            self._left.close()


def _add_entry(model: nn.Module, name: str, guard: _UnitHooks) -> None:
    plain = getattr(model, name)

    @functools.wraps(plain)
    def within(self: nn.Module, *args: Any, **kwargs: object) -> Any:
        guard.within(self, args, kwargs)
        return plain(*args, **kwargs)

    # Innermost: FSDP2 wraps the present method, so ``within`` sees FSDP2's arguments.
    setattr(model, name, types.MethodType(within, model))
    register_fsdp_forward_method(model, name)
    gathering = getattr(model, name)

    @functools.wraps(plain)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if guard.running:
            return plain(*args, **kwargs)
        try:
            args, kwargs = guard.before(self, args, kwargs)
            return gathering(*args, **kwargs)
        finally:
            guard.after(self, args, None)

    setattr(model, name, types.MethodType(run, model))


# Other places of a module's parameter. FSDP2 puts the gathered parameter into its module before the module
# runs, and the sharded one back afterwards. It does so with ``setattr`` for classes that override
# ``__setattr__``, such as torch's recurrent layers, which keep lists of their weights. The modules here
# follow that pattern for parameters that other places hold too.

_ATTRIBUTE = "_zerostart_aliases"


def update_aliases(model: nn.Module, aliases: Sequence[Alias]) -> None:
    """Keep each alias equal to the parameter of its name in ``model``."""
    for alias in aliases:
        path, _, leaf = alias.name.rpartition(".")
        module = model.get_submodule(path)
        if leaf not in module._parameters:
            continue
        if _ATTRIBUTE not in vars(module):
            vars(module)[_ATTRIBUTE] = {}
            module.__class__ = _following(type(module))  # type: ignore[arg-type]  # a class is hashable
        vars(module)[_ATTRIBUTE].setdefault(leaf, []).append(alias)


@functools.cache
def _following(kind: type[nn.Module]) -> type[nn.Module]:
    def set_attribute(self: nn.Module, name: str, value: torch.Tensor | nn.Module) -> None:
        # The module first: an alias follows the module's final value.
        kind.__setattr__(self, name, value)
        for alias in vars(self)[_ATTRIBUTE].get(name, ()):
            alias.follow(value)

    return type(kind.__name__, (kind,), {"__setattr__": set_attribute, "__module__": kind.__module__})


# ZeRO stages in FSDP2. Every stage from 1 on shards parameters at rest; the stages differ in how long
# parameters and gradients are whole. Stage 3 gathers a unit for its forward and again for its backward. At
# stage 2 it remains gathered in between. At stage 1 each rank also sums whole gradients, and parameters
# remain gathered, until the last of the accumulated batches.


def begin_batch(model: FSDPModule, zero_stage: int, last: bool) -> None:
    """Prepare the forward of one of the accumulated batches of a step.

    ``last`` is true for the batch before the optimizer's step: for every batch without accumulation.
    """
    # Stage 2 reduces the gradients of every batch, and holds its share of the sum.
    reduces = last or zero_stage == 2
    model.set_requires_gradient_sync(reduces)
    if zero_stage == 1:
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
