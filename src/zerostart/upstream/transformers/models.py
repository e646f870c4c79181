"""Conversions, construction and initialisation of models in transformers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from zerostart.errors import ConfigError
from zerostart.upstream.guard import Use, demand, find_misfits, is_of_class, need
from zerostart.upstream.patches import patch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightTransform
    from transformers.quantizers.base import HfQuantizer

_MODEL = "transformers.modeling_utils:PreTrainedModel"
_CONVERSIONS = Use(
    "transformers.core_model_loading",
    "rename_source_key, dot_natural_key, WeightConverter, WeightRenaming, MergeModulelist, Concatenate, "
    "revert_weight_conversion(model, state_dict)",
    "the conversions registered for a model, which are traced",
)
_MAPPING = Use(
    "transformers.conversion_mapping",
    "get_model_conversion_mapping(model, key_mapping, hf_quantizer)",
    "the conversions of one model",
)
_CONTEXTS = Use(
    "transformers.initialization",
    "no_tie_weights, meta_device_safe_creation_ops",
    "the library's own contexts for a model that is built on meta",
)
_NESTED = Use(
    "transformers.modeling_utils",
    "set_zero3_state, _is_ds_init_called",
    "nested models are built without another zero.Init",
)
_DECLARED = Use(
    _MODEL,
    "_ep_plan, _tp_plan, _keys_to_ignore_on_load_missing, _keys_to_ignore_on_load_unexpected, "
    "_keys_to_ignore_on_save, get_expanded_tied_weights_keys, initialize_weights, "
    "_get_dtype_plan(dtype), tie_weights(*, missing_keys, recompute_mapping), .all_tied_weights_keys",
    "the declarations of a model about its tensors, and its initialiser",
)
_DEVICE = Use(
    "transformers.modeling_utils",
    "get_torch_context_manager_or_global_device",
    "a model on meta initialises its weights as on the CPU",
)


def is_pretrained(model: object) -> bool:
    """Return True for a transformers model (or class); imports nothing."""
    return is_of_class(model, _MODEL)


def loading_core() -> ModuleType:
    """Return the module ``transformers.core_model_loading``."""
    need(_CONVERSIONS)
    from transformers import core_model_loading

    module: ModuleType = core_model_loading
    return module


def registered_conversions(
    model: PreTrainedModel, quantizer: HfQuantizer | None = None
) -> list[WeightTransform]:
    """Return the ordered renamings and converters of ``model`` and its quantizer."""
    need(_MAPPING)
    from transformers.conversion_mapping import get_model_conversion_mapping

    # The first call makes the conversions of all models, and compiles the patterns of each. A copy of a lazy
    # pattern is a compiled one.
    with patch(loading_core(), "re", SimpleNamespace(**{**vars(re), "compile": _LazyPattern})):
        mapping: list[WeightTransform] = get_model_conversion_mapping(model, None, quantizer)
    return mapping


class _LazyPattern:
    """Pattern that is compiled when it is first used."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        return getattr(re.compile(self._pattern), name)


