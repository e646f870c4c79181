"""Add LoRA adapters to a sharded model, and choose the modules that get them.

PEFT injects the adapters into the loaded model in place. Their initial values are drawn from the run's seed
on the CPU: the same on every rank, and for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.state.saving.adapter_formats import find_known_names
from zerostart.training.config.configuration import LoraConfig

#: PEFT's name for the one adapter.
ADAPTER = "default"
_ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def add_lora(model: nn.Module, config: LoraConfig, seed: int) -> tuple[str, ...]:
    """Add adapters to ``model``, freeze everything else, and return the adapted modules' names.

    The adapters are whole on every rank. Raises ConfigError if PEFT is not installed, and for targets that
    match nothing.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"lora needs PEFT: pip install zerostart[peft] ({error})") from error
    # PEFT knows neither DiffSynth's names nor these patterns.
    targets = lora_targets(model, config)
    peft_config: Any = PeftConfig(
        r=config.rank,
        lora_alpha=config.rank if config.alpha is None else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=list(targets),
        exclude_modules=_other_matches(model, targets) or None,
        init_lora_weights=True if config.init == "default" else config.init,
    )
    # The run's random states stay as they are.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config, model, adapter_name=ADAPTER)
    return targets


def _other_matches(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return modules that PEFT would adapt too, as they end with a target's name."""
    ends = tuple(f".{target}" for target in targets)
    return [name for name, _ in model.named_modules() if name.endswith(ends) and name not in targets]


def lora_targets(model: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """Return the names of the modules that ``config`` adapts, in the model's order.

    Raises ConfigError that names an entry without a module.
    """
    modules = {name: module for name, module in model.named_modules() if _is_adaptable(module)}
    chosen = _choose(model, modules, config.targets)
    if not chosen:
        raise ConfigError(
            f"lora.targets {config.targets!r} matches no layer of this {type(model).__name__}; it "
            f"has, for example, {', '.join(list(modules)[:4]) or 'none that can be adapted'}"
        )
    for entry in config.exclude:
        # A misspelt entry would exclude nothing.
        if not any(_matches(name, entry) for name in modules):
            raise ConfigError(f"lora.exclude has {entry!r}, but no layer of the model has that name")
    kept_names = [name for name in modules if name in chosen]
    kept_names = [name for name in kept_names if not any(_matches(name, entry) for entry in config.exclude)]
    if not kept_names:
        raise ConfigError("lora.exclude leaves out all of lora.targets")
    return tuple(kept_names)


def _is_adaptable(module: nn.Module) -> bool:
    return isinstance(module, _ADAPTABLE) or type(module).__name__ == "Conv1D"  # transformers' linear layer


def _choose(model: nn.Module, modules: Mapping[str, nn.Module], targets: str | list[str]) -> set[str]:
    own = {name: name for name in modules}
    if isinstance(targets, list):
        return _find_matches(own, targets)
    names = find_known_names(model)
    theirs = own if names is None else {name: names.of(name) for name in modules}
    if targets in ("auto", ""):
        return _in_blocks(model, modules) if names is None else _find_matches(theirs, names.targets, False)
    # All entries in DiffSynth's names or all in the model's: half a list of each would adapt too much.
    entries = [entry.strip() for entry in targets.split(",") if entry.strip()]
    in_theirs = all(any(_matches(shown, entry) for shown in theirs.values()) for entry in entries)
    return _find_matches(theirs if in_theirs else own, entries)


def _find_matches(shown: Mapping[str, str], entries: str | Iterable[str], strict: bool = True) -> set[str]:
    """Return the modules whose ``shown`` name matches an entry.

    If ``strict``, raises ConfigError for an entry without a match.
    """
    chosen: set[str] = set()
    for entry in entries.split(",") if isinstance(entries, str) else entries:
        matches = {name for name, other in shown.items() if _matches(other, entry)}
        if not matches and strict:
            ends = sorted({other.rpartition(".")[2] for other in shown.values()})
            # Layers in repeated blocks first.
            blocks = sorted(shown.values(), key=lambda other: not any(map(str.isdigit, other.split("."))))
            close = get_close_matches(entry.rpartition(".")[2], ends, n=1, cutoff=0.6)
            raise ConfigError(
                f"lora.targets has {entry!r}, but the name of no layer of the model is or ends with it; "
                + (f"did you mean {close[0]}? Its" if close else "its")
                + f" layers are, for example, {', '.join(blocks[:4])}"
            )
        chosen |= matches
    return chosen


def _matches(name: str, entry: str) -> bool:
    if any(character in entry for character in "*?["):
        return fnmatchcase(name, entry) or fnmatchcase(name, f"*.{entry}")
    # Only after a dot: `q` matches `attn.q`, but not `freq`.
    return name == entry or name.endswith(f".{entry}")


def _in_blocks(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the linear layers in lists of modules, without embeddings and head."""
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    linear = (name for name, module in modules.items() if not isinstance(module, nn.Embedding))
    return {name for name in linear if name.startswith(lists)}
