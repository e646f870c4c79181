"""Models of diffusers: the class that a configuration names, and building it from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zerostart.checkpoint.source import CONFIG_NAME, read_config
from zerostart.errors import BuildError
from zerostart.upstream.diffusers import model_class, require

__all__ = ["construct", "finish_diffusers", "named_class", "names_diffusers"]


def names_diffusers(root: str | None) -> bool:
    """Whether the configuration in ``root`` is one of diffusers: those alone have ``_class_name``."""
    config = (read_config(root) if root else None) or {}
    return isinstance(config.get("_class_name"), str)


def named_class(root: str) -> type[nn.Module]:
    """The class of diffusers that the configuration in ``root`` names. Raises BuildError if there is none."""
    require()
    name = str((read_config(root) or {}).get("_class_name"))
    kind = model_class(name)
    if kind is None:
        import diffusers

        raise BuildError(
            f"{Path(root) / CONFIG_NAME} names the class {name}, which is no model of diffusers "
            f"{diffusers.__version__}; pass model= with the class or a callable that builds it"
        )
    return kind


def construct(kind: Any, root: str | None) -> nn.Module:
    """Build the diffusers class from the configuration in ``root``, as ``from_pretrained`` does.

    Raises BuildError if there is no configuration, or one that is not of a class of diffusers.
    """
    config = read_config(root) if root else None
    if config is None:
        raise BuildError(
            f"there is no {CONFIG_NAME} in {root} to build {kind.__name__} from. Put the diffusers model's "
            f"beside the file, or pass model=lambda: {kind.__name__}(...)"
        )
    _check_described(config, kind, Path(str(root)) / CONFIG_NAME)
    model: nn.Module = kind.from_config(kind.load_config(root))
    return model


def _check_described(config: Mapping[str, Any], kind: type, path: Path) -> None:
    """Original releases have a config.json too, of which diffusers would take nothing and say little."""
    name = config.get("_class_name")
    known = {base.__name__ for base in kind.__mro__}
    if name is not None and name not in known and model_class(str(name)) is None:
        raise BuildError(
            f"{path} describes the class {name}, which diffusers does not have: it is the original release's "
            f"own. Pass model=lambda: {kind.__name__}(...), or put the diffusers configuration there"
        )


def finish_diffusers(model: Any, source: str) -> None:
    """Leave the name in the configuration, as ``from_pretrained`` does (``from_single_file`` does not)."""
    model.register_to_config(_name_or_path=source)
