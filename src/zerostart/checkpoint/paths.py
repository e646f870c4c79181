"""Paths as users write them, and directories that threads still publish."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

from zerostart.errors import ConfigError, without_secrets


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand ``~`` and ``~user`` in a path.

    Raises ConfigError for an unknown user, for a text that is not a path, and for a URL that has lost a
    slash or its name, which would be a local directory.
    """
    try:
        place = Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{os.fspath(path)}: no user of that name has a home directory") from None
    if "\0" in str(place):
        raise ConfigError(f"{os.fspath(path)!r} is not a path: it contains a NUL character")
    if (lost := _BROKEN_URL.fullmatch(str(place))) and not Path(f"{lost['scheme']}:").exists():
        url = shown_url(f"{lost['scheme']}://{lost['rest'] or 'NAME'}")
        raise ConfigError(
            f"{lost['scheme']}:/ is no directory here, and no URL, which has two slashes and a name after "
            f"them (pathlib.Path makes one slash of two); give the text {url!r}"
        )
    return place


#: A URL that lost a slash as a path; a drive of another system has one letter.
_BROKEN_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?:/(?P<rest>.*))?", re.DOTALL)


def located(path: str | os.PathLike[str]) -> Path | str:
    """Return the absolute path, or a normalised URL.

    A URL loses the slashes at its end. Raises ConfigError as ``expanded`` does.
    """
    return str(path).rstrip("/") if scheme_of(path) else expanded(path).absolute()


def shown_url(path: str) -> str:
    """Return a path, or a URL without secrets."""
    return without_secrets(path.partition("?")[0]) if scheme_of(path) else path


def shown_record(record: Any) -> str:
    """Return the ``repr`` of a dataclass without secrets."""
    named = (f"{one.name}={getattr(record, one.name)!r}" for one in fields(record) if one.repr)
    return without_secrets(f"{type(record).__name__}({', '.join(named)})")


_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://.+", re.DOTALL)


def scheme_of(source: object) -> str:
    """Return a URL's scheme in lower case, or empty."""
    match = _URL.fullmatch(source) if isinstance(source, str) else None
    return "" if match is None else match["scheme"].lower()


#: Real path of a directory, and the thread that publishes it.
_pending: list[tuple[Path, threading.Thread]] = []


def note_pending(path: Path | str, thread: threading.Thread) -> None:
    """Make later readers of ``path`` wait for ``thread``."""
    _pending[:] = [item for item in _pending if item[1].is_alive()]
    _pending.append((_real(path), thread))


def wait_for(path: str | os.PathLike[str]) -> None:
    """Wait until no thread publishes ``path``."""
    if not _pending:
        return
    place = _real(path)
    for other, thread in list(_pending):
        near = place == other or place in other.parents or other in place.parents
        if near and thread is not threading.current_thread():
            thread.join()


def is_same(first: Path | str, second: Path | str) -> bool:
    """Return True if two paths are one place."""
    return _real(first) == _real(second)


def _real(path: str | os.PathLike[str]) -> Path:
    if scheme_of(path):
        return Path("/", *str(path).split("/"))  # not a real path: only prefixes are compared
    return Path(os.path.realpath(expanded(path)))
