"""Storages by the scheme of a URL: those that other packages bring, or a script registers."""

from __future__ import annotations

import functools
import re
from importlib.metadata import entry_points
from typing import Any

from zerostart.checkpoint.storage.base import Storage
from zerostart.errors import ConfigError

__all__ = ["register_storage", "storage_at"]

#: Entry points of other packages: a scheme, and the subclass of ``Storage``.
GROUP = "zerostart.storages"
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://.+", re.DOTALL)
_registered: dict[str, type[Storage]] = {}


def register_storage(kind: type[Storage]) -> type[Storage]:
    """Have sources with one of ``kind.schemes`` read from ``kind``, in this process; also a decorator.

    Raises ConfigError for a scheme that another storage has, where there is none, and for a class without an
    ``at`` of its own.
    """
    if not kind.schemes:
        raise ConfigError(f"{kind.__name__} names no scheme of URLs; set schemes")
    for scheme in kind.schemes:
        if _registered.get(scheme, kind) is not kind:
            raise ConfigError(f"a storage of {scheme}:// is there already; choose another scheme")
    _check_reached(kind)
    _registered.update(dict.fromkeys(kind.schemes, kind))
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


def _check_reached(kind: type[Storage]) -> None:
    if getattr(kind.at, "__func__", None) is Storage.at.__func__:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{kind.__name__} does not say what lies at a URL; give it a class method at(source)"
        )


@functools.cache
def _installed() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=GROUP)}
