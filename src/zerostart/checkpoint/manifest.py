"""The documents of a directory that zerostart has saved to: which files each of its contents consists of.

``zerostart.json`` is that of models, adapters and caches: what was saved last at its top, and under "others"
what else lies in the directory, by the names of its weights. ``state.json`` is that of a training state.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from zerostart.checkpoint.storage.files import read_small
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, load_json, read_json
from zerostart.errors import CheckpointError, ReadError, VerifyError

__all__ = [
    "FORMAT",
    "HIDDEN",
    "INDEX",
    "MARKER",
    "MARKERS",
    "WEIGHTS",
    "contents_of",
    "current",
    "documents",
    "group_of",
    "grouped",
    "is_foreign",
    "is_inside",
    "lies_at",
    "read_marker",
]

#: The version of the documents.
FORMAT = 1
MARKER = "zerostart.json"
MARKERS = (MARKER, "state.json")
#: Where saves that are under way write, in the directory that they save to.
HIDDEN = ".zerostart"
INDEX = ".index.json"
#: Files of weights: the stem, the mark of the save where the usual name was taken, the number of the shard.
WEIGHTS = re.compile(
    r"(?P<stem>.+?)(-[0-9a-f]{12})?(?P<shard>-\d{5}-of-\d{5})?\.safetensors(?P<index>\.index\.json)?"
)
#: The same of files that a save writes, which have no mark yet: what looks like one is of the stem.
_STAGED = re.compile(WEIGHTS.pattern.replace("(-[0-9a-f]{12})?", ""))
_TOKEN = re.compile(r"[0-9a-f]{12}")


def is_inside(name: object) -> bool:
    """Whether a name in a document, which anybody may have written, is one of a file below its directory."""
    if not isinstance(name, str) or name.startswith("/") or "\0" in name:
        return False
    with contextlib.suppress(UnicodeEncodeError):  # half a surrogate pair, which no system has in a name
        return bool(os.fsencode(name)) and not {"", ".", ".."} & set(name.split("/"))
    return False


def documents(path: str | Path) -> list[dict[str, Any]]:
    """What describes each content of the directory ``path``, as it is to be read now. Raises VerifyError."""
    place = Path(path)
    found = [one for name in MARKERS if (one := current(place, name)) is not None]
    return [one for document in found for one in (document, *document.get("others", {}).values())]


def current(place: Path, name: str) -> dict[str, Any] | None:
    """The document called ``name`` as it is to be read now; None without one. Raises VerifyError."""
    return _pending(place, name) or _read(place / name)


def read_marker(path: str | Path) -> dict[str, Any] | None:
    """The document of what was saved to ``path`` last; None without one. Raises VerifyError."""
    return next(iter(documents(path)), None)


def lies_at(place: Path, document: Mapping[str, Any], name: str) -> Path:
    """Where a file of a document lies: of a save that was killed, or goes on, it may lie with that still."""
    staged = place / HIDDEN / str(document.get("save")) / name
    return staged if _TOKEN.fullmatch(str(document.get("save"))) and staged.is_file() else place / name


def contents_of(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The contents that ``documents`` would give of a document, by what their weights are called."""
    others: dict[str, dict[str, Any]] = dict(document.get("others", {}))
    own = {key: value for key, value in document.items() if key != "others"}
    if "content" in own or "cache" in own:
        return {own.get("content", ""): own, **others}
    # Of a version that had one document for all that a save wrote.
    files, digests = own["files"], own.get("digests", {})
    for key, names in grouped(files).items():
        folder = PurePosixPath(key).parent.as_posix()
        of = {folder: digests[folder]} if folder in digests else {}
        others[key] = {"format": FORMAT, "files": {name: files[name] for name in names}, "digests": of}
    return others


def group_of(name: str, staged: bool = False) -> str:
    """The folder and the stem of a file of weights, of one that is ``staged`` still; empty of any other."""
    path = PurePosixPath(name)
    match = (_STAGED if staged else WEIGHTS).fullmatch(path.name)
    return "" if match is None else (path.parent / match["stem"]).as_posix()


def grouped(names: Iterable[str], staged: bool = False) -> dict[str, list[str]]:
    """Files by the content that they are of: weights by folder and stem, the rest with weights beside it."""
    groups: dict[str, list[str]] = {}
    rest = []
    for name in sorted(names):
        if group := group_of(name, staged):
            groups.setdefault(group, []).append(name)
        else:
            rest.append(name)
    first = next(iter(groups), "")
    for name in rest:
        beside = (key for key in groups if PurePosixPath(key).parent == PurePosixPath(name).parent)
        groups.setdefault(next(beside, first), []).append(name)
    return groups


def _pending(place: Path, name: str) -> dict[str, Any] | None:
    """The document of a save that has made its switch, and has not given the document its name yet."""
    for directory in (place / HIDDEN).iterdir() if (place / HIDDEN).is_dir() else ():
        with contextlib.suppress(VerifyError):
            document = _read(directory / name) if _TOKEN.fullmatch(directory.name) else None
            if document is None or not {"switch"} <= document.keys():
                continue
            switch, over = str(document["switch"]), str(document.get("over") or "")
            if not (directory / switch).exists() and not (over and os.path.lexists(place / over)):
                return document
    return None


def _read(marker: Path) -> dict[str, Any] | None:
    try:
        if not marker.is_file():
            return None
        document = read_json(marker, "marker", MAX_DOCUMENT_BYTES)
    except (CheckpointError, ReadError, OSError) as error:
        raise VerifyError(str(error)) from error
    if _is_foreign(document):
        return None
    if document.get("format") != FORMAT:
        raise VerifyError(
            f"{marker}: its format is {document.get('format')!r}, and this version knows {FORMAT}: use "
            "the version of zerostart that has saved it"
        )
    others = document.get("others", {})
    if not isinstance(others, dict) or not all(map(_well_formed, (document, *others.values()))):
        raise VerifyError(f"{marker}: it does not list files and digests as zerostart writes them")
    return document


def is_foreign(marker: Path) -> bool:
    """Whether a file that is called as a document of ours is one of somebody's own."""
    with contextlib.suppress(CheckpointError, ReadError):
        raw = read_small(str(marker), MAX_DOCUMENT_BYTES, "marker") if marker.is_file() else b'"format"'
        # Of a state's own document, which may take long to parse, this is told at once.
        return b'"format"' not in raw and _is_foreign(load_json(raw, str(marker), "marker", True))
    return False


def _is_foreign(document: Mapping[str, Any]) -> bool:
    return not {"format", "files"} & document.keys()


def _well_formed(document: object) -> bool:
    if not isinstance(document, dict):
        return False
    files, digests = document.get("files"), document.get("digests", {})
    content = document.get("content", "")
    if not isinstance(files, dict) or not isinstance(digests, dict) or not isinstance(content, str):
        return False
    described = all(isinstance(one, dict) and type(one.get("bytes")) is int for one in files.values())
    inside = all(is_inside(name) for name in (*files, *(name for name in digests if name != ".")))
    return described and inside and all(isinstance(one, dict) for one in digests.values())
