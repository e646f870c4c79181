"""Private parts of DeepSpeed: Ulysses, whose ranks share sequences, for the models that asked for it.

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
from zerostart.upstream.transformers.attention import packed_documents, require

if TYPE_CHECKING:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF"
_REGISTERING = Use(
    _ULYSSES,
    "register_with_transformers(model_name_or_path), __init__(attn), forward(module, query, key, "
    "value, attention_mask), .attn, .attn_head_count, .attn_head_size, .global_kv_head_count, "
    ".disable_in_eval",
    "Ulysses serves the loaded model alone",
)
TOUCHED = (_REGISTERING,)


@dataclass(eq=False)
class _Shared:
    """A mark that copies of a model keep; ``apart`` while each rank has sequences of its own."""

    kind: str
    apart: bool = False

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


_ATTRIBUTE = "_zerostart_sequences"
#: A function of transformers' registry: the module, queries, keys, values, a mask or None, and settings.
Attention = Function
_made: weakref.WeakSet[UlyssesSPAttentionHF] = weakref.WeakSet()


def mask_sequences(model: nn.Module) -> None:
    """Have Ulysses serve ``model``, and mask its sequences as if one rank had them whole."""
    require()
    demand(TOUCHED, "Use sequence_parallel=1")
    _held.hold(model)
    _take_over()
    shared = _Shared(type(model).__name__)
    for module in model.modules():
        # On each module: an attention function is called with its module alone.
        vars(module)[_ATTRIBUTE] = shared
    model.register_forward_pre_hook(functools.partial(_begin, shared), with_kwargs=True)
    model.register_forward_hook(functools.partial(_end, shared), always_call=True)


def _begin(shared: _Shared, model: nn.Module, _: object, kwargs: dict[str, object]) -> None:
    shared.apart = kwargs.get("past_key_values") is not None
    if not _made:
        _take_over()  # Of a script that had the method before the model.
    if not _made and not shared.apart:
        raise ConfigError(
            f"{shared.kind} was loaded with sequence_parallel, and its attention does not share "
            "sequences yet: call UlyssesSPAttentionHF.register_with_transformers(model, ...) and "
            "pass what it returns as mpu= to deepspeed.initialize (accelerate and zerostart train do)"
        )


def _end(shared: _Shared, *_: object) -> None:
    shared.apart = False


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    wrap(stack, UlyssesSPAttentionHF, "register_with_transformers", _register)


def _register(original: Function, cls: type, model_name_or_path: object, *args: Any, **kwargs: Any) -> object:
    ours = not isinstance(model_name_or_path, nn.Module) or any(
        _ATTRIBUTE in vars(module) for module in model_name_or_path.modules()
    )
    if ours and _made:
        kind = type(model_name_or_path).__name__
        name = model_name_or_path if isinstance(model_name_or_path, str) else kind
        raise ConfigError(
            f"{name} cannot share sequences beside another model: DeepSpeed registers Ulysses once in a "
            "process. A model with as many heads of the same size is served by what is registered; use "
            "sequence_parallel=1 for others"
        )
    mpu = original(cls, model_name_or_path, *args, **kwargs)
    if ours:
        _take_over()
    return mpu


_held = RefCountedPatches(_enter)


def _take_over() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, attention in list(_registered()):
        shares = ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS[name] = _ForMarked(shares, attention, attention.attn)
        attention.attn = _masking(attention.attn)
        _made.add(attention)


def _registered() -> Iterator[tuple[str, UlyssesSPAttentionHF]]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        # DeepSpeed registers a closure over its object; there is no other way to that.
        for cell in getattr(ALL_ATTENTION_FUNCTIONS[name], "__closure__", None) or ():
            with suppress(ValueError):  # of an empty one, in somebody's own function
                if isinstance(cell.cell_contents, UlyssesSPAttentionHF):
                    yield name, cell.cell_contents


class _ForMarked:
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
        if shared.apart or (known.disable_in_eval and not module.training):
            # Ulysses writes it for its own heads, where there are fewer of keys than ranks.
            module.num_key_value_groups = query.shape[1] // key.shape[1]
            return self._original(module, query, key, value, mask, *args, **kwargs)
        served = known.attn_head_count, known.global_kv_head_count, known.attn_head_size
        if (query.shape[1], key.shape[1], query.shape[-1]) != served:
            raise ConfigError(
                f"{shared.kind} has {query.shape[1]} query heads and {key.shape[1]} key heads of size "
                f"{query.shape[-1]}, but Ulysses is registered in this process for {served[0]} and "
                f"{served[1]} of size {served[2]}; use sequence_parallel=1 for one of the models"
            )
        return self._shares(module, query, key, value, mask, *args, **kwargs)


def _masking(attention: Attention) -> Attention:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _Masking(attention) if attention is sdpa_attention_forward else attention


class _Masking:
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
        # By contents: each layer of one forward passes the same positions, the next forward maybe others.
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
    # How far back from a token another lies: 0 itself, below 0 later ones.
    behind = places[:, None] - places[None, :]
    mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    mask = mask[None, None]
    if documents is None:
        return mask
    together: torch.Tensor = documents[:, None, :, None] == documents[:, None, None, :]
    return mask & together
