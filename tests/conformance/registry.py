"""Names in transformers' registry of conversions, and a model class for each.

A name is a model type, or a class with conversions of its own.
"""

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Mappings from configuration to class that are tried first; the headless one is last.
_PREFERRED = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
)


class Unavailable(Exception):
    """The reference cannot serve an identifier, for the reason ``str``."""


@functools.cache
def _registry() -> dict[str, list[Any]]:
    from transformers import conversion_mapping

    built: dict[str, list[Any]] = conversion_mapping._build_checkpoint_conversion_mapping()
    return built


#: Types without conversions that the suite includes, since their experts are stored stacked.
ALSO = ("gpt_oss", "llama4")


def identifiers() -> list[str]:
    """Return every name in the registry and in ``ALSO``, sorted."""
    return sorted({*_registry(), *ALSO})


def entries(identifier: str) -> list[Any]:
    """Return the identifier's renamings and converters in order."""
    return _registry().get(identifier, [])


def operations(identifier: str) -> str:
    """Return the operations of the identifier's converters, or the kinds of its renamings."""
    if not entries(identifier):
        return "none"
    converters = [entry for entry in entries(identifier) if hasattr(entry, "operations")]
    if converters:
        chains = (" > ".join(type(op).__name__ for op in entry.operations) for entry in converters)
        return ", ".join(dict.fromkeys(chains))
    kinds = {type(entry).__name__ for entry in entries(identifier)} - {"WeightRenaming"}
    return ", ".join(["renames", *sorted(kinds)])


def claims(model: Any) -> set[str]:
    """Return the identifiers whose conversions the library collects for ``model``."""
    from transformers import PreTrainedModel

    actual = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            by_class = type(module).__name__
            actual.add(by_class if by_class in _registry() else module.config.model_type)
    return actual


def candidates(identifier: str) -> Iterator[type]:
    """Return model classes for an identifier, the best first.

    Raises Unavailable for a name without class or configuration.
    """
    import transformers

    if identifier in transformers.CONFIG_MAPPING:
        yield from _of_type(transformers.CONFIG_MAPPING[identifier])
    elif (kind := model_class(identifier)) is not None:
        yield kind
    else:
        raise Unavailable("no model type and no class of this name")


def _of_type(config: type) -> Iterator[type]:
    from transformers.models.auto import modeling_auto

    mappings = [n for n in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING", n)]
    names = dict.fromkeys((*_PREFERRED, *sorted(mappings), "MODEL_MAPPING"))
    visited: set[type] = set()
    for name in names:
        actual = getattr(modeling_auto, name).get(config, ())
        for kind in actual if isinstance(actual, tuple) else (actual,):
            if kind not in visited and kind.__module__.startswith("transformers."):
                visited.add(kind)
                yield kind
    for kind in _in_module(config.__module__.replace(".configuration_", ".modeling_"), config):
        if kind not in visited:
            yield kind


def _in_module(name: str, config: type) -> Iterator[type]:
    """Return classes of a modelling module for ``config`` outside the automatic mappings."""
    from transformers import PreTrainedModel

    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return
    for kind in vars(module).values():
        ours = isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == name
        if ours and kind.config_class is config and "PreTrainedModel" not in kind.__name__:
            yield kind


def model_class(name: str) -> type | None:
    """Return the class ``name`` of transformers, exported or not."""
    import transformers

    actual = getattr(transformers, name, None)
    if isinstance(actual, type):
        return actual
    module = _defined_in().get(name)
    kind: type | None = getattr(importlib.import_module(module), name) if module else None
    return kind


@functools.cache
def _defined_in() -> dict[str, str]:
    """Map every class of a modelling file to its module."""
    import transformers

    root = Path(transformers.__file__).parent
    defined = {}
    for path in (root / "modeling_layers.py", *sorted((root / "models").glob("*/modeling_*.py"))):
        module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            defined.setdefault(name, module)
    return defined
