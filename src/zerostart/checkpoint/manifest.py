"""The documents of a directory that zerostart has saved to: the files of each of its contents.

``zerostart.json`` lists those of models, adapters and caches: the last save at its top, and under "others"
what else is in the directory, by the names of weights. ``state.json`` lists those of a training state.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.storage.files import open_regular
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, read_json, shown
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, VerifyError

#: The version of the documents.
FORMAT = 1
MARKER, STATE_MARKER = "zerostart.json", "state.json"
MARKERS = (MARKER, STATE_MARKER)
#: The entry with the time of the save, in nanoseconds.
SAVED_AT = "saved_at_ns"
#: The entry with the digest of all the others that it names.
_SEAL = "seal"
#: A document of ours has its format within so many bytes, however long it is.
_HEAD_BYTES = 1 << 16
#: Where saves that are under way write, in the directory that they save to.
HIDDEN = ".zerostart"
INDEX = ".index.json"
#: End of the names of the plans of these saves.
PLAN_SUFFIX = ".plan"
#: Files of weights: the stem, the mark of the save where the usual name was taken, the number of the shard.
WEIGHTS = re.compile(
    r"(?P<stem>.+?)(-[0-9a-f]{12})?(?P<shard>-\d{5}-of-\d{5})?\.safetensors(?P<index>\.index\.json)?"
)
#: The same of files that a save writes, which have no mark yet: what looks like one is of the stem.
_STAGED = re.compile(WEIGHTS.pattern.replace("(-[0-9a-f]{12})?", ""))


def is_inside(name: object) -> bool:
    """Return whether a name in a document, which anybody may have written, is below its directory."""
    if not isinstance(name, str) or name.startswith("/") or re.search("[\0\ud800-\udfff]", name):
        return False
    return not {"", ".", ".."} & set(name.split("/"))


def documents(path: str | Path) -> list[JsonObject]:
    """What describes each content of the directory ``path``, as it is to be read now. Raises VerifyError."""
    place = Path(path)
    found = [one for name in MARKERS if (one := current(place, name)) is not None]
    return [one for document in found for one in (document, *document.get("others", {}).values())]


def saved_at(document: Mapping[str, object], marker: Path) -> int:
    """When the save that ``document`` in the file ``marker`` describes was made, in nanoseconds.

    As it says, since files that were copied are of another time; of the file where it does not say.
    """
    said = document.get(SAVED_AT)
    return said if type(said) is int else marker.stat().st_mtime_ns


def sealed(document: Mapping[str, object]) -> JsonObject:
    """``document`` with the digest of all its entries."""
    entries = sorted(document)
    return {**document, _SEAL: {"entries": entries, "blake2b": _digest(document, entries)}}


def check_seal(document: JsonObject, marker: Path) -> None:
    """Raise CheckpointError for a document in the file ``marker`` with another digest than it was given."""
    seal = document.get(_SEAL)
    if seal is None:
        return
    entries = seal.get("entries") if isinstance(seal, dict) else None
    known = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
    missing = [entry for entry in entries or () if entry not in document] if known else []
    if not known or missing or _digest(document, entries or ()) != seal.get("blake2b"):
        what = f"has no entry {shown(missing[0])}" if missing else "is not what was written"
        raise CheckpointError(
            f"{marker} {what}: it was damaged or edited; take another checkpoint, or load the weights alone "
            "(zerostart.load of the checkpoint's folder model/)"
        )


def _digest(document: Mapping[str, object], entries: Iterable[str]) -> str:
    # A list of pairs, since entries of later versions may be added to the document without breaking the seal.
    text = json.dumps([[entry, document[entry]] for entry in entries], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def contents_of(document: JsonObject) -> dict[str, JsonObject]:
    """The contents that ``documents`` would give of a document, by what their weights are called."""
    others: dict[str, JsonObject] = dict(document.get("others", {}))
    own = {key: value for key, value in document.items() if key != "others"}
    return {document.get("content", ""): own, **others}


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
        # What has no weights beside it (a file of another folder) goes with the first content, so that each
        # file is in exactly one.
        beside = (key for key in groups if PurePosixPath(key).parent == PurePosixPath(name).parent)
        groups.setdefault(next(beside, first), []).append(name)
    return groups


def current(place: Path, name: str) -> JsonObject | None:
    """The document called ``name``; None without one. Raises VerifyError."""
    marker = place / name
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
            f"{marker}: its format is {document.get('format')!r}, but this version of zerostart knows "
            f"{FORMAT}: use the version of zerostart that wrote it"
        )
    others = document.get("others", {})
    if not isinstance(others, dict) or not all(map(_well_formed, (document, *others.values()))):
        raise VerifyError(f"{marker}: it does not list files and digests as zerostart writes them")
    return document


def is_foreign(marker: Path) -> bool:
    """Return whether a file with the name of a document of ours was written by another program."""
    try:
        with open_regular(str(marker), "marker") as (handle, _):
            head = handle.read(_HEAD_BYTES, 0)
        # A state's own document may take long to parse.
        return b'"format"' not in head and _is_foreign(read_json(marker, "marker", MAX_DOCUMENT_BYTES))
    except (CheckpointError, CheckpointNotFoundError, ReadError):  # no document of a program
        return False


def is_state(directory: Path) -> bool:
    """Whether ``directory`` has the document of a training state, and not a script's own ``state.json``."""
    marker = directory / STATE_MARKER
    return marker.is_file() and not is_foreign(marker)


def _is_foreign(document: Mapping[str, object]) -> bool:
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
