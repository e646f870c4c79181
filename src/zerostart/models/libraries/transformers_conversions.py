"""The conversions that transformers registers for a model, run on symbolic tensors.

Follows the library's own driver, ``convert_and_load_state_dict_in_model``: keys in natural order; all
renamings in turn, then at most one converter; a key that the mapping leads astray is kept under its own
name; a fresh converter for each target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from zerostart.errors import ConversionError
from zerostart.recipe import SymbolicTensor, Target, recorded, settled
from zerostart.upstream.transformers.models import loading_core


@dataclass(frozen=True)
class Converted:
    """Tensors by the model's names, checkpoint names that lead nowhere, and what was converted."""

    tensors: dict[str, SymbolicTensor]
    unexpected: list[str]
    converted: frozenset[str]
    used: tuple[object, ...]


def convert(
    model: torch.nn.Module,
    mapping: Sequence[Any],
    symbols: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
) -> Converted:
    """Run ``mapping`` on ``symbols`` for ``model``, which has the state-dict names of ``targets``.

    Raises ConversionError where an operation fails.
    """
    core = loading_core()
    groups, plain, unexpected = _assign(core, model, mapping, symbols, targets)
    tensors: dict[str, SymbolicTensor] = {name: symbols[key] for name, key in plain.items()}
    converted: set[str] = set()
    for first, converter in groups.items():
        for name, value in _run(converter, first, model).items():
            if name in targets:
                tensors[name] = value
                converted.add(name)
            else:
                unexpected.append(name)
    used = tuple(transform for transform in mapping if transform.was_used())
    return Converted(tensors, unexpected, frozenset(converted), used)


def _assign(
    core: Any,
    model: Any,
    mapping: Sequence[Any],
    symbols: Mapping[str, SymbolicTensor],
    targets: Mapping[str, Target],
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Give every checkpoint key to a converter, to a model name as it is, or to the unexpected."""
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, core.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    reading_stored = {pattern for pattern, c in by_pattern.items() if _reads_stored(c)}
    # The driver only asks the state dict whether a name is there.
    present = dict.fromkeys(targets, True)
    groups: dict[str, Any] = {}
    plain: dict[str, str] = {}
    unexpected: list[str] = []
    for key in sorted(symbols, key=core.dot_natural_key):
        name, pattern = core.rename_source_key(key, renamings, converters, model.base_model_prefix, present)
        if name not in targets and key in targets:
            name, pattern = core.rename_source_key(key, [], [], model.base_model_prefix, present)
        if name not in targets:
            if pattern is None:
                unexpected.append(name)
            else:
                converter = by_pattern[pattern]
                first = converter.target_patterns[0]
                unexpected += [name.replace(first, target) for target in converter.target_patterns]
        elif pattern is None:
            # The first key wins, as in the driver.
            plain.setdefault(name, key)
        else:
            if name not in groups:
                groups[name] = deepcopy(by_pattern[pattern])
            symbol: torch.Tensor = symbols[key]
            if symbol.dtype != targets[name].dtype and pattern not in reading_stored:
                symbol = symbol.to(targets[name].dtype)
            groups[name].add_tensor(name, key, pattern, symbol)
    return groups, plain, list(dict.fromkeys(unexpected))


def _reads_stored(converter: Any) -> bool:
    """Whether a converter takes tensors in the dtype that they are stored in: one that dequantises.

    All others get them in the dtype of the model, and calculate in it.
    """
    return any(getattr(operation, "hf_quantizer", None) for operation in converter.operations)


def _run(converter: Any, first: str, model: Any) -> Mapping[str, SymbolicTensor]:
    """One converter's operations, in its own code; its errors get the name of the parameter."""

    def convert() -> dict[str, SymbolicTensor]:
        made = converter.convert(first, model=model, config=model.config)
        return {name: settled(value[0] if isinstance(value, list) else value) for name, value in made.items()}

    try:
        result = recorded("the conversion", convert)
    except ConversionError as error:
        raise ConversionError(f"{first}: {error}") from error
    except Exception as error:
        operations = ", ".join(type(op).__name__ for op in converter.operations)
        sources = [key for keys in converter.layer_targets.values() for key in sorted(keys)]
        shown = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
        lost = _absent_siblings(sources)
        raise ConversionError(
            f"{first}: the conversion {operations} of {shown} failed: {error}. "
            + (
                f"The checkpoint lacks {', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}"
                if lost
                else "The checkpoint's shapes do not fit the conversion registered for this model"
            )
        ) from error
    return result


def _absent_siblings(names: Sequence[str]) -> list[str]:
    """Names that others of the group suggest: where there is an ``up_proj`` 7, there is a ``gate_proj`` 7."""
    by_template: dict[str, set[tuple[str, ...]]] = {}
    for name in names:
        by_template.setdefault(re.sub(r"\d+", "{}", name), set()).add(tuple(re.findall(r"\d+", name)))
    everywhere = set().union(*by_template.values())
    return [
        template.format(*numbers)
        for template, there in by_template.items()
        for numbers in sorted(everywhere - there)
        if template.count("{}") == len(numbers)
    ]
