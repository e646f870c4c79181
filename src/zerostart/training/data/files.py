"""Files of pictures and videos that cells of a table name, or hold; and what tells one from another."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from zerostart.errors import ConfigError
from zerostart.training.data.media_config import Kind

#: What a directory is looked through for. Elsewhere a picture is what Pillow can open.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg")

#: Files whose length changes with their contents. Of others, which may be not compressed, all is looked at.
_COMPRESSED = (*(s for s in IMAGE_SUFFIXES if s not in (".bmp", ".tif", ".tiff")), *VIDEO_SUFFIXES)
#: Bytes at the start and at the end of a file that are looked at: all of a small one.
_LOOKED_AT = 64 * 1024


@dataclass(frozen=True)
class MediaFile:
    """A file by its ``path`` (or a directory of frames), or its ``data``; ``name`` is for messages."""

    name: str
    path: Path | None
    data: bytes | None = None

    @property
    def suffix(self) -> str:
        """In small letters, with the dot."""
        return Path(self.name).suffix.lower()

    def opened(self) -> BinaryIO:
        """To be read from its start; raises OSError."""
        return io.BytesIO(self.data or b"") if self.path is None else self.path.open("rb")

    def stills(self) -> list[MediaFile]:
        """The frames of a directory, in the order of the numbers in their names."""
        if self.path is None or not self.path.is_dir():
            return []
        found = [path for path in self.path.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES]
        return [MediaFile(str(path), path) for path in sorted(found, key=lambda path: _natural(path.name))]

    def exists(self) -> bool:
        """Whether there is anything to open."""
        return self.path is None or self.path.exists()

    def state(self) -> list[list[int]] | None:
        """Length and time of modification, in nanoseconds, of it or of its frames; None where it is gone."""
        if self.path is None:
            return []
        try:
            found = [one.path.stat() for one in self.stills() or [self] if one.path is not None]
        except FileNotFoundError:
            return None
        return [[status.st_size, status.st_mtime_ns] for status in found]

    def digest(self) -> bytes:
        """Of its length, start and end, or of all of it; of a directory: of its frames. Raises OSError."""
        state = hashlib.blake2b(digest_size=16)
        for file in self.stills() or [self]:
            with file.opened() as content:
                length = content.seek(0, io.SEEK_END)
                state.update(length.to_bytes(8, "little"))
                if file.suffix not in _COMPRESSED:
                    content.seek(0)
                    while data := content.read(_LOOKED_AT):
                        state.update(data)
                    continue
                for start in sorted({0, max(0, length - _LOOKED_AT)}):
                    content.seek(start)
                    state.update(content.read(_LOOKED_AT))
        return state.digest()


def _natural(name: str) -> list[tuple[int, str]]:
    """``frame2`` before ``frame10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def files_of(cell: Any, kind: Kind, base: Path, where: str) -> tuple[MediaFile, ...]:
    """The files that a cell names: relative to ``base``, or absolute; or holds (``bytes`` of a dataset).

    None for an empty cell. A text that begins with ``[`` is a JSON list, as CSV needs it, where
    several files can be. Raises :class:`ConfigError` for what names no file; ``where`` says which cell it
    is.
    """
    if kind != "image" and isinstance(cell, str) and cell.lstrip().startswith("["):
        cell = _listed(cell, where)
    if cell is None or cell == "":
        return ()
    if not isinstance(cell, (list, tuple)):
        return (_file(cell, base, where),)
    if kind == "image":
        raise ConfigError(
            f"{where}: a list, where one picture belongs; give the column the kind images in media.columns"
        )
    return tuple(_file(part, base, where) for part in cell)


def _listed(text: str, where: str) -> Sequence[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {text!r} is not a JSON list of files: {error}") from error
    assert isinstance(value, list), "JSON that begins with [ is a list"
    return value


def _file(cell: Any, base: Path, where: str) -> MediaFile:
    """Of a name, or of the ``{"bytes": ..., "path": ...}`` that ``datasets`` gives undecoded."""
    if isinstance(cell, dict) and cell.keys() == {"bytes", "path"}:
        if cell["bytes"] is not None:
            return MediaFile(cell["path"] or where, None, cell["bytes"])
        cell = cell["path"]
    if not isinstance(cell, str) or not cell:
        raise ConfigError(f"{where}: {cell!r} is not the name of a file")
    if cell.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: {cell} is an address; download the file, and name where it lies")
    path = base / cell
    return MediaFile(str(path), path)


def needed(module: str) -> ModuleType:
    """A module of the libraries that decode; raises :class:`ConfigError` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"pictures and videos are decoded by Pillow and PyAV, but {module.partition('.')[0]} cannot be "
            f"imported ({error}): pip install 'zerostart[media]'"
        ) from error