def revert(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict with hub names and shapes; tensors may be meta or symbolic."""
    result: dict[str, torch.Tensor] = loading_core().revert_weight_conversion(model, dict(state_dict))
    return result


def without_zero_init() -> AbstractContextManager[None]:
    """Build models of the block without ``zero.Init``."""
    from transformers import modeling_utils

    # Its end would reset the flag of an outer context.
    within = modeling_utils._is_ds_init_called
    return contextlib.nullcontext() if within else modeling_utils.set_zero3_state()


def is_imported() -> bool:
    """Return True if this process has imported transformers."""
    return "transformers" in sys.modules


@contextlib.contextmanager
def without_weights(dtype: torch.dtype, is_initialised: bool = False) -> Iterator[None]:
    """Build models on meta in ``dtype``, whatever DeepSpeed configuration is active.

    They are untied and without values, unless ``is_initialised``: then as on the CPU. The library's own
    contexts are entered only if it is imported.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with contextlib.ExitStack() as stack:
            if is_initialised and is_imported():
                demand((_DEVICE, _CONTEXTS))
            is_known = is_imported() and _has_contexts()
            if is_known:
                from transformers import initialization, modeling_utils

                if is_initialised:
                    name = "get_torch_context_manager_or_global_device"
                    stack.enter_context(patch(modeling_utils, name, lambda: None))
                else:
                    stack.enter_context(initialization.no_tie_weights())
                stack.enter_context(without_zero_init())
            # Before the guard, which keeps linspace on the CPU: constructors read its values.
            stack.enter_context(torch.device("meta"))
            if is_known:
                stack.enter_context(initialization.meta_device_safe_creation_ops())
            yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def _has_contexts() -> bool:
    return not find_misfits((_CONTEXTS, _NESTED))


def check_built(model: torch.nn.Module) -> None:
    """Raise UnsupportedVersionError if ``model`` is of an unknown transformers."""
    if any(map(is_pretrained, model.modules())):
        need(_CONTEXTS, _NESTED, _DECLARED)


def dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
    """Return patterns of parameters with another dtype than ``dtype``."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return [(re.compile(pattern.replace("*", ".*")), kept) for pattern, kept in plan.items()]


def ignorable(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the model's patterns of ignorable (missing, unexpected) names."""
    missing = tuple(model._keys_to_ignore_on_load_missing or ())
    unexpected = tuple(model._keys_to_ignore_on_load_unexpected or ())
    # Older releases stored these buffers; the library ignores them too.
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected += (r"rotary_emb\.inv_freq",)
    if any(name.endswith("position_ids") for name in buffers):
        unexpected += (r"(^|\.)position_ids$",)
    return missing, unexpected


def ignorable_on_save(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names that the model does not save."""
    return tuple(model._keys_to_ignore_on_save or ())


def parallel_rules(model: PreTrainedModel, axis: str) -> dict[str, str]:
    """Return a model's plan of ``axis`` ``"ep"`` (experts) or ``"tp"``: names to styles."""
    need(_DECLARED)
    return dict(getattr(model, f"_{axis}_plan", None) or {})


def mark_loaded(tensor: torch.Tensor) -> None:
    """Make the model's initialiser skip ``tensor``."""
    marked: Any = tensor
    marked._is_hf_initialized = True


def keep_conversions(model: PreTrainedModel, conversions: Sequence[object]) -> None:
    """Store the used conversions, which ``save_pretrained`` reverses.

    Omit that of mxfp4: reversed, it would name bf16 experts ``..._blocks``.
    """
    model._weight_conversions = [c for c in conversions if not _is_of_mxfp4(c)]


def _is_of_mxfp4(conversion: object) -> bool:
    names = (type(operation).__name__ for operation in getattr(conversion, "operations", None) or ())
    return "Mxfp4Dequantize" in names


def keep_outputs(model: torch.nn.Module) -> None:
    """Register the recordable outputs of models in ``model`` for their present classes."""
    from transformers import modeling_utils

    for module in model.modules():
        if is_pretrained(module):
            # The registry's own ``__setitem__`` changes the keys.
            registry: dict[str, object] = modeling_utils._CAN_RECORD_REGISTRY
            dict.__setitem__(registry, str(type(module)), module._can_record_outputs)


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the tied names of the model, each with its source."""
    names: dict[str, str] = model.all_tied_weights_keys
    return names


def tie(model: PreTrainedModel, missing: set[str]) -> None:
    """Tie the tensors of the model to a name that is not ``missing``."""
    # transformers refuses a checkpoint without any name of a tie: treat the source as present.
    ties: Mapping[str, str] = model.all_tied_weights_keys
    present = {source for target, source in ties.items() if target not in missing}
    lacking = {source for source in ties.values() if source in missing and source not in present}
    model.tie_weights(missing_keys=missing - lacking, recompute_mapping=False)


def initialise(model: PreTrainedModel) -> None:
    """Initialise all parameters and buffers that are not marked as loaded."""
    model.initialize_weights()


def override_plans(
    model: PreTrainedModel, experts: Mapping[str, str] | None, tensors: Mapping[str, str] | None
) -> None:
    """Override plans of ``model``; raises ConfigError for an unknown name."""
    if experts is not None:
        model._ep_plan = _merge_rules(model, "ep_plan", model._ep_plan, experts)
    if tensors is not None:
        model._tp_plan = _merge_rules(model, "tp_plan", model._tp_plan, tensors)


def _merge_rules(
    model: torch.nn.Module, field: str, own_rules: Mapping[str, str] | None, rules: Mapping[str, str]
) -> dict[str, str]:
    declared = dict(own_rules or {})
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    valid_names = {*declared, *named, *(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in named)}
    unknown = sorted(rules.keys() - valid_names)
    if unknown:
        raise ConfigError(
            f"{field} of the distributed_config names {unknown[0]}, which {type(model).__name__} does not "
            "have; leave it out"
        )
    return {**declared, **rules}


def mark_expert_parallel(model: PreTrainedModel) -> None:
    """Set ``model.has_ep``: ranks share its experts."""
    model.has_ep = True


def is_configuration(value: object) -> bool:
    """Return True for a transformers configuration; imports nothing."""
    return is_of_class(type(value), "transformers.configuration_utils:PreTrainedConfig")


_MODULE = "transformers.dynamic_module_utils"
_QUESTION = Use(
    _MODULE,
    "TIME_OUT_REMOTE_CODE, resolve_trust_remote_code(trust_remote_code)",
    "code of a checkpoint is refused instead of a question on the terminal",
)
CODE_TOUCHED = (
    _QUESTION,
    Use(_MODULE, "get_class_from_dynamic_module", "the model class in the code of a checkpoint"),
)


@contextlib.contextmanager
def refuse_questions() -> Iterator[None]:
    """Refuse code of a checkpoint instead of asking on the terminal."""
    if find_misfits((_QUESTION,)):
        yield
        return
    # Import it, in case nothing of transformers has been used before.
    module = importlib.import_module(_MODULE)
    with patch(module, "TIME_OUT_REMOTE_CODE", 0):
        yield


def checkpoint_class(config: PreTrainedConfig, root: str) -> type | None:
    """Run code in ``root`` and return its model class; only for trusted checkpoints."""
    named = getattr(config, "auto_map", None)
    if not isinstance(named, dict):
        return None
    architectures = list(getattr(config, "architectures", None) or ())
    classes = {key: value for key, value in named.items() if key.startswith("AutoModel")}
    fitting = [v for v in classes.values() if isinstance(v, str) and v.rpartition(".")[2] in architectures]
    reference = next(iter(fitting or [v for v in classes.values() if isinstance(v, str)]), None)
    if reference is None:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    kind = get_class_from_dynamic_module(reference, root)
    return kind if isinstance(kind, type) else None


@contextlib.contextmanager
def without_bars(library: Literal["transformers", "diffusers"]) -> Iterator[None]:
    """Hide the progress bars of ``library``."""
    logging = importlib.import_module(f"{library}.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
