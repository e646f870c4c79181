"""PEFT's adapters: where they are put into a model, merged into its weights, and read out of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.upstream.guard import Function, Use
from zerostart.upstream.patches import (
    RefCountedPatches,
    enter_when_imported,
    fits,
    replaced,
    replaced_everywhere,
)

if TYPE_CHECKING:
    import torch
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

_LAYERS = "peft.tuners.tuners_utils"
_INJECTED = Use(
    "peft.tuners.tuners_utils:BaseTuner",
    "inject_adapter(model, adapter_name)",
    "adapters that are put into a model in shards are the same on every rank",
)
_SIZES = Use(_LAYERS, "_get_in_out_features(module)", "a layer in shards computes with its whole weight")
_MERGED = Use(
    "peft.tuners.tuners_utils:BaseTunerLayer",
    "merge, unmerge, enable_adapters(enabled)",
    "a weight in shards is whole while PEFT adds an adapter to it",
)
_READ = Use(
    "peft.utils.save_and_load",
    "get_peft_model_state_dict(model, state_dict, adapter_name)",
    "adapters in shards are put together",
)
_GATHERED = Use(
    "peft.utils.integrations",
    "check_deepspeed_zero3_enabled",
    "adapters that begin with values of a weight gather it",
)
_TOKENS = Use(
    "peft.tuners.trainable_tokens.layer:TrainableTokensLayer",
    "_collect_token_weights(weight, rows, embed_dim)",
    "rows of what is not partitioned are at hand",
)
_PROMPTS = Use(
    "peft.peft_model:PeftModel",
    "_setup_prompt_encoder(adapter_name)",
    "what stands around a model in shards is the same on every rank",
)
_REMEDY = "zerostart cannot take over adapters of models in shards"

#: What the dimension of a mesh is called whose ranks compute with a part of a weight.
_CUTTING = {"tensor", "tp"}
#: Kinds of ``init_lora_weights`` that look at no weight; the others that are named do.
_OWN_BEGIN = ("gaussian", "eva", "orthogonal")


class AdapterLayer(nn.Module):
    """``BaseTunerLayer``, for who reads the types."""

    merged: bool

    def unmerge(self) -> None:
        """Take what is merged out of the weight."""


#: ``around(original, model, of_values)`` for a call that puts an adapter into ``model``, which may be one
#: that begins with values of its weights.
Injecting = Callable[[Callable[[], object], nn.Module, bool], object]
#: ``around(original, layer, what)`` for a layer's own ``merge`` or ``unmerge``.
Merging = Callable[[Callable[[], object], object, str], object]
#: ``around(original, model)`` for a call that puts a prompt's encoder beside the model inside ``model``.
Surrounding = Callable[[Callable[[], object], nn.Module], object]
#: ``instead(original, model, **arguments)`` for ``get_peft_model_state_dict``.
Reading = Function


class AdapterCalls(RefCountedPatches):
    """Has the calls go to functions that are given the original, and told when a layer is switched off."""

    def __init__(
        self,
        injecting: Injecting,
        surrounding: Surrounding,
        merging: Merging,
        disabling: Callable[[BaseTunerLayer], None],
        reading: Reading,
    ) -> None:
        super().__init__(self._enter)
        self._surrounding = surrounding
        self._disabling = disabling
        self._injecting = injecting
        self._merging = merging
        self._reading = reading
        self._classes: set[tuple[type, str]] = set()

    def _enter(self, stack: ExitStack) -> None:
        stack.callback(self._classes.clear)
        for uses, imported in (
            ((_INJECTED, _SIZES, _MERGED), self._layers_imported),
            ((_GATHERED,), self._gathers),
            ((_TOKENS,), self._collects),
            ((_READ,), self._files_imported),
            ((_PROMPTS,), self._prompts),
        ):
            module = uses[0].owner.partition(":")[0]
            enter_when_imported(stack, module, functools.partial(self._imported, uses, imported))

    def _imported(
        self,
        uses: tuple[Use, ...],
        serve: Callable[[ExitStack, ModuleType], None],
        stack: ExitStack,
        module: ModuleType,
    ) -> None:
        if fits(stack, self, uses, _REMEDY):
            serve(stack, module)

    def _layers_imported(self, stack: ExitStack, module: ModuleType) -> None:
        name = "_get_in_out_features"
        measured = getattr(module, name)
        stack.enter_context(replaced_everywhere(name, measured, _measures(measured)))
        original = module.BaseTuner.inject_adapter

        @functools.wraps(original)
        def inject(
            tuner: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: object
        ) -> object:
            original_call = functools.partial(original, tuner, model, adapter_name, *args, **kwargs)
            config = tuner.peft_config[adapter_name]
            begins = getattr(config, "init_lora_weights", True)
            of_values = isinstance(begins, str) and begins not in _OWN_BEGIN
            of_norms = bool(getattr(config, "use_dora", False))
            found = self._injecting(original_call, model, of_values or of_norms)
            for kind in {type(m) for m in model.modules() if isinstance(m, module.BaseTunerLayer)}:
                self._serve(stack, kind)
            return found

        stack.enter_context(replaced(module.BaseTuner, "inject_adapter", inject))
        switched = module.BaseTunerLayer.enable_adapters

        @functools.wraps(switched)
        def switch(layer: BaseTunerLayer, enabled: bool) -> Any:
            if not enabled:
                self._disabling(layer)
            return switched(layer, enabled)

        stack.enter_context(replaced(module.BaseTunerLayer, "enable_adapters", switch))

    def _serve(self, stack: ExitStack, kind: type) -> None:
        for owner, name in self._own(kind):
            self._classes.add((owner, name))
            stack.enter_context(replaced(owner, name, self._sent(vars(owner)[name], name)))

    def _own(self, kind: type) -> Iterator[tuple[type, str]]:
        for owner in kind.__mro__:
            for name in ("merge", "unmerge"):
                if name in vars(owner) and (owner, name) not in self._classes:
                    yield owner, name

    def _sent(self, original: Function, name: str) -> Function:
        @functools.wraps(original)
        def call(layer: BaseTunerLayer, *args: Any, **kwargs: Any) -> object:
            return self._merging(functools.partial(original, layer, *args, **kwargs), layer, name)

        return call

    def _gathers(self, stack: ExitStack, module: ModuleType) -> None:
        name = "check_deepspeed_zero3_enabled"
        original = getattr(module, name)

        @functools.wraps(original)
        def enabled() -> bool:
            # PEFT asks whether ZeRO-3 is configured; GatheredParameters ignores what is not partitioned.
            return original() or "deepspeed" in sys.modules

        stack.enter_context(replaced_everywhere(name, original, enabled))

    def _prompts(self, stack: ExitStack, module: ModuleType) -> None:
        name = "_setup_prompt_encoder"
        original = getattr(module.PeftModel, name)

        @functools.wraps(original)
        def set_up(model: nn.Module, adapter_name: str) -> Any:
            return self._surrounding(functools.partial(original, model, adapter_name), model)

        stack.enter_context(replaced(module.PeftModel, name, set_up))

    def _files_imported(self, stack: ExitStack, module: ModuleType) -> None:
        name = "get_peft_model_state_dict"
        original = getattr(module, name)

        @functools.wraps(original)
        def read(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._reading(original, model, *args, **kwargs)

        stack.enter_context(replaced_everywhere(name, original, read))

    def _collects(self, stack: ExitStack, module: ModuleType) -> None:
        name = "_collect_token_weights"
        original = getattr(module.TrainableTokensLayer, name)

        @functools.wraps(original)
        def collect(
            layer: TrainableTokensLayer, weight: torch.Tensor, rows: torch.Tensor, embed_dim: int
        ) -> Any:
            return (
                original(layer, weight, rows, embed_dim) if hasattr(weight, "ds_id") else layer.weight[rows]
            )

        stack.enter_context(replaced(module.TrainableTokensLayer, name, collect))


def _measures(original: Function) -> Function:
    @functools.wraps(original)
    def sizes(module: nn.Module) -> Any:
        weight = module.weight if isinstance(module, nn.Linear) else None
        # Sharded by FSDP2 alone: PEFT would take the local shape, and the layer computes with the whole.
        if isinstance(weight, DTensor) and not _CUTTING & {*(weight.device_mesh.mesh_dim_names or ())}:
            return module.in_features, module.out_features
        return original(module)

    return sizes
