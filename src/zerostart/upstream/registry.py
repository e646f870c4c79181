"""Classes by name: zerostart's own, those registered in this process, and those of installed packages."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any, Generic, TypeVar

from zerostart.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind, called ``noun`` in messages, by their attribute ``name``.

    ``own`` has module and class of zerostart's own, ``group`` names the entry points of other packages.
    """

    def __init__(self, noun: str, group: str, own: Mapping[str, tuple[str, str]]) -> None:
        self.noun, self.group, self.own = noun, group, own
        self.registered: dict[str, type[T]] = {}

    @functools.cached_property
    def installed(self) -> Mapping[str, EntryPoint]:
        """Entry points of other packages by name."""
        return {point.name: point for point in _find_entry_points().select(group=self.group)}

    def names(self) -> list[str]:
        """Return all names: registered ones, then installed ones, then zerostart's own."""
        return list(dict.fromkeys((*self.registered, *self.installed, *self.own)))

    def register(self, kind: type[T]) -> type[T]:
        """Register a class. Raises ConfigError for a name that another class has."""
        name: str = attrgetter("name")(kind)
        point = self.installed.get(name)
        # A package may register its class in addition to its entry point.
        is_foreign = point and point.module.partition(".")[0] != kind.__module__.partition(".")[0]
        if is_foreign or name in self.own or self.registered.get(name, kind) is not kind:
            raise ConfigError(f"{self.noun} named {name!r} is already registered; choose another name")
        self.registered[name] = kind
        return kind

    def find(self, name: str) -> type[T]:
        """Import the class of a known name. Raises ConfigError if another package's cannot be imported."""
        if name in self.own:
            module, attribute = self.own[name]
            kind: type[T] = getattr(importlib.import_module(module), attribute)
        elif name in self.registered:
            kind = self.registered[name]
        else:
            point = self.installed[name]
            try:
                kind = point.load()
            except Exception as error:
                raise ConfigError(
                    f"{self.noun} {name!r} ({point.value}) of another installed package cannot be imported: "
                    f"{type(error).__name__}: {error}; repair that package, or uninstall it"
                ) from error
        return kind

    def instances(self) -> list[T]:
        """Return one instance of each class, in the order of the names. Raises as ``find`` does."""
        return [_instance_of(self.find(name)) for name in self.names()]  # type: ignore[arg-type]  # hashable


@functools.cache
def _find_entry_points() -> Any:
    return entry_points()


@functools.cache
def _instance_of(kind: Any) -> Any:
    return kind()
