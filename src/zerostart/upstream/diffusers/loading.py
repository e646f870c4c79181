"""Load and fill models in ``from_pretrained`` of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.upstream.diffusers.weights import require_version as require_base
from zerostart.upstream.guard import Function, Use, demand
from zerostart.upstream.patches import RefCountedPatches, enter_on_import, wrap
from zerostart.upstream.seam import LoadingSeam

if TYPE_CHECKING:
    from diffusers import ModelMixin

_MODULE = "diffusers.models.modeling_utils"
TOUCHED = (
    Use(
        "diffusers.models.modeling_utils:ModelMixin",
        "from_pretrained, _load_pretrained_model(model, state_dict, resolved_model_file, "
        "pretrained_model_name_or_path, loaded_keys)",
        "zerostart reads the weights of calls that it serves",
    ),
    Use(
        "diffusers.models.modeling_utils",
        "ContextManagers, load_state_dict",
        "within from_pretrained a model is built in contexts of ours",
    ),
)


def require_version() -> None:
    """Raise UnsupportedVersionError unless ``from_pretrained`` is as expected."""
    require_base()
    demand(TOUCHED, "zerostart.enabled() cannot take over its loading; use zerostart.load")


class DiffusersSeam(LoadingSeam):
    """Serves ``ModelMixin.from_pretrained`` after the import of diffusers."""

    def __init__(
        self,
        choose: Callable[[type, dict[str, Any]], Any],
        skipped: Callable[[ModelMixin], None],
    ) -> None:
        super().__init__(self._enter, choose, skipped)

    def _enter(self, stack: ExitStack) -> None:
        enter_on_import(stack, _MODULE, self._imported)

    def _imported(self, stack: ExitStack, module: ModuleType) -> None:
        require_version()
        mixin: type[ModelMixin] = module.ModelMixin
        wrap(stack, mixin, "from_pretrained", self.from_pretrained)
        wrap(stack, mixin, "_load_pretrained_model", self._load_pretrained_model)
        wrap(stack, module, "ContextManagers", self._contexts)
        wrap(stack, module, "load_state_dict", self._load_state_dict)

    def _contexts(self, original: Function, managers: list[Any]) -> Any:
        call = self.without_weights()
        # The library's managers build without weights in its own way, and with its own dtype.
        return original(managers) if call is None else call.building(torch.get_default_dtype())[1]

    def _load_state_dict(self, original: Function, *args: Any, **kwargs: Any) -> object:
        return original(*args, **kwargs) if self.without_weights() is None else {}

    def _load_pretrained_model(
        self,
        original: Function,
        cls: type[ModelMixin],
        model: ModelMixin,
        state_dict: Any,
        files: list[Any],
        name: object,
        keys: list[str],
        **options: object,
    ) -> object:
        call = self.without_weights()
        if call is None:
            return original(cls, model, state_dict, files, name, keys, **options)
        missing, unexpected, mismatched = call.load(model, [str(file) for file in files], name, options)
        call.model = model
        found = sorted((set(model.state_dict()) - missing) | unexpected)
        # With nothing to read, the library reports what is missing and unexpected.
        model, absent, surplus, _, index, errors = original(cls, model, None, [], name, found)
        return model, absent, surplus, sorted(mismatched), index, errors


_FLUX = Use(
    "diffusers.loaders.lora_pipeline:FluxLoraLoaderMixin",
    "_maybe_expand_transformer_param_shape_or_error_(transformer, lora_state_dict, norm_state_dict), "
    "_maybe_expand_lora_state_dict(transformer, lora_state_dict)",
    "a LoRA is compared with the shapes of whole weights",
)
LORA_TOUCHED = (_FLUX,)

#: Context in which a model shows the shapes of its whole weights; it may raise.
Shown = Callable[[nn.Module, Mapping[str, object]], AbstractContextManager[None]]


class LoraShapes(RefCountedPatches):
    """Runs both comparisons in ``shown(transformer, tensors)``."""

    def __init__(self, shown: Shown) -> None:
        super().__init__(self._enter)
        self._shown = shown

    def _enter(self, stack: ExitStack) -> None:
        enter_on_import(stack, _FLUX.owner.partition(":")[0], self._imported)

    def _imported(self, stack: ExitStack, module: ModuleType) -> None:
        demand(LORA_TOUCHED, "zerostart cannot have LoRAs loaded into a Flux in shards")
        for name in _FLUX.functions:
            wrap(stack, module.FluxLoraLoaderMixin, name, self._compare)

    def _compare(
        self,
        original: Function,
        cls: Any,
        transformer: nn.Module,
        lora_state_dict: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        tensors = {**(lora_state_dict or {}), **dict(*args[:1]), **kwargs.get("norm_state_dict", {})}
        with self._shown(transformer, tensors):
            return original(cls, transformer, lora_state_dict, *args, **kwargs)
