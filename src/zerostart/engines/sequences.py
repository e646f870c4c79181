"""Sequences that ranks share: which models each way of it can serve, before anything is read.

Ulysses (DeepSpeed) lets heads travel: for attention each rank has all tokens of some heads. Context
parallelism (FSDP2) lets keys and values travel: each rank has some tokens of all heads.
"""

from __future__ import annotations

from torch import nn

from zerostart.errors import ConfigError
from zerostart.models import Attention, library_of


def check_heads(model: nn.Module, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can share the heads of ``model`` (on meta)."""
    known = _attention(model, size)
    if known.implementation != "sdpa" and "flash" not in known.implementation:
        raise _refused(model, size, f"the attention implementation {known.implementation!r}", _ATTENTION)
    if known.heads % size:
        raise _indivisible(model, size, "num_attention_heads", known.heads)
    if known.key_value_heads % size and size % known.key_value_heads:
        raise _indivisible(model, size, "num_key_value_heads", known.key_value_heads)


def check_ring(model: nn.Module, size: int) -> None:
    """Raise ConfigError unless keys and values of ``model`` (on meta) can travel among ``size`` ranks."""
    known = _attention(model, size)
    if known.implementation != "sdpa":
        raise _refused(model, size, f"the attention implementation {known.implementation!r}", _ATTENTION)
    if others := sorted(known.kinds - {"full_attention"}):
        raise _refused(model, size, f"layers of type {', '.join(others)}", "use engine='deepspeed'")


#: What serves both ways.
_ATTENTION = "build it with attn_implementation='sdpa'"


def _attention(model: nn.Module, size: int) -> Attention:
    known = library_of(model).attention(model)
    if known.obstacle:
        raise _refused(model, size, known.obstacle, "use sequence_parallel=1")
    return known


def _refused(model: nn.Module, size: int, what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"sequence_parallel={size} is not available for {type(model).__name__}, which has {what}; {remedy}"
    )


def _indivisible(model: nn.Module, size: int, key: str, heads: int) -> ConfigError:
    fitting = max(n for n in range(1, size) if heads % n == 0)
    return ConfigError(
        f"sequence_parallel={size} does not divide the {heads} of {key} in {type(model).__name__}; use "
        f"sequence_parallel={fitting}"
    )
