"""Protect calls of modules whose parameters ZeRO-3 gathers.

``deepspeed.initialize`` registers hooks on every module. They rebuild lists among the positional arguments,
change dicts there, and keep keyword arguments as they are. The load registers its hooks earlier, so they run
first.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from zerostart.engines.calls import OutsideInferenceMode, has_containers, leave_inference_mode
from zerostart.errors import EngineError
from zerostart.upstream.deepspeed.construction import check_called
from zerostart.upstream.guard import Function
from zerostart.upstream.types import Arguments, DeepSpeedConfig, Keywords


def keep_calls(model: nn.Module) -> None:
    """Pass the caller's lists and dicts to every module, and gather no inference tensors."""
    for module in model.modules():
        guard = _ModuleHooks()
        module.register_forward_pre_hook(guard.before, with_kwargs=True)
    for name, module in model.named_modules():
        if "experts" in name and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(_check_reached, with_kwargs=True)


def _check_reached(module: nn.Module, args: Arguments, kwargs: Keywords, output: object) -> None:
    """Raise EngineError for trained or adapted experts if no input has a gradient.

    ZeRO-3 would fail in their backward.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    trained = isinstance(output, torch.Tensor) and output.requires_grad
    if trained and not any(value.requires_grad for value in tensors):
        raise EngineError(
            f"{type(module).__name__} is trained, but no layer before it is, which DeepSpeed's ZeRO-3 "
            "does not support: call model.enable_input_require_grads() before deepspeed.initialize, "
            "or use zero_stage=2"
        )


class _ModuleHooks:
    """The hooks of one module."""

    def __init__(self) -> None:
        self._left: list[OutsideInferenceMode | None] = []
        self._follows = False

    def before(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> Any:
        """Leave inference mode, and pass containers by keyword.

        Raises EngineError where no engine gathers the partitions.
        """
        # Before all other hooks: an ungathered module would fail later with a shape of 0.
        check_called(module)
        left, args, kwargs = leave_inference_mode(args, kwargs)
        if left is not None and not self._follows:
            # Only now, so that it runs after the engine's hooks, which release the gathered parameters.
            module.register_forward_hook(self.after, always_call=True)
            self._follows = True
        if self._follows:
            self._left.append(left)
        if not has_containers(args):
            return None if left is None else (args, kwargs)
        names = _names(module)
        first = next(n for n, value in enumerate(args) if has_containers((value,)))
        if len(args) > len(names):  # values of *args have no name
            return args, kwargs
        # DeepSpeed rebuilds containers among positional arguments and passes keywords unchanged.
        return args[:first], {**dict(zip(names[first:], args[first:], strict=False)), **kwargs}

    def after(self, module: nn.Module, args: Any, output: object) -> None:
        """Enter inference mode again, after the engine's hooks."""
        outside = self._left.pop() if self._left else None
        if outside is not None:
            outside.close()


def _names(module: nn.Module) -> tuple[str, ...]:
    own = vars(module).get("forward")
    if own is not None:  # not kept: it has the module, which would outlive its model
        names = _positional(own)
        return names[1:] if names[:1] == ("self",) else names  # of a function that is not bound
    kind: Any = type(module)
    return _of_class(kind)


@functools.lru_cache(maxsize=1024)
def _of_class(kind: type[nn.Module]) -> tuple[str, ...]:
    return _positional(kind.forward)[1:]


def _positional(forward: Function) -> tuple[str, ...]:
    """Return the parameters' names in order; none if one is positional-only."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = list(inspect.signature(forward).parameters.values())
    if any(parameter.kind is inspect.Parameter.POSITIONAL_ONLY for parameter in parameters):
        return ()
    return tuple(parameter.name for parameter in parameters if parameter.kind is named)


# Inference with ZeRO-3 partitions.

#: Sections of a training configuration that an engine without an optimizer accepts.
_INFERENCE_SECTIONS = ("zero_optimization", "bf16", "fp16", "communication_data_type", "prescale_gradients")


def start_inference(model: nn.Module, config: DeepSpeedConfig | None) -> None:
    """Register ZeRO-3's hooks on the frozen ``model``; collective.

    The module itself is called afterwards, not the engine of ``deepspeed.initialize``, which lives as long as
    the module.
    """
    import deepspeed

    model.requires_grad_(False)
    own = {name: value for name, value in (config or {}).items() if name in _INFERENCE_SECTIONS}
    own["zero_optimization"] = {**own.get("zero_optimization", {}), "stage": 3}
    own["train_micro_batch_size_per_gpu"] = 1
    engine, *_ = deepspeed.initialize(model=model, config=own)
    # Not registered as a child: the model would contain itself.
    vars(model)["_zerostart_engine"] = engine
