"""What transformers' registry of conversions names, and a model class for each name.

A name is a model type, or the class of a model that has conversions of its own.
"""

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Mappings from configuration to class that are asked first; the others follow, the headless one last.
_PREFERRED = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
)


class Unavailable(Exception):
    """The reference itself cannot serve an identifier: ``str`` says why."""


@functools.cache
def _registry() -> dict[str, list[Any]]:
    from transformers import conversion_mapping

    built: dict[str, list[Any]] = conversion_mapping._build_checkpoint_conversion_mapping()
    return built


#: Types without conversions of their own that the suite has nevertheless: their experts are stored stacked.
ALSO = ("gpt_oss", "llama4")


def identifiers() -> list[str]:
    """Every name in the registry and of ``ALSO``, in alphabetical order."""
    return sorted({*_registry(), *ALSO})


def entries(identifier: str) -> list[Any]:
    """The identifier's renamings and converters, in order; none for one of ``ALSO``."""
    return _registry().get(identifier, [])


def operations(identifier: str) -> str:
    """The operations of the identifier's converters, or the kinds of its renamings."""
    if not entries(identifier):
        return "none"
    converters = [entry for entry in entries(identifier) if hasattr(entry, "operations")]
    if converters:
        chains = (" > ".join(type(op).__name__ for op in entry.operations) for entry in converters)
        return ", ".join(dict.fromkeys(chains))
    kinds = {type(entry).__name__ for entry in entries(identifier)} - {"WeightRenaming"}
    return ", ".join(["renames", *sorted(kinds)])


def claims(model: Any) -> set[str]:
    """The identifiers whose conversions the library collects for ``model`` and its parts."""
    from transformers import PreTrainedModel

    found = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            by_class = type(module).__name__
            found.add(by_class if by_class in _registry() else module.config.model_type)
    return found


def candidates(identifier: str) -> Iterator[type]:
    """Model classes for an identifier, the best choice first.

    Raises Unavailable for a name that no class and no configuration has.
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

    others = [n for n in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING", n)]
    names = dict.fromkeys((*_PREFERRED, *sorted(others), "MODEL_MAPPING"))
    seen: set[type] = set()
    for name in names:
        found = getattr(modeling_auto, name).get(config, ())
        for kind in found if isinstance(found, tuple) else (found,):
            if kind not in seen and kind.__module__.startswith("transformers."):
                seen.add(kind)
                yield kind
    for kind in _in_module(config.__module__.replace(".configuration_", ".modeling_"), config):
        if kind not in seen:
            yield kind


def _in_module(name: str, config: type) -> Iterator[type]:
    """Classes of a modelling module for ``config`` that no automatic mapping has."""
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
    """The class ``name`` of transformers, exported or not."""
    import transformers

    found = getattr(transformers, name, None)
    if isinstance(found, type):
        return found
    module = _defined_in().get(name)
    kind: type | None = getattr(importlib.import_module(module), name) if module else None
    return kind


@functools.cache
def _defined_in() -> dict[str, str]:
    """Module of every class that a modelling file defines."""
    import transformers

    root = Path(transformers.__file__).parent
    defined = {}
    for path in (root / "modeling_layers.py", *sorted((root / "models").glob("*/modeling_*.py"))):
        module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            defined.setdefault(name, module)
    return defined
