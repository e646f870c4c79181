"""Inject, merge and read adapters of PEFT in sharded models."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.upstream.guard import Function, Use
from zerostart.upstream.patches import RefCountedPatches, check_compatible, enter_on_import, wrap

if TYPE_CHECKING:
    import torch
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

_INJECTED = Use(
    "peft.tuners.tuners_utils:BaseTuner",
    "inject_adapter(model, adapter_name)",
    "adapters that are added to a sharded model are the same on every rank",
)
_SIZES = Use(
    "peft.tuners.tuners_utils",
    "_get_in_out_features(module), cast_adapter_dtype(model, adapter_name)",
    "a sharded layer has the sizes of its whole weight; adapters that are cast keep the engine's attributes",
)
_MERGED = Use(
    "peft.tuners.tuners_utils:BaseTunerLayer",
    "merge, unmerge, enable_adapters(enabled)",
    "a sharded weight is gathered while PEFT merges an adapter into it",
)
_READ = Use(
    "peft.utils.save_and_load",
    "get_peft_model_state_dict(model, state_dict, adapter_name)",
    "sharded adapters are gathered",
)
_GATHERED = Use(
    "peft.utils.integrations",
    "check_deepspeed_zero3_enabled",
    "adapters that are computed from a weight gather it",
)
_TOKENS = Use(
    "peft.tuners.trainable_tokens.layer:TrainableTokensLayer",
    "_collect_token_weights(weight, rows, embed_dim)",
    "rows of weights that ZeRO-3 does not partition are read without a gather",
)
_PROMPTS = Use(
    "peft.peft_model:PeftModel",
    "_setup_prompt_encoder(adapter_name)",
    "prompt encoders of a sharded model are the same on every rank",
)
_FACTORS = Use(
    "peft.tuners.lora.layer:ParamWrapper",
    "update_layer(adapter_name), _activate_lora(active_adapters), get_delta_factors(adapter_name), "
    "get_base_layer, get_param, .lora_A, .lora_B, .num_experts, .parameter_name",
    "adapters of experts that ranks share have the factors of each rank's experts",
)
_REMEDY = "zerostart cannot handle adapters of sharded models"

#: Names of mesh dimensions whose ranks compute with a part of a weight.
_CUTTING = {"tensor", "tp"}
#: Values of ``init_lora_weights`` that do not use a weight.
_OWN_BEGIN = ("gaussian", "eva", "orthogonal")


#: ``around(original, model, of_values, copied)`` for the injection of an adapter. ``of_values`` is True if it
#: is computed from weights. ``copied`` are suffixes of the names of modules that it copies.
Injecting = Callable[[Callable[[], object], nn.Module, bool, Sequence[str]], object]
#: ``around(original, layer, name)`` for ``merge`` or ``unmerge`` of a layer.
Merging = Callable[[Callable[[], object], object, str], object]
#: ``around(original, model)`` for the creation of a prompt encoder in ``model``, or a cast of its adapters.
Surrounding = Callable[[Callable[[], object], nn.Module], object]
#: ``around(original, layer, adapter)`` for the factors of a layer around experts.
Factoring = Callable[[Callable[[], object], Any, str], None]
#: ``change(layer, adapters)`` returns a context in which the layer's experts have the adapters added, or None
#: for PEFT's own.
Activating = Callable[[Any, Sequence[str]], AbstractContextManager[None] | None]
#: ``instead(original, model, **arguments)`` for ``get_peft_model_state_dict``.
Reading = Function


class AdapterCalls(RefCountedPatches):
    """Patches that replace functions of PEFT; each replacement gets the original call."""

    def __init__(
        self,
        injecting: Injecting,
        surrounding: Surrounding,
        merging: Merging,
        disabling: Callable[[BaseTunerLayer], None],
        reading: Reading,
        factoring: Factoring,
        activating: Activating,
        casting: Surrounding,
    ) -> None:
        super().__init__(self._enter)
        self._casting = casting
        self._factoring = factoring
        self._activating = activating
        self._surrounding = surrounding
        self._disabling = disabling
        self._injecting = injecting
        self._merging = merging
        self._reading = reading
        self._classes: set[tuple[type, str]] = set()

    def _enter(self, stack: ExitStack) -> None:
        stack.callback(self._classes.clear)
        for uses, imported in (
            ((_INJECTED, _SIZES, _MERGED), self._wrap_layers),
            ((_GATHERED,), _wrap_gathering),
            ((_TOKENS,), _wrap_tokens),
            ((_READ,), self._wrap_reading),
            ((_PROMPTS,), self._wrap_prompts),
            ((_FACTORS,), self._wrap_factors),
        ):
            module = uses[0].owner.partition(":")[0]
            enter_on_import(stack, module, functools.partial(self._imported, uses, imported))

    def _imported(
        self,
        uses: tuple[Use, ...],
        serve: Callable[[ExitStack, ModuleType], None],
        stack: ExitStack,
        module: ModuleType,
    ) -> None:
        if check_compatible(stack, self, uses, _REMEDY):
            serve(stack, module)

    def _wrap_layers(self, stack: ExitStack, module: ModuleType) -> None:
        wrap(stack, module, "_get_in_out_features", _measure, everywhere=True)
        wrap(stack, module, "cast_adapter_dtype", self._cast, everywhere=True)
        wrap(stack, module.BaseTuner, "inject_adapter", functools.partial(self._inject, stack, module))
        wrap(stack, module.BaseTunerLayer, "enable_adapters", self._switch)

    def _inject(
        self,
        stack: ExitStack,
        module: ModuleType,
        original: Function,
        tuner: BaseTuner,
        model: nn.Module,
        adapter_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        original_call = functools.partial(original, tuner, model, adapter_name, *args, **kwargs)
        config = tuner.peft_config[adapter_name]
        begins = getattr(config, "init_lora_weights", True)
        of_values = isinstance(begins, str) and begins not in _OWN_BEGIN
        of_norms = bool(getattr(config, "use_dora", False))
        copied = getattr(config, "modules_to_save", None) or ()
        result = self._injecting(original_call, model, of_values or of_norms, copied)
        kinds = {type(m) for m in model.modules() if isinstance(m, module.BaseTunerLayer)}
        for owner, name in itertools.product((o for k in kinds for o in k.__mro__), ("merge", "unmerge")):
            if name in vars(owner) and (owner, name) not in self._classes:
                self._classes.add((owner, name))
                wrap(stack, owner, name, self._merge)
        return result

    def _switch(self, original: Function, layer: BaseTunerLayer, enabled: bool) -> Any:
        if not enabled:
            self._disabling(layer)
        return original(layer, enabled)

    def _merge(self, original: Function, layer: BaseTunerLayer, *args: Any, **kwargs: Any) -> object:
        call = functools.partial(original, layer, *args, **kwargs)
        return self._merging(call, layer, original.__name__)

    def _wrap_prompts(self, stack: ExitStack, module: ModuleType) -> None:
        wrap(stack, module.PeftModel, "_setup_prompt_encoder", self._set_up)

    def _set_up(self, original: Function, model: nn.Module, adapter_name: str) -> Any:
        return self._surrounding(functools.partial(original, model, adapter_name), model)

    def _wrap_factors(self, stack: ExitStack, module: ModuleType) -> None:
        wrap(stack, module.ParamWrapper, "update_layer", self._factor)
        wrap(stack, module.ParamWrapper, "_activate_lora", self._activate)

    def _factor(self, original: Function, layer: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        call = functools.partial(original, layer, adapter_name, *args, **kwargs)
        self._factoring(call, layer, adapter_name)

    def _activate(self, original: Function, layer: Any, active_adapters: Sequence[str]) -> Any:
        adapters = [adapter for adapter in active_adapters if adapter in layer.lora_A]
        return self._activating(layer, adapters) or original(layer, active_adapters)

    def _cast(self, original: Function, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._casting(functools.partial(original, model, *args, **kwargs), model)

    def _wrap_reading(self, stack: ExitStack, module: ModuleType) -> None:
        wrap(stack, module, "get_peft_model_state_dict", self._reading, everywhere=True)


def _wrap_gathering(stack: ExitStack, module: ModuleType) -> None:
    # PEFT gathers only if ZeRO-3 is configured. GatheredParameters ignores parameters without partitions.
    name = "check_deepspeed_zero3_enabled"
    wrap(stack, module, name, lambda original: original() or "deepspeed" in sys.modules, everywhere=True)


def _wrap_tokens(stack: ExitStack, module: ModuleType) -> None:
    wrap(stack, module.TrainableTokensLayer, "_collect_token_weights", _collect)


def _collect(
    original: Function, layer: TrainableTokensLayer, weight: torch.Tensor, rows: torch.Tensor, embed_dim: int
) -> Any:
    return original(layer, weight, rows, embed_dim) if hasattr(weight, "ds_id") else layer.weight[rows]


def _measure(original: Function, module: nn.Module) -> Any:
    weight = module.weight if isinstance(module, nn.Linear) else None
    # PEFT would take the local shape of an FSDP2 shard, but the layer computes with the whole weight.
    if isinstance(weight, DTensor) and not _CUTTING & {*(weight.device_mesh.mesh_dim_names or ())}:
        return module.in_features, module.out_features
    return original(module)
