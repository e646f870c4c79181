"""Private parts of transformers: its loading core, and how it builds a model without weights."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from zerostart.errors import ConfigError
from zerostart.upstream.guard import Use, demand, is_of_class, misfit, need
from zerostart.upstream.patches import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightTransform
    from transformers.quantizers.base import HfQuantizer

_MODEL = "transformers.modeling_utils:PreTrainedModel"
_CONVERSIONS = Use(
    "transformers.core_model_loading",
    "rename_source_key, dot_natural_key, WeightConverter, WeightRenaming, "
    "revert_weight_conversion(model, state_dict)",
    "the conversions registered for a model, which are traced",
)
_MAPPING = Use(
    "transformers.conversion_mapping",
    "get_model_conversion_mapping(model, key_mapping, hf_quantizer)",
    "which of them a model has",
)
_CONTEXTS = Use(
    "transformers.initialization",
    "no_tie_weights, meta_device_safe_creation_ops",
    "the library's own contexts for a model that is built on meta",
)
_NESTED = Use(
    "transformers.modeling_utils",
    "set_zero3_state, _is_ds_init_called",
    "models inside a model are built in no zero.Init of their own",
)
_DECLARED = Use(
    _MODEL,
    "_ep_plan, _tp_plan, _keys_to_ignore_on_load_missing, _keys_to_ignore_on_load_unexpected, "
    "_keys_to_ignore_on_save, get_expanded_tied_weights_keys, initialize_weights, "
    "_get_dtype_plan(dtype), tie_weights(*, missing_keys, recompute_mapping), .all_tied_weights_keys",
    "what a model declares of its tensors, and its own initialiser",
)
_DEVICE = Use(
    "transformers.modeling_utils",
    "get_torch_context_manager_or_global_device",
    "a model that is built on meta initialises its weights as one on the CPU does",
)


def is_pretrained(model: object) -> bool:
    """Whether ``model`` is a transformers model (or class), without importing transformers to find out."""
    return is_of_class(model, _MODEL)


def loading_core() -> ModuleType:
    """The module ``transformers.core_model_loading``."""
    need(_CONVERSIONS)
    from transformers import core_model_loading

    module: ModuleType = core_model_loading
    return module


def registered_conversions(
    model: PreTrainedModel, quantizer: HfQuantizer | None = None
) -> list[WeightTransform]:
    """The ordered renamings and converters registered for ``model``, with a quantizer's operations if any."""
    need(_CONVERSIONS, _MAPPING)
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping: list[WeightTransform] = get_model_conversion_mapping(model, None, quantizer)
    return mapping


def revert(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict under its hub names and shapes; works on meta and symbolic tensors."""
    result: dict[str, torch.Tensor] = loading_core().revert_weight_conversion(model, dict(state_dict))
    return result


def without_zero_init() -> AbstractContextManager[None]:
    """Inside, no model is partitioned by ``zero.Init`` as it is built, whatever is configured."""
    from transformers import modeling_utils

    # Its end says that no zero.Init is open, whoever has opened one before.
    within = modeling_utils._is_ds_init_called
    return contextlib.nullcontext() if within else modeling_utils.set_zero3_state()


def is_imported() -> bool:
    """Return whether this process has imported transformers."""
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
            fits = is_imported() and _builds()
            if fits:
                from transformers import initialization, modeling_utils

                if is_initialised:
                    name = "get_torch_context_manager_or_global_device"
                    stack.enter_context(replaced(modeling_utils, name, lambda: None))
                else:
                    stack.enter_context(initialization.no_tie_weights())
                stack.enter_context(without_zero_init())
            # Before its guard, which puts linspace, whose values constructors read, back on the CPU.
            stack.enter_context(torch.device("meta"))
            if fits:
                stack.enter_context(initialization.meta_device_safe_creation_ops())
            yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def _builds() -> bool:
    return not misfit((_CONTEXTS, _NESTED))


def check_built(model: torch.nn.Module) -> None:
    """Raise UnsupportedVersionError if ``model`` has parts of a transformers that is not as it has to be."""
    if any(map(is_pretrained, model.modules())):
        need(_CONTEXTS, _NESTED, _DECLARED)


def dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
    """Patterns of parameters that the model keeps in another dtype than ``dtype``."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return [(_glob(pattern), kept) for pattern, kept in plan.items()]


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("*", ".*"))


