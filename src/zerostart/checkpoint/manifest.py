"""Documents of saved directories, which list the files of each content.

``zerostart.json`` lists models, adapters and caches: the last save at its top, the other contents of the
directory under "others", keyed by the names of weights. ``state.json`` lists a training state.
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

#: Version of the documents.
FORMAT = 1
MARKER, STATE_MARKER = "zerostart.json", "state.json"
MARKERS = (MARKER, STATE_MARKER)
#: Entry with the time of the save, in nanoseconds.
SAVED_AT = "saved_at_ns"
#: Entry with the digest of the entries that it names.
_SEAL = "seal"
#: Our documents have their format within this many bytes, however long they are.
_HEAD_BYTES = 1 << 16
#: Folder of running saves, in the target directory.
HIDDEN = ".zerostart"
INDEX = ".index.json"
#: Suffix of the plans of these saves.
PLAN_SUFFIX = ".plan"
#: Names of weights: the stem, a token if the usual name was taken, the number of the shard.
WEIGHTS = re.compile(
    r"(?P<stem>.+?)(-[0-9a-f]{12})?(?P<shard>-\d{5}-of-\d{5})?\.safetensors(?P<index>\.index\.json)?"
)
#: Names of staged weights, which have no token yet: what looks like one belongs to the stem.
_STAGED = re.compile(WEIGHTS.pattern.replace("(-[0-9a-f]{12})?", ""))


def is_inside(name: object) -> bool:
    """Return True if a name is below its directory."""
    if not isinstance(name, str) or name.startswith("/") or re.search("[\0\ud800-\udfff]", name):
        return False
    return not {"", ".", ".."} & set(name.split("/"))


def documents(path: str | Path) -> list[JsonObject]:
    """Return the document of each content of a directory.

    Raises VerifyError.
    """
    place = Path(path)
    found_documents = [one for name in MARKERS if (one := current(place, name)) is not None]
    return [one for document in found_documents for one in (document, *document.get("others", {}).values())]


def saved_at(document: Mapping[str, object], marker: Path) -> int:
    """Return the time of a save, in nanoseconds.

    The fallback is the time of the file ``marker``, which copying changes.
    """
    time = document.get(SAVED_AT)
    return time if type(time) is int else marker.stat().st_mtime_ns


def sealed(document: Mapping[str, object]) -> JsonObject:
    """Return ``document`` with a digest of all its entries."""
    entries = sorted(document)
    return {**document, _SEAL: {"entries": entries, "blake2b": _digest(document, entries)}}


def check_seal(document: JsonObject, marker: Path) -> None:
    """Raise CheckpointError if the seal does not match."""
    seal = document.get(_SEAL)
    if seal is None:
        return
    entries = seal.get("entries") if isinstance(seal, dict) else None
    is_valid = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
    missing = [entry for entry in entries or () if entry not in document] if is_valid else []
    if not is_valid or missing or _digest(document, entries or ()) != seal.get("blake2b"):
        fault = f"has no entry {shown(missing[0])}" if missing else "is not what was written"
        raise CheckpointError(
            f"{marker} {fault}: it was damaged or edited; take another checkpoint, or load the weights alone "
            "(zerostart.load of the checkpoint's folder model/)"
        )


def _digest(document: Mapping[str, object], entries: Iterable[str]) -> str:
    # A list of pairs: later versions may add entries to the document without breaking the seal.
    text = json.dumps([[entry, document[entry]] for entry in entries], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def contents_of(document: JsonObject) -> dict[str, JsonObject]:
    """Return the contents of a document by weights name."""
    contents: dict[str, JsonObject] = dict(document.get("others", {}))
    own = {key: value for key, value in document.items() if key != "others"}
    return {document.get("content", ""): own, **contents}


def group_of(name: str, staged: bool = False) -> str:
    """Return folder and stem of weights; otherwise empty.

    ``staged`` names have no token yet.
    """
    path = PurePosixPath(name)
    match = (_STAGED if staged else WEIGHTS).fullmatch(path.name)
    return "" if match is None else (path.parent / match["stem"]).as_posix()


def grouped(names: Iterable[str], staged: bool = False) -> dict[str, list[str]]:
    """Group files by content: weights by folder and stem.

    Other files join the weights next to them.
    """
    groups: dict[str, list[str]] = {}
    companions = []
    for name in sorted(names):
        if group := group_of(name, staged):
            groups.setdefault(group, []).append(name)
        else:
            companions.append(name)
    first = next(iter(groups), "")
    for name in companions:
        # A file without weights in its folder joins the first content, so that each file is in exactly one.
        neighbours = (key for key in groups if PurePosixPath(key).parent == PurePosixPath(name).parent)
        groups.setdefault(next(neighbours, first), []).append(name)
    return groups


def current(place: Path, name: str) -> JsonObject | None:
    """Return a document, or None. Raises VerifyError."""
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
    contents = document.get("others", {})
    if not isinstance(contents, dict) or not all(map(_well_formed, (document, *contents.values()))):
        raise VerifyError(f"{marker}: it does not list files and digests as zerostart writes them")
    return document


def is_foreign(marker: Path) -> bool:
    """Return True if another program wrote the file ``marker``."""
    try:
        with open_regular(str(marker), "marker") as (handle, _):
            head = handle.read(_HEAD_BYTES, 0)
        # The document of a state may take long to parse.
        return b'"format"' not in head and _is_foreign(read_json(marker, "marker", MAX_DOCUMENT_BYTES))
    except (CheckpointError, CheckpointNotFoundError, ReadError):  # not the document of a program
        return False


def is_state(directory: Path) -> bool:
    """Return True if ``directory`` has a training state.

    A script may have a ``state.json`` of another kind.
    """
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
