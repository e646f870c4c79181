"""Private parts of DeepSpeed: Ulysses, whose ranks share sequences, for packed documents and sliding windows.

``UlyssesSPAttentionHF`` brings all positions of a sequence together on each rank, for some heads, and calls
transformers' own attention with them. The mask that the model has made goes: it is of one rank's part. Flash
attention sees from the positions where a packed document begins, and is told of a window; ``sdpa`` is told of
neither, and would attend across documents and beyond the window. For models with our mark it gets the mask
that transformers would have made of the whole sequence.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.upstream.patches import Held, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, Shape, demand
from zerostart.upstream.transformers_attention import packed_documents, require
from zerostart.upstream.versions import DEEPSPEED

__all__ = ["TOUCHED", "evaluate_in_parts", "mask_sequences"]

_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF"
_INIT = PatchPoint(
    library=DEEPSPEED,
    owner=_ULYSSES,
    names=("__init__",),
    attributes=("attn", "disable_in_eval"),
    writes=("attn",),
    why="sdpa gets a mask of the whole sequence, for packed documents and sliding windows",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(f"{_ULYSSES}.__init__", leads=("attn",), has=("self.attn = attn",)),
        Shape(
            f"{_ULYSSES}.register_with_transformers",
            has=("ALL_ATTENTION_FUNCTIONS[core_attn_implementation] = uattn_wrapper",),
        ),
        Shape(
            f"{_ULYSSES}.forward",
            leads=("module", "query", "key", "value", "attention_mask"),
            has=(
                "kwargs['position_ids'] = torch.cat(P, dim=1)",
                "X = self.attn(module, Q, K, V, attention_mask, *args, **kwargs)",
            ),
        ),
    ),
)
_EVALUATION = PatchPoint(
    library=DEEPSPEED,
    owner=_ULYSSES,
    writes=("disable_in_eval",),
    why="a run of zerostart train shares its held-out sequences among ranks, too",
    lasts=Lasts.MODEL,
    shapes=(Shape(f"{_ULYSSES}.forward", has=("not module.training and self.disable_in_eval",)),),
)
TOUCHED = (_INIT, _EVALUATION)

#: Modules of the models that are marked.
_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: What DeepSpeed has made, and put in the place of transformers' attention.
_made: weakref.WeakSet[Any] = weakref.WeakSet()


def mask_sequences(model: nn.Module) -> None:
    """Have Ulysses mask sequences of ``model`` as if one rank had them whole.

    It may have been registered by the name of the model, or is from now on. A call of ``model`` before that
    raises ConfigError: its ranks would each attend to a part alone.
    """
    require()
    demand(TOUCHED, "Use sequence_parallel=1")
    _held.hold(model)
    for attention in _registered():
        attention.attn = _masking(attention.attn)
        _made.add(attention)
    _marked.update(model.modules())
    model.register_forward_pre_hook(_check_registered)


def _check_registered(model: nn.Module, _: Any) -> None:
    if not _made:
        raise ConfigError(
            f"{type(model).__name__} was loaded with sequence_parallel, and its attention does not share "
            "sequences yet: call UlyssesSPAttentionHF.register_with_transformers(model, ...) and "
            "pass what it returns as mpu= to deepspeed.initialize (accelerate and zerostart train do)"
        )


def evaluate_in_parts() -> None:
    """Have ranks share sequences in evaluation, which accelerate turns off."""
    for attention in _made:
        attention.disable_in_eval = False


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    original = UlyssesSPAttentionHF.__init__

    @functools.wraps(original)
    def init(self: Any, attn: Any, *args: Any, **kwargs: Any) -> None:
        original(self, _masking(attn), *args, **kwargs)
        _made.add(self)

    stack.enter_context(replaced(_INIT, UlyssesSPAttentionHF, "__init__", init))


_held = Held(_enter)


def _registered() -> Iterator[Any]:
    """What DeepSpeed has put in the place of an attention function before a model was marked."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        for cell in getattr(ALL_ATTENTION_FUNCTIONS[name], "__closure__", None) or ():
            with suppress(ValueError):  # of an empty one, in somebody's own function
                if isinstance(cell.cell_contents, UlyssesSPAttentionHF):
                    yield cell.cell_contents


def _masking(attention: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _Masking(attention) if attention is sdpa_attention_forward else attention


class _Masking:
    """``sdpa`` on whole sequences; of one forward's masks there is one for each window."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._positions: torch.Tensor | None = None
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def __call__(
        self, module: nn.Module, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if mask is None and module in _marked:
            mask = self._mask(kwargs["position_ids"], kwargs.get("sliding_window"))
        return self._attention(module, query, key, value, mask, *args, **kwargs)

    def _mask(self, positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """What a token of a sequence may look at, bool [rows, 1, length, length]; None: all before it."""
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
    behind = places[:, None] - places[None, :]
    mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    mask = mask[None, None]
    if documents is None:
        return mask
    together: torch.Tensor = documents[:, None, :, None] == documents[:, None, None, :]
    return mask & together
