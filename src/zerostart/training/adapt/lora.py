"""LoRA of a sharded model: which modules are adapted, what adapters begin with, and how they get there.

The adapters are PEFT's, put into the model in place once it is loaded: its class, its forward and its own
shards stay. What an adapter begins with is drawn from the run's seed alone, on the CPU, so that it is the
same on every rank, and what one process draws.
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
    """Put adapters into the loaded ``model`` and freeze everything else; gives the adapted modules' names.

    The same on every rank. They are whole until the engine has the model. Raises ConfigError where PEFT is
    not installed, and for targets that name nothing.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"lora needs PEFT: pip install zerostart[peft] ({error})") from error
    # Names are resolved before PEFT sees them: it knows neither DiffSynth's names nor these patterns.
    targets = lora_targets(model, config)
    given: Any = PeftConfig(
        r=config.rank,
        lora_alpha=config.rank if config.alpha is None else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=list(targets),
        exclude_modules=_meant_besides(model, targets) or None,
        init_lora_weights=True if config.init == "default" else config.init,
    )
    # The run's own random states stay as they were, so that a run with adapters draws its data as one without
    # does.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        inject_adapter_in_model(given, model, adapter_name=ADAPTER)
    return targets


def _meant_besides(model: nn.Module, targets: Sequence[str]) -> list[str]:
    ends = tuple(f".{target}" for target in targets)
    return [name for name, _ in model.named_modules() if name.endswith(ends) and name not in targets]


def lora_targets(model: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """The names of the modules of ``model`` that ``config`` adapts, in the model's order.

    Raises ConfigError, naming the entry, for one that no module has.
    """
    modules = {name: module for name, module in model.named_modules() if _is_adaptable(module)}
    chosen = _chosen(model, modules, config.targets)
    if not chosen:
        raise ConfigError(
            f"lora.targets {config.targets!r} matches no layer of this {type(model).__name__}; it "
            f"has, for example, {', '.join(list(modules)[:4]) or 'none that can be adapted'}"
        )
    # Entries to exclude that name nothing are errors, too: a misspelt one would adapt what it was to spare.
    excluded = [set(_matching(modules, entry)) for entry in config.exclude]
    for entry, found in zip(config.exclude, excluded, strict=True):
        if not found:
            raise ConfigError(f"lora.exclude has {entry!r}, but no layer of the model has that name")
    left = tuple(name for name in modules if name in chosen and not any(name in found for found in excluded))
    if not left:
        raise ConfigError("lora.exclude leaves out all of lora.targets")
    return left


def _is_adaptable(module: nn.Module) -> bool:
    return isinstance(module, _ADAPTABLE) or type(module).__name__ == "Conv1D"  # transformers' linear layer


def _chosen(model: nn.Module, modules: Mapping[str, nn.Module], targets: str | list[str]) -> set[str]:
    if isinstance(targets, list):
        return _all_matching({name: name for name in modules}, targets)
    names = find_known_names(model)
    if targets in ("auto", ""):
        # A model that DiffSynth has not: what lies in its lists of blocks, and neither embeddings nor head.
        if names is None:
            return set(_in_blocks(model, modules))
        return _as_scripts(model, modules, names.targets, strict=False)
    return _as_scripts(model, modules, targets)


def _as_scripts(
    model: nn.Module, modules: Mapping[str, nn.Module], targets: str, strict: bool = True
) -> set[str]:
    entries = [entry.strip() for entry in targets.split(",") if entry.strip()]
    names = find_known_names(model)
    if names is not None:
        # All entries by one way of naming or all by the other: half of a list by each would adapt what nobody
        # asked for.
        theirs = {name: names.of(name) for name in modules}
        if not strict or all(any(_is(shown, entry) for shown in theirs.values()) for entry in entries):
            return _all_matching(theirs, entries, strict)
    return _all_matching({name: name for name in modules}, entries, strict)


def _all_matching(shown: Mapping[str, str], entries: Iterable[str], strict: bool = True) -> set[str]:
    chosen: set[str] = set()
    for entry in entries:
        found = {name for name, other in shown.items() if _is(other, entry)}
        if not found and strict:
            # Layers in repeated blocks first: these are the ones that are adapted.
            ends = sorted({other.rpartition(".")[2] for other in shown.values()})
            blocks = sorted(shown.values(), key=lambda other: not any(map(str.isdigit, other.split("."))))
            close = get_close_matches(entry.rpartition(".")[2], ends, n=1, cutoff=0.6)
            raise ConfigError(
                f"lora.targets has {entry!r}, but the name of no layer of the model is or ends with it; "
                + (f"did you mean {close[0]}? Its" if close else "its")
                + f" layers are, for example, {', '.join(blocks[:4])}"
            )
        chosen |= found
    return chosen


def _matching(names: Iterable[str], entry: str) -> list[str]:
    return [name for name in names if _is(name, entry)]


def _is(name: str, entry: str) -> bool:
    if any(character in entry for character in "*?["):
        return fnmatchcase(name, entry) or fnmatchcase(name, f"*.{entry}")
    # After a dot alone: `q` is the end of `attn.q`, and not that of `freq`.
    return name == entry or name.endswith(f".{entry}")


def _in_blocks(model: nn.Module, modules: Mapping[str, nn.Module]) -> Sequence[str]:
    """Linear layers inside of lists of modules: not embeddings, nor the head."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    linear = [name for name, module in modules.items() if not isinstance(module, nn.Embedding)]
    return [name for name in linear if any(name.startswith(f"{outer}.") for outer in lists)]
