"""Training a part of a model: the parameters that are named, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zerostart.engines import plain_name
from zerostart.errors import ConfigError


def train_only(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze the parameters of the loaded ``model`` but for those that ``patterns`` name; gives their names.

    A pattern is the name of a parameter or of a module that it is in, with ``*`` for any characters. Raises
    ConfigError, naming it, for one that no parameter has.
    """
    unused, trained = dict.fromkeys(patterns), []
    for given, parameter in model.named_parameters():
        name = plain_name(given)
        found = [pattern for pattern in patterns if any(fnmatchcase(part, pattern) for part in _parts(name))]
        for pattern in found:
            unused.pop(pattern, None)
        parameter.requires_grad_(bool(found))
        if found:
            trained.append(name)
    if unused:
        raise ConfigError(
            f"train.trainable has {next(iter(unused))!r}, which is the name of no parameter and of no module "
            f"that has any; they are called, for example, {', '.join(trained[:2] or _some(model))}"
        )
    return tuple(trained)


def _parts(name: str) -> Iterator[str]:
    """The name and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _some(model: nn.Module) -> list[str]:
    return [plain_name(name) for name, _ in model.named_parameters()][:2]
