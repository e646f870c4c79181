"""Read JSON objects from unknown files (headers, indexes), and write portable JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from zerostart.checkpoint.storage.files import read_small
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError

#: JSON object from an unknown file; readers check the type of each member.
JsonObject: TypeAlias = dict[str, Any]
#: Read-only JSON object.
JsonMapping: TypeAlias = Mapping[str, Any]

#: Maximum size of a header, index or config file in bytes: half a million tensors.
MAX_JSON_BYTES = 1 << 26
#: Maximum size of a training state's document in bytes; it names each parameter several times.
MAX_DOCUMENT_BYTES = 800_000_000
#: Maximum size of a model's configuration, in bytes.
MAX_CONFIG_BYTES = 8_000_000

#: Remedy for a file without meaning.
DAMAGED = "the file is damaged, or is not what its name says; download it again"


def load_json(raw: bytes, path: str, kind: str, header: bool = False) -> JsonObject:
    """Parse a JSON object, strictly for a ``header``.

    A header has only integers and unique names. Raises CheckpointError; ``path`` and ``kind`` name the
    file and its part.
    """
    no_number = _no_number if header else None
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique if header else None,
            parse_int=_parse_count if header else None,
            parse_float=no_number,
            parse_constant=no_number,
        )
        if header and b"\\u" in raw:  # only an escape can contain half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise CheckpointError(
            f"{path}: the {kind} is nested too deeply to be a checkpoint's: {DAMAGED}"
        ) from error
    except UnicodeError as error:
        raise CheckpointError(f"{path}: the {kind} is not UTF-8 ({error.reason}): {DAMAGED}") from error  # type: ignore[attr-defined]
    except ValueError as error:
        raise CheckpointError(f"{path}: the {kind} is not valid JSON ({error}): {DAMAGED}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: the {kind} is a JSON {type(value).__name__} and not an object: {DAMAGED}"
        )
    return value


def read_json(path: Path, kind: str, limit: int = MAX_JSON_BYTES) -> JsonObject:
    """Read the JSON object in a small regular file.

    ``kind`` names it in messages. Raises ReadError if reading fails, CheckpointError if it is not a
    regular file, not a JSON object, or too large.
    """
    try:
        raw = read_small(str(path), limit, kind)
    except CheckpointNotFoundError as error:
        raise ReadError(f"{path}: cannot be read: {error.__cause__}") from error
    try:
        return load_json(raw, str(path), kind)
    except CheckpointError as error:
        if found_kind := named_kind(raw[:HEAD_BYTES]):
            raise CheckpointError(f"{path}: no {kind}: {found_kind}") from error
        raise


def dump_json(value: object, indent: int | None = None) -> str:
    """Return ``value`` (dictionaries, lists, tuples, scalars) as standard JSON.

    NaN and infinities, which Python would write, become null.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: object) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def shown(text: str) -> str:
    """Quote and shorten text for a message."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 200 else f"{quoted[:160]}... ({len(text)} characters)"


def _unique(pairs: list[tuple[str, object]]) -> JsonObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"the name {shown(name)} occurs twice")
            names.add(name)
    return result


def _parse_count(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is not a count")
    return int(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{shown(text)} is not an integer")


#: Number of first bytes that are examined: up to the mark of a tar archive.
HEAD_BYTES = 512
_LATER = "download it again"
_HTML = (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<body", b"<!--")
#: First bytes of a file, its kind, and a remedy.
_BEGINNINGS = (
    (
        b"version https://git-lfs",
        "a git-lfs pointer and not the file itself",
        "fetch it with git lfs pull, or with hf download",
    ),
    (b"GGUF", "a GGUF file, of llama.cpp", "take the repository with the safetensors that it was made of"),
    (b"PK\3\4", "a zip archive, as torch.save writes it", "call it .bin or .pt if it is one of torch's"),
    (b"\x1f\x8b", "compressed (gzip)", "unpack it first"),
    (b"\x80\2", "a bare pickle", "save its tensors as safetensors, if you trust where it comes from"),
    (b"\x80\4", "a bare pickle", "save its tensors as safetensors, if you trust where it comes from"),
)
#: Suffixes of weights that are not read, with a remedy for each.
OTHER_FORMATS = {
    ".gguf": "GGUF files, of llama.cpp, are not read: take the repository with the safetensors",
    ".h5": "HDF5 files, of Keras, are not read: take the repository with the safetensors",
    ".msgpack": "files of Flax are not read: take the repository with the safetensors",
    ".onnx": "ONNX files are not read: take the repository with the safetensors",
    **dict.fromkeys((".incomplete", ".part", ".crdownload"), "an incomplete download: run it again"),
    **dict.fromkeys((".tar", ".tgz", ".gz", ".zip"), "an archive: unpack it first"),
}


def named_kind(head: bytes) -> str:
    """Name a file's kind by its first bytes.

    The text includes a remedy; it is empty if unknown.
    """
    for beginning, kind, remedy in _BEGINNINGS:
        if head.startswith(beginning):
            return f"it is {kind}; {remedy}"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:16].lower().startswith(_HTML):
        return f"it is a web page, such as a site gives for a file that asks for a login; {_LATER}"
    if head[257:262] == b"ustar":
        return "it is a tar archive; unpack it first"
    if len(head) >= 8 and not any(head):
        return f"it begins with nothing but zeros, like an incomplete download; {_LATER}"
    return ""
