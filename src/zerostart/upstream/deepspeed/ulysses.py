"""Limit DeepSpeed's sequence parallelism (Ulysses) to the loaded models that use it.

Other models, and generation with a cache, keep transformers' attention. ``sdpa`` gets the mask of the
whole sequence, since Ulysses drops the mask of a rank's part.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.upstream.guard import Function, Use, demand
from zerostart.upstream.patches import RefCountedPatches, wrap
from zerostart.upstream.transformers.attention import packed_documents, require_version

if TYPE_CHECKING:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

TOUCHED = (
    Use(
        "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF",
        "register_with_transformers(model_name_or_path), __init__(attn), forward(module, query, key, "
        "value, attention_mask), .attn, .attn_head_count, .attn_head_size, .global_kv_head_count, "
        ".disable_in_eval",
        "Ulysses serves the loaded model alone",
    ),
)


@dataclass(eq=False)
class _SequenceMark:
    """Mark of a model and its copies; ``is_generating`` while ranks have different sequences."""

    kind: str
    is_generating: bool = False

    def __deepcopy__(self, memo: object) -> _SequenceMark:
        return self


_ATTRIBUTE = "_zerostart_sequences"
#: A function of transformers' registry: the module, queries, keys, values, a mask or None, and settings.
Attention = Function
_served: weakref.WeakSet[UlyssesSPAttentionHF] = weakref.WeakSet()


def mask_sequences(model: nn.Module) -> None:
    """Make Ulysses serve ``model``, with the masks of whole sequences."""
    require_version()
    demand(TOUCHED, "Use sequence_parallel=1")
    _patches.hold(model)
    _wrap_attention()
    shared = _SequenceMark(type(model).__name__)
    for module in model.modules():
        # An attention function gets only its module.
        vars(module)[_ATTRIBUTE] = shared
    model.register_forward_pre_hook(functools.partial(_begin, shared), with_kwargs=True)
    model.register_forward_hook(functools.partial(_end, shared), always_call=True)


def _begin(shared: _SequenceMark, model: nn.Module, _: object, kwargs: dict[str, object]) -> None:
    shared.is_generating = kwargs.get("past_key_values") is not None
    if not _served:
        _wrap_attention()  # The script may have registered before the load.
    if not _served and not shared.is_generating:
        raise ConfigError(
            f"{shared.kind} was loaded with sequence_parallel, and its attention does not share "
            "sequences yet: call UlyssesSPAttentionHF.register_with_transformers(model, ...) and "
            "pass what it returns as mpu= to deepspeed.initialize (accelerate and zerostart train do)"
        )


def _end(shared: _SequenceMark, *_: object) -> None:
    shared.is_generating = False


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    wrap(stack, UlyssesSPAttentionHF, "register_with_transformers", _register)


def _register(original: Function, cls: type, model_name_or_path: object, *args: Any, **kwargs: Any) -> object:
    ours = not isinstance(model_name_or_path, nn.Module) or any(
        _ATTRIBUTE in vars(module) for module in model_name_or_path.modules()
    )
    if ours and _served:
        kind = type(model_name_or_path).__name__
        name = model_name_or_path if isinstance(model_name_or_path, str) else kind
        raise ConfigError(
            f"{name} cannot share sequences next to another model: DeepSpeed registers Ulysses once in a "
            "process. A model with as many heads of the same size is served by what is registered; use "
            "sequence_parallel=1 for others"
        )
    mpu = original(cls, model_name_or_path, *args, **kwargs)
    if ours:
        _wrap_attention()
    return mpu


_patches = RefCountedPatches(_enter)


def _wrap_attention() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, attention in list(_registered()):
        shares = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = _MarkedAttention(shares, attention, attention.attn)
        attention.attn = _add_masks(attention.attn)
        _served.add(attention)


def _registered() -> Iterator[tuple[str, UlyssesSPAttentionHF]]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        # DeepSpeed registers a closure over its object.
        for cell in getattr(ALL_ATTENTION_FUNCTIONS[name], "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, UlyssesSPAttentionHF):
                    yield name, cell.cell_contents


class _MarkedAttention:
    def __init__(self, shares: Attention, attention: UlyssesSPAttentionHF, original: Attention) -> None:
        self._shares, self._attention, self._original = shares, attention, original

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: object,
    ) -> object:
        shared, known = vars(module).get(_ATTRIBUTE), self._attention
        if shared is None:
            return self._original(module, query, key, value, mask, *args, **kwargs)
        if shared.is_generating or (known.disable_in_eval and not module.training):
            # Ulysses sets it for its own heads.
            module.num_key_value_groups = query.shape[1] // key.shape[1]
            return self._original(module, query, key, value, mask, *args, **kwargs)
        heads = known.attn_head_count, known.global_kv_head_count, known.attn_head_size
        if (query.shape[1], key.shape[1], query.shape[-1]) != heads:
            raise ConfigError(
                f"{shared.kind} has {query.shape[1]} query heads and {key.shape[1]} key heads of size "
                f"{query.shape[-1]}, but Ulysses is registered in this process for {heads[0]} and "
                f"{heads[1]} of size {heads[2]}; use sequence_parallel=1 for one of the models"
            )
        return self._shares(module, query, key, value, mask, *args, **kwargs)


def _add_masks(attention: Attention) -> Attention:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _MaskedAttention(attention) if attention is sdpa_attention_forward else attention


class _MaskedAttention:
    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._positions: torch.Tensor | None = None
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: object,
        **kwargs: Any,
    ) -> object:
        if mask is None and _ATTRIBUTE in vars(module):
            mask = self._mask(kwargs["position_ids"], kwargs.get("sliding_window"))
        return self._attention(module, query, key, value, mask, *args, **kwargs)

    def _mask(self, positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
        # Compare contents: the next forward may have other positions.
        if self._positions is None or not torch.equal(self._positions, positions):
            self._positions, self._masks = positions, {}
        if window not in self._masks:
            self._masks[window] = _mask_of(positions, window)
        return self._masks[window]


def _mask_of(positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
    documents, length = packed_documents(positions), positions.shape[1]
    if documents is None and (window is None or window >= length):
        return None
    places = torch.arange(length, device=positions.device)
    # Distance back from each token to each other one; negative for later tokens.
    behind = places[:, None] - places[None, :]
    mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    mask = mask[None, None]
    if documents is None:
        return mask
    same: torch.Tensor = documents[:, None, :, None] == documents[:, None, None, :]
    return mask & same
