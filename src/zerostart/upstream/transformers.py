"""Private parts of transformers: its loading core, and how it builds a model without weights.

Known for the versions in ``SUPPORTED``. Used of it: ``core_model_loading`` (renaming, the converters, their
reversal), ``conversion_mapping.get_model_conversion_mapping``, ``initialization.no_tie_weights`` and
``meta_device_safe_creation_ops``, and of a model ``all_tied_weights_keys``, ``_get_dtype_plan``,
``_keys_to_ignore_on_load_missing`` / ``_unexpected``, ``_weight_conversions``, ``_ep_plan``, ``_tp_plan``,
``initialize_weights``, ``tie_weights`` and the mark ``_is_hf_initialized`` on tensors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerostart.upstream.versions import demand

__all__ = [
    "SUPPORTED",
    "dtype_plan",
    "ignorable",
    "initialise",
    "is_pretrained",
    "keep_conversions",
    "loading_core",
    "mark_loaded",
    "parallel_rules",
    "registered_conversions",
    "revert",
    "tie",
    "tied_names",
    "without_weights",
]

#: First known and first unknown version.
SUPPORTED = ((5, 17), (5, 24))

_CORE = (
    "rename_source_key",
    "dot_natural_key",
    "revert_weight_conversion",
    "WeightConverter",
    "WeightRenaming",
)
_INITIALISATION = ("no_tie_weights", "meta_device_safe_creation_ops")
_MODEL = (
    "_get_dtype_plan",
    "_ep_plan",
    "_tp_plan",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "get_expanded_tied_weights_keys",
    "initialize_weights",
    "tie_weights",
)


@functools.cache
def _check() -> None:
    """Raise UnsupportedVersionError unless everything that this file uses is there."""
    import transformers
    from transformers import conversion_mapping, core_model_loading, initialization

    demand(
        transformers,
        SUPPORTED,
        (
            (core_model_loading, _CORE),
            (initialization, _INITIALISATION),
            (conversion_mapping, ("get_model_conversion_mapping",)),
            (transformers.PreTrainedModel, _MODEL),
        ),
    )


def is_pretrained(model: object) -> bool:
    """Whether ``model`` is a transformers model (or class), without importing transformers to find out."""
    kind = model if isinstance(model, type) else type(model)
    return any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for base in kind.__mro__
    )


def loading_core() -> Any:
    """The module ``transformers.core_model_loading``."""
    _check()
    from transformers import core_model_loading

    return core_model_loading


def registered_conversions(model: Any, quantizer: Any = None) -> list[Any]:
    """The ordered renamings and converters registered for ``model``, with a quantizer's operations if any."""
    _check()
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping: list[Any] = get_model_conversion_mapping(model, None, quantizer)
    return mapping


def revert(model: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict under its hub names and shapes; works on meta and symbolic tensors."""
    result: dict[str, torch.Tensor] = loading_core().revert_weight_conversion(model, dict(state_dict))
    return result


@contextlib.contextmanager
def without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Inside, a transformers model is built on the meta device in ``dtype``, with nothing tied yet.

    Unlike the library's own context this does not look at any global DeepSpeed configuration.
    """
    _check()
    from transformers import initialization

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with (
            initialization.no_tie_weights(),
            torch.device("meta"),
            initialization.meta_device_safe_creation_ops(),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def dtype_plan(model: Any, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
    """Patterns of parameters that the model keeps in another dtype than ``dtype``."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return [(_glob(pattern), kept) for pattern, kept in plan.items()]


def _glob(pattern: str) -> re.Pattern[str]:
    """The library's glob: ``*`` stands for any characters, the rest is a regular expression, searched."""
    return re.compile(pattern.replace("*", ".*"))


def ignorable(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
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


def parallel_rules(model: Any, axis: str) -> dict[str, str]:
    """The expert (``"ep"``) or tensor (``"tp"``) parallel plan of a model: names (``*``: a layer) to styles.

    Declared by its configuration and its class, and put together when it was built; {} for any other module.
    """
    if not is_pretrained(model):
        return {}
    _check()
    return dict(getattr(model, f"_{axis}_plan", None) or {})


def mark_loaded(tensor: torch.Tensor) -> None:
    """Tell the model's initialiser to leave ``tensor`` alone; a plain tensor just carries the mark."""
    marked: Any = tensor
    marked._is_hf_initialized = True


def keep_conversions(model: Any, conversions: Sequence[object]) -> None:
    """Leave the conversions that matched where ``save_pretrained`` looks for what to reverse."""
    model._weight_conversions = list(conversions)


def tied_names(model: Any) -> dict[str, str]:
    """Tied names and the name that each is tied to, as the model's class and configuration say."""
    names: dict[str, str] = model.all_tied_weights_keys
    return names


def tie(model: Any, missing: set[str]) -> None:
    """Tie what the model ties; of a pair the name that is not in ``missing`` is the one that stays."""
    # It calls a checkpoint corrupt that lacks both names of a pair, such as one without the head; what is
    # missing is told by the coverage, and completely.
    library = logging.getLogger("transformers.modeling_utils")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
    finally:
        library.setLevel(level)


def initialise(model: Any) -> None:
    """Run the model's own initialiser on every parameter and buffer not marked as loaded."""
    model.initialize_weights()
