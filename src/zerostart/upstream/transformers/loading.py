"""Load and fill models in ``from_pretrained`` of transformers."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.upstream.guard import Function, Use, demand
from zerostart.upstream.patches import wrap
from zerostart.upstream.seam import LoadingSeam

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.loading_report import LoadStateDictInfo

_MODEL = "transformers.modeling_utils:PreTrainedModel"
TOUCHED = (
    Use(
        _MODEL,
        "from_pretrained, get_init_context(dtype), _load_pretrained_model(model, state_dict, "
        "checkpoint_files, load_config, expected_keys), _finalize_model_loading(model, load_config, "
        "loading_info), transformers.modeling_utils:log_state_dict_report(*, model, "
        "pretrained_model_name_or_path, ignore_mismatched_sizes, loading_info, logger)",
        "zerostart builds without zero.Init",
    ),
    Use(_MODEL, "_from_config(config)", "a model that has no checkpoint starts in shards"),
    Use(
        "transformers.modeling_utils",
        "get_hf_quantizer, transformers.quantizers.auto:get_hf_quantizer(config, quantization_config)",
        "a quantised checkpoint is dequantised",
    ),
    Use(
        _MODEL,
        "resize_token_embeddings",
        "of the one model: embeddings that are in shards are whole while they are resized",
    ),
    Use(
        "transformers.integrations.deepspeed",
        "set_hf_deepspeed_config, unset_hf_deepspeed_config, _hf_deepspeed_config_weak_ref, "
        "is_deepspeed_zero3_enabled",
        "models are built as without a DeepSpeed configuration",
    ),
    Use(
        "transformers.modeling_utils:LoadStateDictConfig",
        "transformers.modeling_utils:LoadStateDictConfig(*, device_map, device_mesh, hf_quantizer, "
        "weight_mapping, ignore_mismatched_sizes, pretrained_model_name_or_path)",
        "the settings of a call",
    ),
    Use(
        "transformers.utils.loading_report:LoadStateDictInfo",
        "transformers.utils.loading_report:LoadStateDictInfo(*, missing_keys, unexpected_keys, "
        "mismatched_keys, error_msgs)",
        "what the library's own report is made of",
    ),
)


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless ``from_pretrained`` is as expected."""
    demand(TOUCHED, "zerostart.enabled() cannot take over its loading; use zerostart.load")


def resize_by(model: PreTrainedModel, function: Callable[..., object]) -> None:
    """Replace ``model.resize_token_embeddings`` by ``function``."""
    model.resize_token_embeddings = function


class _ZeRO3:
    def is_zero3(self) -> bool:
        return True


@contextlib.contextmanager
def _configured(config: object) -> Iterator[None]:
    from transformers.integrations import deepspeed

    def set_config(value: Any) -> None:
        if value is None:
            deepspeed.unset_hf_deepspeed_config()
        else:
            deepspeed.set_hf_deepspeed_config(value)

    reference = deepspeed._hf_deepspeed_config_weak_ref
    before = None if reference is None else reference()
    set_config(config)
    try:
        yield
    finally:
        set_config(before)


def without_zero3() -> AbstractContextManager[None]:
    """Hide the DeepSpeed configuration from transformers inside."""
    return _configured(None)


@contextlib.contextmanager
def knowing_partitions() -> Iterator[None]:
    """Let methods of models gather partitions inside."""
    config = _ZeRO3()  # transformers keeps a weak reference
    with _configured(config):
        yield


