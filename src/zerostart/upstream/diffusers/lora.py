"""Flux's LoRAs in diffusers, which are compared with the shapes of the weights they are for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any

from torch import nn

from zerostart.upstream.guard import Function, Use, demand
from zerostart.upstream.patches import RefCountedPatches, enter_when_imported, replaced

_FLUX = Use(
    "diffusers.loaders.lora_pipeline:FluxLoraLoaderMixin",
    "_maybe_expand_transformer_param_shape_or_error_(transformer, lora_state_dict, norm_state_dict), "
    "_maybe_expand_lora_state_dict(transformer, lora_state_dict)",
    "a LoRA is compared with the shapes of whole weights",
)
TOUCHED = (_FLUX,)

#: A context in which a model shows the shapes of its whole weights; it may raise, for what is to be loaded.
Shown = Callable[[nn.Module, Mapping[str, object]], AbstractContextManager[None]]


class LoraShapes(RefCountedPatches):
    """Has both comparisons run in ``shown(transformer, what is loaded)``."""

    def __init__(self, shown: Shown) -> None:
        super().__init__(self._enter)
        self._shown = shown

    def _enter(self, stack: ExitStack) -> None:
        enter_when_imported(stack, _FLUX.owner.partition(":")[0], self._imported)

    def _imported(self, stack: ExitStack, module: ModuleType) -> None:
        demand(TOUCHED, "zerostart cannot have LoRAs loaded into a Flux in shards")
        owner = module.FluxLoraLoaderMixin
        for name in _FLUX.functions:
            new: Any = classmethod(self._sent(vars(owner)[name].__func__))
            stack.enter_context(replaced(owner, name, new))

    def _sent(self, original: Function) -> Function:
        @functools.wraps(original)
        def call(
            cls: Any, transformer: nn.Module, lora_state_dict: Any = None, *args: object, **kwargs: Any
        ) -> object:
            given = {**(lora_state_dict or {}), **dict(*args[:1]), **kwargs.get("norm_state_dict", {})}
            with self._shown(transformer, given):
                return original(cls, transformer, lora_state_dict, *args, **kwargs)

        return call
