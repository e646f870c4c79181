"""How long a sequence a model with a table of positions takes, learned or fixed: BERT's, or GPT-2's.

Rotary and relative positions are calculated and end nowhere. Beyond a table's last row a CPU raises an
error of sizes in the forward, and an accelerator an assertion that ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from zerostart.errors import ConfigError

#: Parts of what architectures call their tables; OPT's and BART's have rows before the first position.
_NAMES = ("pos", "wpe")
_BEFORE = 2


def check_positions(model: nn.Module, config: Any, longest: int, key: str) -> None:
    """Raise ConfigError where ``longest`` tokens are more than ``model`` has positions for.

    ``config`` is its transformers configuration; ``key`` is where the length is set.
    """
    table = position_table(model, config)
    if table is not None and longest > table[1]:
        name, rows = table
        raise ConfigError(
            f"sequences have up to {longest} tokens, but {type(model).__name__} has positions for {rows} "
            f"({name}; max_position_embeddings is {config.max_position_embeddings}); set {key} to {rows} or "
            "less"
        )


def position_table(model: nn.Module, config: Any) -> tuple[str, int] | None:
    """The name of the table of positions in ``model``, and for how many tokens it is; None: there is none."""
    most = getattr(config, "max_position_embeddings", None)
    # TAPAS begins anew in each cell of what it reads, and takes the last row for all tokens beyond.
    if not isinstance(most, int) or getattr(config, "reset_position_index_per_cell", False):
        return None
    ahead = 1 if getattr(config, "ngram", 0) else 0  # ProphetNet's streams are at the token to come
    # Others, of relative positions or of pictures, have another length.
    own = [table for table in _tables(model) if 0 <= table[1] - most <= _BEFORE]
    found = [(name, min(rows, most) - padding - ahead) for name, rows, padding in own]
    return min(found, key=lambda table: table[1], default=None)


def _tables(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Tables by name: their rows, and how many no token is at, as those up to padding's are."""
    for name, module in model.named_modules():
        if hasattr(module, "padding_idx"):  # torch's table, or I-BERT's own
            if _named(name):
                padding = -1 if module.padding_idx is None else module.padding_idx
                yield name, len(module.weight), padding + 1
            continue
        for key, tensor in module.named_buffers(recurse=False):
            if _named(key) and tensor.dim() == 2:
                yield f"{name}.{key}", tensor.shape[0], 0


def _named(name: str) -> bool:
    last = name.rpartition(".")[2]
    return any(part in last for part in _NAMES)
