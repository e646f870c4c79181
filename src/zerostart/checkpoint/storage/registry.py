"""Storages by the scheme of a URL: those that other packages bring, or a script registers."""

from __future__ import annotations

import functools
import re
from importlib.metadata import entry_points
from typing import Any

from zerostart.checkpoint.storage.base import Storage
from zerostart.errors import ConfigError

#: Entry points of other packages: a scheme, and the subclass of ``Storage``.
GROUP = "zerostart.storages"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_URL = re.compile(rf"(?P<scheme>{_SCHEME.pattern})://.+", re.DOTALL)
_registered: dict[str, type[Storage]] = {}


def register_storage(kind: type[Storage]) -> type[Storage]:
    """Register ``kind`` for sources with one of ``kind.schemes``, in this process; also a decorator.

    Capitals in a scheme mean nothing. Raises ConfigError for a scheme that another storage has, registered or
    installed, for what is no scheme or where there is none, and for a class without an ``at`` of its own.
    """
    given: object = kind.schemes
    if not given or isinstance(given, str):
        raise ConfigError(f"{kind.__name__} has no URL schemes; set schemes, a tuple of names")
    schemes = [scheme.lower() for scheme in kind.schemes]
    for scheme in schemes:
        if _SCHEME.fullmatch(scheme) is None:
            raise ConfigError(
                f"{kind.__name__}: {scheme!r} is not a URL scheme: a letter, then letters, digits, +, -, ."
            )
        installed = _installed().get(scheme)
        if (installed and _package(installed.module) != _package(kind.__module__)) or _registered.get(
            scheme, kind
        ) is not kind:
            raise ConfigError(f"a storage of {scheme}:// is already registered; choose another scheme")
    _check_reached(kind)
    _registered.update(dict.fromkeys(schemes, kind))
    return kind


def storage_at(source: object) -> Storage | None:
    """The storage that a URL leads to; None for no URL.

    Raises ConfigError for an unknown scheme, and what ``Storage.at`` raises.
    """
    match = _URL.fullmatch(source) if isinstance(source, str) else None
    if match is None:
        return None
    scheme = match["scheme"].lower()
    if scheme in _registered:
        kind = _registered[scheme]
    elif scheme in _installed():
        kind = _installed()[scheme].load()
        _check_reached(kind)
    else:
        known = sorted({*_registered, *_installed()})
        raise ConfigError(
            f"{source}: nothing reads {scheme}:// here; register a storage of that scheme "
            "(zerostart.checkpoint.storage.register_storage)"
            + (f", or use {', '.join(known)}" if known else ", or copy the checkpoint to a local directory")
        )
    return kind.at(match.string)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _check_reached(kind: type[Storage]) -> None:
    if getattr(kind.at, "__func__", None) is Storage.at.__func__:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{kind.__name__} does not say what lies at a URL; give it a class method at(source)"
        )


@functools.cache
def _installed() -> dict[str, Any]:
    return {point.name.lower(): point for point in entry_points(group=GROUP)}
