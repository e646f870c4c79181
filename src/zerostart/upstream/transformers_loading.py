"""Private parts of transformers: the seams of ``from_pretrained`` at which zerostart takes over the weights.

Known for the versions that ``upstream.transformers`` supports. ``PreTrainedModel.from_pretrained`` finds the
configuration, the files, the dtype and the conversions, builds the model, and afterwards sees to the
generation configuration, kernels and adapters; all of that stays as it is. Replaced while ``Override`` is
installed, and only for calls that its ``choose`` wants served:

- ``get_init_context``: without ``zero.Init`` of a DeepSpeed configuration, and with a log of what is built;
- ``_load_pretrained_model``: which reads and converts the weights;
- ``_finalize_model_loading``: which initialises what is missing and ties; only its report is left.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from zerostart.errors import BuildError, UnsupportedVersionError
from zerostart.upstream.transformers import loading_core

__all__ = ["Findings", "Override", "Served", "current_call", "require", "serving"]

_REPLACED = ("from_pretrained", "get_init_context", "_load_pretrained_model", "_finalize_model_loading")
_LOAD_ARGUMENTS = ("model", "state_dict", "checkpoint_files", "load_config", "expected_keys")
_CONFIG_FIELDS = ("device_map", "device_mesh", "hf_quantizer", "weight_mapping", "ignore_mismatched_sizes")


class Served(Protocol):
    """One call of ``from_pretrained`` whose weights zerostart loads."""

    #: The model, once it has its weights.
    model: Any
    #: Keyword arguments with which the library goes on.
    arguments: dict[str, Any]

    @property
    def setup(self) -> str:
        """What the model is loaded for, in the words of transformers' own message of ZeRO-3."""
        ...

    def building(self, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager[Any]]:
        """The dtype to build in, and a context for building; ``dtype`` is the one that the call has found."""
        ...

    def load(self, model: Any, files: list[str] | None, state_dict: Any, config: Any) -> Findings:
        """Give ``model`` (on meta) its weights; collective."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """A context for the whole call; may raise another error in the place of one that is raised inside."""
        ...


#: Missing and unexpected names, and (name, shape in the checkpoint, shape in the model) of mismatched ones.
Findings = tuple[set[str], set[str], set[tuple[str, tuple[int, ...], tuple[int, ...]]]]

_calls = threading.local()


@functools.cache
def require() -> None:
    """Raise UnsupportedVersionError unless the seams are there and look as expected."""
    loading_core()
    import transformers
    from transformers import modeling_utils
    from transformers.utils import loading_report

    model = transformers.PreTrainedModel
    absent = [f"PreTrainedModel.{name}" for name in _REPLACED if name not in vars(model)]
    if not absent:
        given = tuple(inspect.signature(model._load_pretrained_model).parameters)
        if given[: len(_LOAD_ARGUMENTS)] != _LOAD_ARGUMENTS:
            absent.append(f"_load_pretrained_model({', '.join(_LOAD_ARGUMENTS)})")
        fields = modeling_utils.LoadStateDictConfig.__dataclass_fields__
        absent += [f"LoadStateDictConfig.{name}" for name in _CONFIG_FIELDS if name not in fields]
    names = ("is_deepspeed_zero3_enabled", "set_zero3_state", "log_state_dict_report", "logger")
    absent += [f"modeling_utils.{name}" for name in names if not hasattr(modeling_utils, name)]
    if not hasattr(loading_report, "LoadStateDictInfo"):
        absent.append("loading_report.LoadStateDictInfo")
    if absent:
        raise UnsupportedVersionError(
            f"zerostart.enabled() knows the loading of transformers 5.23; {transformers.__version__} is "
            f"installed, and misses {', '.join(absent)}. Use zerostart.load"
        )


class Override:
    """Replaces the seams from ``install`` to ``remove``.

    ``choose(class, keyword arguments)`` is asked at each call of ``from_pretrained``: None leaves the call to
    transformers, and ``left(model)`` is told of what it gave.
    """

    def __init__(
        self, choose: Callable[[type, dict[str, Any]], Served | None], left: Callable[[Any], None]
    ) -> None:
        self._choose = choose
        self._left = left
        self._kept: dict[str, Any] = {}

    def install(self) -> None:
        """Replace the methods of ``PreTrainedModel``."""
        require()
        import transformers

        model: Any = transformers.PreTrainedModel
        self._kept = {name: vars(model)[name] for name in _REPLACED}
        model.from_pretrained = self._from_pretrained()
        model.get_init_context = self._get_init_context()
        model._load_pretrained_model = self._load_pretrained_model()
        model._finalize_model_loading = self._finalize_model_loading()

    def remove(self) -> None:
        """Put the methods back."""
        import transformers

        for name, original in self._kept.items():
            setattr(transformers.PreTrainedModel, name, original)
        self._kept = {}

    def _from_pretrained(self) -> Any:
        original = self._kept["from_pretrained"].__func__

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

    def _get_init_context(self) -> Any:
        original = self._kept["get_init_context"].__func__

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

    def _load_pretrained_model(self) -> Any:
        original = self._kept["_load_pretrained_model"].__func__

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

    def _finalize_model_loading(self) -> Any:
        original = self._kept["_finalize_model_loading"].__func__

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


def current_call() -> Served | None:
    """The call that this thread is in."""
    stack = getattr(_calls, "stack", None)
    return stack[-1] if stack else None


@contextlib.contextmanager
def serving(served: Served) -> Iterator[None]:
    """Inside, ``served`` is the call that this thread is in."""
    if not hasattr(_calls, "stack"):
        _calls.stack = []
    _calls.stack.append(served)
    try:
        yield
    finally:
        _calls.stack.pop()


@contextlib.contextmanager
def _no_zero3(modeling_utils: Any) -> Iterator[None]:
    """Inside, the module sees no DeepSpeed configuration."""
    original = modeling_utils.is_deepspeed_zero3_enabled
    modeling_utils.is_deepspeed_zero3_enabled = lambda: False
    try:
        yield
    finally:
        modeling_utils.is_deepspeed_zero3_enabled = original