def ignorable(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The model's own patterns of ignorable (missing, unexpected) names."""
    missing = tuple(model._keys_to_ignore_on_load_missing or ())
    unexpected = tuple(model._keys_to_ignore_on_load_unexpected or ())
    # Buffers that older releases stored: the library adds these two by itself.
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected += (r"rotary_emb\.inv_freq",)
    if any(name.endswith("position_ids") for name in buffers):
        unexpected += (r"(^|\.)position_ids$",)
    return missing, unexpected


def ignorable_on_save(model: PreTrainedModel) -> tuple[str, ...]:
    """Names that the model itself leaves out of what it saves."""
    return tuple(model._keys_to_ignore_on_save or ())


def parallel_rules(model: PreTrainedModel, axis: str) -> dict[str, str]:
    """Return the expert (``"ep"``) or tensor (``"tp"``) parallel plan of a model: names to styles."""
    need(_DECLARED)
    return dict(getattr(model, f"_{axis}_plan", None) or {})


def mark_loaded(tensor: torch.Tensor) -> None:
    """Tell the model's initialiser to leave ``tensor`` alone; a plain tensor just carries the mark."""
    marked: Any = tensor
    marked._is_hf_initialized = True


def keep_conversions(model: PreTrainedModel, conversions: Sequence[object]) -> None:
    """Leave the conversions that matched where ``save_pretrained`` looks for what to reverse.

    Not that of mxfp4: reversed, it names bf16 experts ``..._blocks``, which no model takes as weights.
    """
    model._weight_conversions = [c for c in conversions if not _is_of_mxfp4(c)]


def _is_of_mxfp4(conversion: object) -> bool:
    names = (type(operation).__name__ for operation in getattr(conversion, "operations", None) or ())
    return "Mxfp4Dequantize" in names


def keep_outputs(model: torch.nn.Module) -> None:
    """Have models in ``model`` find what they can record beside their output, whatever class they are."""
    from transformers import modeling_utils

    for module in model.modules():
        if is_pretrained(module):
            # Not by its item: the registry would make the keys, which are the names of the classes, itself.
            registry: dict[str, object] = modeling_utils._CAN_RECORD_REGISTRY
            dict.__setitem__(registry, str(type(module)), module._can_record_outputs)


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Tied names and the name that each is tied to, as the model's class and configuration say."""
    names: dict[str, str] = model.all_tied_weights_keys
    return names


def tie(model: PreTrainedModel, missing: set[str]) -> None:
    """Tie what the model ties; of a pair the name that is not in ``missing`` is the one that stays."""
    # transformers calls a checkpoint without any name of a tie corrupt, so their source counts as there.
    ties: Mapping[str, str] = model.all_tied_weights_keys
    there = {source for target, source in ties.items() if target not in missing}
    lacking = {source for source in ties.values() if source in missing and source not in there}
    model.tie_weights(missing_keys=missing - lacking, recompute_mapping=False)


def initialise(model: PreTrainedModel) -> None:
    """Run the model's own initialiser on every parameter and buffer not marked as loaded."""
    model.initialize_weights()


def override_plans(
    model: PreTrainedModel, experts: Mapping[str, str] | None, tensors: Mapping[str, str] | None
) -> None:
    """Put rules over those of ``model``, on meta. Raises ConfigError for one that names nothing there."""
    if experts is not None:
        model._ep_plan = _merged(model, "ep_plan", model._ep_plan, experts)
    if tensors is not None:
        model._tp_plan = _merged(model, "tp_plan", model._tp_plan, tensors)


def _merged(
    model: torch.nn.Module, what: str, own: Mapping[str, str] | None, rules: Mapping[str, str]
) -> dict[str, str]:
    declared = dict(own or {})
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    known = {*declared, *named, *(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in named)}
    unknown = sorted(rules.keys() - known)
    if unknown:
        raise ConfigError(
            f"{what} of the distributed_config names {unknown[0]}, which {type(model).__name__} does not "
            "have; leave it out"
        )
    return {**declared, **rules}


def show_experts(model: PreTrainedModel) -> None:
    """Have ``model`` say that its experts are shared out, as releases that know ``has_ep`` do."""
    model.has_ep = True


def is_configuration(value: object) -> bool:
    """Whether ``value`` is a transformers configuration, without importing transformers to find out."""
    return is_of_class(type(value), "transformers.configuration_utils:PreTrainedConfig")


_MODULE = "transformers.dynamic_module_utils"
_SECONDS = Use(
    _MODULE,
    "TIME_OUT_REMOTE_CODE, resolve_trust_remote_code(trust_remote_code)",
    "code of a checkpoint is refused where a question on the terminal would ask whether to run it",
)
CODE_TOUCHED = (
    _SECONDS,
    Use(_MODULE, "get_class_from_dynamic_module", "the class of a model in the code beside its checkpoint"),
)


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Have transformers refuse code of a checkpoint where it would ask on the terminal whether to run it."""
    if misfit((_SECONDS,)):
        yield
        return
    # Imported here: else it would ask where nothing of transformers has been used before.
    module = importlib.import_module(_MODULE)
    with replaced(module, "TIME_OUT_REMOTE_CODE", 0):
        yield


def class_beside(config: PreTrainedConfig, root: str) -> type | None:
    """Return the class of the model in the code in ``root``, which runs; only for trusted checkpoints."""
    named = getattr(config, "auto_map", None)
    if not isinstance(named, dict):
        return None
    wanted = list(getattr(config, "architectures", None) or ())
    classes = {key: value for key, value in named.items() if key.startswith("AutoModel")}
    fitting = [v for v in classes.values() if isinstance(v, str) and v.rpartition(".")[2] in wanted]
    reference = next(iter(fitting or [v for v in classes.values() if isinstance(v, str)]), None)
    if reference is None:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    found = get_class_from_dynamic_module(reference, root)
    return found if isinstance(found, type) else None


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
