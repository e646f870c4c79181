"""Private parts of transformers: the seams of ``from_pretrained`` at which zerostart takes over the weights.

``PreTrainedModel.from_pretrained`` finds the configuration, the files, the dtype and the conversions, builds
the model, and afterwards sees to the generation configuration, kernels and adapters; all of that stays as it
is. Replaced while an ``Override`` is open, and only for calls that its ``choose`` wants served:

- ``get_init_context``: without ``zero.Init`` of a DeepSpeed configuration, and with a log of what is built;
- ``get_hf_quantizer``: a checkpoint that is quantised is to be dequantised;
- ``_load_pretrained_model``: which reads and converts the weights;
- ``_finalize_model_loading``: which initialises what is missing and ties; only its report is left.

So is ``_from_config``, which builds a model that has no checkpoint, where no other model is being built.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from zerostart.errors import BuildError
from zerostart.upstream.patches import RefCountedPatches, note, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, Use, demand
from zerostart.upstream.served import Served, current_call, serving
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import TRANSFORMERS

_MODEL = "transformers.modeling_utils:PreTrainedModel"
_ENTRY = PatchPoint(
    library=TRANSFORMERS,
    owner=_MODEL,
    names=("from_pretrained",),
    why="whether a call is to be served, and an error that tells the way out",
    lasts=Lasts.BLOCK,
    shapes=(
        Shape(
            f"{_MODEL}.from_pretrained",
            has=(
                "_get_dtype(...)",
                "cls.get_init_context(dtype, ...)",
                "model = cls(config, ...)",
                "get_model_conversion_mapping(model, key_mapping, hf_quantizer)",
                "cls._load_pretrained_model(model, state_dict, checkpoint_files, load_config)",
                "cls._finalize_model_loading(model, load_config, loading_info)",
                "model.eval()",
                "model.adjust_generation_fn(...)",
                "model.load_adapter(...)",
            ),
        ),
    ),
)
_BUILDING = PatchPoint(
    library=TRANSFORMERS,
    owner=_MODEL,
    names=("get_init_context",),
    why="the model is built without zero.Init, and with a log of what is built",
    lasts=Lasts.BLOCK,
    shapes=(
        Shape(f"{_MODEL}.get_init_context", leads=("dtype",)),
        Shape(
            f"{_MODEL}._from_config",
            has=("is_deepspeed_zero3_enabled() and not Q and not _is_ds_init_called",),
        ),
        Shape("transformers.modeling_utils:set_zero3_state", has=("_is_ds_init_called = True",)),
    ),
)
_STARTING = PatchPoint(
    library=TRANSFORMERS,
    owner=_MODEL,
    names=("_from_config",),
    why="a model that has no checkpoint starts in shards",
    lasts=Lasts.BLOCK,
    shapes=(Shape(f"{_MODEL}._from_config", leads=("config",), has=("model = cls(config, ...)",)),),
)
_ZERO3 = PatchPoint(
    library=TRANSFORMERS,
    owner="transformers.modeling_utils",
    names=("is_deepspeed_zero3_enabled",),
    why="the contexts for building are those without a DeepSpeed configuration; embeddings of partitions "
    "are resized as with one",
    lasts=Lasts.CALL,
    shapes=(
        Shape(
            f"{_MODEL}.get_init_context",
            has=("if is_deepspeed_zero3_enabled(): ...",),
        ),
    ),
)
_QUANTIZER = PatchPoint(
    library=TRANSFORMERS,
    owner="transformers.modeling_utils",
    names=("get_hf_quantizer",),
    why="a quantised checkpoint is dequantised, before modules become those of quantised weights",
    lasts=Lasts.BLOCK,
    shapes=(
        Shape("transformers.quantizers.auto:get_hf_quantizer", leads=("config", "quantization_config")),
        Shape(f"{_MODEL}.from_pretrained", has=("X, config, Y = get_hf_quantizer(...)",)),
    ),
)
_LOADING = PatchPoint(
    library=TRANSFORMERS,
    owner=_MODEL,
    names=("_load_pretrained_model",),
    why="reads and converts the weights",
    lasts=Lasts.BLOCK,
    shapes=(
        Shape(
            f"{_MODEL}._load_pretrained_model",
            leads=("model", "state_dict", "checkpoint_files", "load_config", "expected_keys"),
        ),
    ),
)
_FINALIZING = PatchPoint(
    library=TRANSFORMERS,
    owner=_MODEL,
    names=("_finalize_model_loading",),
    why="initialises what is missing and ties; only its report is left",
    lasts=Lasts.BLOCK,
    shapes=(
        Shape(
            f"{_MODEL}._finalize_model_loading",
            leads=("model", "load_config", "loading_info"),
        ),
        Shape(
            "transformers.modeling_utils:log_state_dict_report",
            takes=(
                "model",
                "pretrained_model_name_or_path",
                "ignore_mismatched_sizes",
                "loading_info",
                "logger",
            ),
        ),
    ),
)
_RESIZING = PatchPoint(
    library=TRANSFORMERS,
    owner=_MODEL,
    names=("resize_token_embeddings",),
    why="of the one model: embeddings that are in shards are whole while they are resized",
    lasts=Lasts.MODEL,
)
TOUCHED = (
    _ENTRY,
    _BUILDING,
    _STARTING,
    _ZERO3,
    _QUANTIZER,
    _LOADING,
    _FINALIZING,
    _RESIZING,
    Use(
        library=TRANSFORMERS,
        owner="transformers.modeling_utils:LoadStateDictConfig",
        shapes=(
            Shape(
                "transformers.modeling_utils:LoadStateDictConfig",
                takes=(
                    "device_map",
                    "device_mesh",
                    "hf_quantizer",
                    "weight_mapping",
                    "ignore_mismatched_sizes",
                    "pretrained_model_name_or_path",
                ),
            ),
        ),
        why="the settings of a call",
    ),
    Use(
        library=TRANSFORMERS,
        owner="transformers.utils.loading_report:LoadStateDictInfo",
        shapes=(
            Shape(
                "transformers.utils.loading_report:LoadStateDictInfo",
                takes=("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"),
            ),
        ),
        why="what the library's own report is made of",
    ),
)


@functools.cache
def require() -> None:
    """Raise UnsupportedVersionError unless the seams are there and look as expected."""
    demand(TOUCHED, "zerostart.enabled() cannot take over its loading; use zerostart.load")


def resize_by(model: Any, function: Callable[..., Any]) -> None:
    """Have ``model.resize_token_embeddings`` call ``function``, as long as the model lives."""
    model.resize_token_embeddings = function
    note(_RESIZING, model)


@contextlib.contextmanager
def knowing_partitions() -> Iterator[None]:
    """Inside, methods of models gather partitions, also where no configuration tells of ZeRO-3."""
    from transformers import modeling_utils

    with replaced(_ZERO3, modeling_utils, "is_deepspeed_zero3_enabled", lambda: True):
        yield


class Starting(Protocol):
    """One call of ``from_config`` whose model zerostart initialises."""

    #: Keyword arguments with which the library goes on.
    arguments: dict[str, Any]

    def start(self, make: Callable[[], Any]) -> Any:
        """The model that ``make`` builds; collective."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """See ``Served``."""
        ...


class Override(RefCountedPatches):
    """Replaces the seams while it is open.

    ``choose(class, keyword arguments)`` is asked at each call of ``from_pretrained``: None leaves the call to
    transformers, and ``left(model)`` is told of what it gave. ``starting`` is asked the same of
    ``from_config``.
    """

    def __init__(
        self,
        choose: Callable[[type, dict[str, Any]], Served | None],
        starting: Callable[[type, dict[str, Any]], Starting | None],
        left: Callable[[Any], None],
    ) -> None:
        super().__init__(self._enter)
        self._choose = choose
        self._starting = starting
        self._left = left

    def _enter(self, stack: ExitStack) -> None:
        require()
        from transformers import modeling_utils

        model: Any = modeling_utils.PreTrainedModel
        seams = {
            _ENTRY: self._from_pretrained,
            _STARTING: self._from_config,
            _BUILDING: _get_init_context,
            _LOADING: _load_pretrained_model,
            _FINALIZING: _finalize_model_loading,
        }
        for point, make in seams.items():
            (name,) = point.names
            stack.enter_context(replaced(point, model, name, make(vars(model)[name].__func__)))
        (name,) = _QUANTIZER.names
        made = _get_hf_quantizer(modeling_utils.get_hf_quantizer)
        stack.enter_context(replaced(_QUANTIZER, modeling_utils, name, made))

    def _from_pretrained(self, original: Any) -> Any:
        @functools.wraps(original)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            if (outer := current_call()) is not None and outer.model is None:
                raise BuildError(
                    f"{cls.__name__}.from_pretrained is called while another model is built, which "
                    "zerostart.enabled() does not serve; load that model with zerostart.load"
                )
            served = self._choose(cls, kwargs)
            if served is None:
                result = original(cls, *args, **kwargs)
                self._left(result[0] if isinstance(result, tuple) else result)
                return result
            with serving(served), served.together():
                return original(cls, *args, **served.arguments)

        return classmethod(from_pretrained)

    def _from_config(self, original: Any) -> Any:
        @functools.wraps(original)
        def from_config(cls: type, *args: Any, **kwargs: Any) -> Any:
            started = None if _is_part_of_another() else self._starting(cls, kwargs)
            if started is None:
                return original(cls, *args, **kwargs)
            with started.together():
                return started.start(lambda: original(cls, *args, **started.arguments))

        return classmethod(from_config)


def _is_part_of_another() -> bool:
    """Whether what is built now is built on meta, or in the constructor of a model of transformers."""
    from transformers import PreTrainedModel

    probe, data = nn.Module(), torch.empty(0, device=torch.get_default_device())
    probe.register_parameter("probe", nn.Parameter(data))  # which ``init_empty_weights`` replaces
    if probe.get_parameter("probe").device.type == "meta":
        return True
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            return True
        frame = frame.f_back
    return False


def _get_init_context(original: Any) -> Any:
    @functools.wraps(original)
    def get_init_context(cls: type, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        served = current_call()
        if served is None or served.model is not None:
            return original(cls, dtype, *args, **kwargs)
        from transformers import modeling_utils

        chosen, context = served.building(dtype)
        modeling_utils.logger.info(f"Detected {served.setup}: zerostart loads the weights in shards")
        with _no_zero3(modeling_utils):
            contexts = original(cls, chosen, *args, **kwargs)
        # What the constructor builds by from_config must not be partitioned either.
        return [*contexts, modeling_utils.set_zero3_state(), context]

    return classmethod(get_init_context)


def _get_hf_quantizer(original: Any) -> Any:
    @functools.wraps(original)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        served = current_call()
        if served is not None and served.model is None and quantization_config is None:
            served.dequantising(config)
        return original(config, quantization_config, *args, **kwargs)

    return get_hf_quantizer


def _load_pretrained_model(original: Any) -> Any:
    @functools.wraps(original)
    def load(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        served = current_call()
        if served is None or served.model is not None:  # The latter: an adapter for the loaded model.
            return original(model, state_dict, checkpoint_files, load_config, expected_keys)
        from transformers.utils.loading_report import LoadStateDictInfo

        missing, unexpected, mismatched = served.load(model, checkpoint_files, state_dict, load_config)
        served.model = model
        info = {
            "missing_keys": missing,
            "unexpected_keys": unexpected,
            "mismatched_keys": mismatched,
            "error_msgs": [],
            "conversion_errors": {},
        }
        rest = set(LoadStateDictInfo.__dataclass_fields__) - set(info)
        return LoadStateDictInfo(**info, **{name: set() for name in rest}), None

    return staticmethod(load)


def _finalize_model_loading(original: Any) -> Any:
    @functools.wraps(original)
    def finalize(model: Any, load_config: Any, loading_info: Any) -> Any:
        served = current_call()
        if served is None or served.model is not model:
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

    return staticmethod(finalize)


@contextlib.contextmanager
def _no_zero3(modeling_utils: Any) -> Iterator[None]:
    """Inside, the module sees no DeepSpeed configuration."""
    with replaced(_ZERO3, modeling_utils, "is_deepspeed_zero3_enabled", lambda: False):
        yield