class TransformersSeam(LoadingSeam):
    """Serves ``from_pretrained`` and, by ``starting``, ``from_config`` of transformers."""

    def __init__(
        self,
        choose: Callable[[type, dict[str, object]], Any],
        starting: Callable[[type, dict[str, object]], Any],
        skipped: Callable[[PreTrainedModel], None],
    ) -> None:
        super().__init__(self._enter, choose, skipped)
        self._starting = starting

    def _enter(self, stack: ExitStack) -> None:
        require_version()
        from transformers import modeling_utils

        model: type[PreTrainedModel] = modeling_utils.PreTrainedModel
        for name, replacement in (
            ("from_pretrained", self.from_pretrained),
            ("get_init_context", self._get_init_context),
            ("_load_pretrained_model", self._load_pretrained_model),
            ("_finalize_model_loading", self._finalize_model_loading),
            ("_from_config", self._from_config),
        ):
            wrap(stack, model, name, replacement)
        wrap(stack, modeling_utils, "get_hf_quantizer", self._get_hf_quantizer)

    def _from_config(self, original: Function, cls: type, *args: Any, **kwargs: Any) -> object:
        call = None if _is_part_of_another() else self._starting(cls, kwargs)
        if call is None:
            return original(cls, *args, **kwargs)
        with call.agreeing():
            return call.start(lambda: original(cls, *args, **call.arguments))

    def _get_init_context(
        self, original: Function, cls: type, dtype: torch.dtype, *args: Any, **kwargs: Any
    ) -> object:
        call = self.without_weights()
        if call is None:
            return original(cls, dtype, *args, **kwargs)
        from transformers import modeling_utils

        # The library enters its own contexts first: the last one is innermost.
        chosen, context = call.building(dtype)
        modeling_utils.logger.info(f"Detected {call.setup}: zerostart loads the weights in shards")
        with without_zero3():
            contexts = original(cls, chosen, *args, **kwargs)
        return [*contexts, modeling_utils.set_zero3_state(), context]

    def _get_hf_quantizer(
        self,
        original: Function,
        config: PreTrainedConfig,
        quantization_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        call = self.without_weights()
        # A configuration that the caller passes is a wish to quantise now.
        if call is not None and quantization_config is None:
            call.dequantising(config)
        return original(config, quantization_config, *args, **kwargs)

    def _load_pretrained_model(
        self,
        original: Function,
        model: PreTrainedModel,
        state_dict: Mapping[str, torch.Tensor] | None,
        checkpoint_files: list[str] | None,
        load_config: LoadStateDictConfig,
        expected_keys: Any = None,
    ) -> Any:
        call = self.without_weights()
        if call is None:  # or an adapter of the loaded model
            return original(model, state_dict, checkpoint_files, load_config, expected_keys)
        from transformers.utils.loading_report import LoadStateDictInfo

        missing, unexpected, mismatched = call.load(model, checkpoint_files, state_dict, load_config)
        # Later models, such as an adapter, are not part of this call.
        call.model = model
        info = {
            "missing_keys": missing,
            "unexpected_keys": unexpected,
            "mismatched_keys": mismatched,
            "error_msgs": [],
            "conversion_errors": {},
        }
        other_fields = set(LoadStateDictInfo.__dataclass_fields__) - set(info)
        return LoadStateDictInfo(**info, **{name: set() for name in other_fields}), None

    def _finalize_model_loading(
        self,
        original: Function,
        model: PreTrainedModel,
        load_config: LoadStateDictConfig,
        loading_info: LoadStateDictInfo,
    ) -> object:
        call = self.innermost()
        if call is None or call.model is not model:
            return original(model, load_config, loading_info)
        from transformers import modeling_utils

        modeling_utils.log_state_dict_report(
            model=model,
            pretrained_model_name_or_path=load_config.pretrained_model_name_or_path,
            ignore_mismatched_sizes=load_config.ignore_mismatched_sizes,
            loading_info=loading_info,
            logger=modeling_utils.logger,
        )
        return loading_info


def _is_part_of_another() -> bool:
    from transformers import PreTrainedModel

    probe, data = nn.Module(), torch.empty(0, device=torch.get_default_device())
    probe.register_parameter("probe", nn.Parameter(data))  # ``init_empty_weights`` moves it to meta
    if probe.get_parameter("probe").device.type == "meta":
        return True
    # On the CPU, search the stack for the constructor of another model.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            return True
        frame = frame.f_back
    return False
