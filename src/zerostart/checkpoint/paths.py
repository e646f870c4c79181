"""Paths as users write them, and directories that threads of this process are still publishing."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

from zerostart.errors import ConfigError, without_secrets


def expanded(path: str | os.PathLike[str]) -> Path:
    """``path`` with the home directory that ``~`` or ``~user`` stands for.

    Raises ConfigError where no user has that name, for a text that no system takes for a path, and for a URL
    without its slashes or its name, which would be a directory of this machine.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{os.fspath(path)}: no user of that name has a home directory") from None
    if "\0" in str(found):
        raise ConfigError(f"{os.fspath(path)!r} is not a path: it contains a NUL character")
    if (lost := _LOST.fullmatch(str(found))) and not Path(f"{lost['scheme']}:").exists():
        url = shown_url(f"{lost['scheme']}://{lost['rest'] or 'NAME'}")
        raise ConfigError(
            f"{lost['scheme']}:/ is no directory here, and no URL, which has two slashes and a name after "
            f"them (pathlib.Path makes one slash of two); give the text {url!r}"
        )
    return found


#: What a path makes of a URL; drives of other systems have one letter.
_LOST = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?:/(?P<rest>.*))?", re.DOTALL)


def located(path: str | os.PathLike[str]) -> Path | str:
    """``path`` as it is from every working directory; a URL without slashes at its end.

    Raises ConfigError as ``expanded`` does.
    """
    return str(path).rstrip("/") if scheme_of(path) else expanded(path).absolute()


def shown_url(path: str) -> str:
    """A path as it is; a URL without what may be secret in it."""
    return without_secrets(path.partition("?")[0]) if scheme_of(path) else path


def shown_record(record: Any) -> str:
    """The ``repr`` of a dataclass that names a place, without secrets."""
    named = (f"{one.name}={getattr(record, one.name)!r}" for one in fields(record) if one.repr)
    return without_secrets(f"{type(record).__name__}({', '.join(named)})")


_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://.+", re.DOTALL)


def scheme_of(source: object) -> str:
    """The scheme of a URL in small letters; empty for what is none."""
    match = _URL.fullmatch(source) if isinstance(source, str) else None
    return "" if match is None else match["scheme"].lower()


#: The real path of a directory, and the thread at whose end it is there, or will never be.
_pending: list[tuple[Path, threading.Thread]] = []


def note_pending(path: Path | str, thread: threading.Thread) -> None:
    """Have those who read ``path``, or something in it or around it, wait for the end of ``thread``."""
    _pending[:] = [item for item in _pending if item[1].is_alive()]
    _pending.append((_real(path), thread))


def wait_for(path: str | os.PathLike[str]) -> None:
    """Return when nothing in this process is publishing ``path``, a part of it, or what it is a part of."""
    if not _pending:
        return
    place = _real(path)
    for other, thread in list(_pending):
        near = place == other or place in other.parents or other in place.parents
        if near and thread is not threading.current_thread():
            thread.join()


def is_same(one: Path | str, other: Path | str) -> bool:
    """Whether two paths are one place, by whatever links."""
    return _real(one) == _real(other)


def _real(path: str | os.PathLike[str]) -> Path:
    if scheme_of(path):
        return Path("/", *str(path).split("/"))  # of no file: what counts is which lies in which
    return Path(os.path.realpath(expanded(path)))
