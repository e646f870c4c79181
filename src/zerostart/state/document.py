"""The document of a training state: what it has to say, its digest, and the limits that it has to keep."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, read_json, shown
from zerostart.errors import CheckpointError, ConfigError, ReadError, VerifyError
from zerostart.state.training_state import FORMAT, MARKER
from zerostart.state.writing import Entry

__all__ = ["check_document", "check_size", "read_document", "sealed"]

#: What every document has, and of which kind. What came later may be missing, in older ones.
_FIELDS: dict[str, tuple[type, ...]] = {
    "world_size": (int,),
    "ties": (dict,),
    "left_out": (list,),
    "optimizer": (dict,),
    "engine": (dict,),
    "extra": (object,),
}
_OPTIMIZER: dict[str, tuple[type, ...]] = {"class": (str,), "numbers": (dict,), "groups": (list,)}
_LATER: dict[str, tuple[type, ...]] = {"modules": (dict,), "beside": (list,), "around": (dict,)}
#: The entry with the digest of all the others that it names.
_SEAL = "seal"
#: Bytes of the document for each tensor beside its name: its digest, quotes, indentation; and for each file.
_PER_TENSOR, _PER_FILE = 48, 4096


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """``document`` with the digest of all its entries."""
    return {**document, _SEAL: {"entries": sorted(document), "blake2b": _digest(document, sorted(document))}}


def _digest(document: Mapping[str, Any], entries: Sequence[str]) -> str:
    text = json.dumps([[entry, document[entry]] for entry in entries], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_size(document: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    """Raise ConfigError, before anything is written, for a document that could not be read again.

    ``entries`` are the tensors whose digests come to it.
    """
    size = len(json.dumps(document)) + _PER_FILE
    size += sum(len(json.dumps(name)) + _PER_TENSOR for name, _, _ in entries)
    if size > MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"the document of the state would have {size} bytes for {len(entries)} tensors, and "
            f"{MAX_DOCUMENT_BYTES} at most are read again: train fewer parameters, or join small ones"
        )


def read_document(path: Path) -> dict[str, Any]:
    """The document of a training state in a file; raises ReadError, and CheckpointError for a damaged one."""
    document = read_json(path, "training state", MAX_DOCUMENT_BYTES)
    version = document.get("format")
    if type(version) is not int or version > FORMAT:
        raise CheckpointError(
            f"{path} has the format {version!r}, and this zerostart knows formats up to {FORMAT}; update "
            "zerostart"
        )
    _check_seal(path, document)
    _check_fields(path, document, _FIELDS, _LATER, "")
    if document["optimizer"]:
        _check_fields(path, document["optimizer"], _OPTIMIZER, {}, "optimizer.")
    return document


def _check_seal(path: Path, document: Mapping[str, Any]) -> None:
    seal = document.get(_SEAL)
    if seal is not None:
        entries = seal.get("entries") if isinstance(seal, dict) else None
        known = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
        missing = [entry for entry in entries or () if entry not in document] if known else []
        if not known or missing or _digest(document, entries or ()) != seal.get("blake2b"):
            what = f"has no entry {shown(missing[0])}" if missing else "is not what was written"
            raise CheckpointError(
                f"{path} {what}: it was damaged or edited; take another checkpoint, or load the weights "
                "alone (zerostart.load of the checkpoint's folder model/)"
            )


def check_document(directory: str | os.PathLike[str]) -> None:
    """Raise VerifyError where ``directory`` is a training state whose document is not what was written."""
    path = expanded(directory) / MARKER
    try:
        if path.is_file():
            _check_seal(path, read_json(path, "training state", MAX_DOCUMENT_BYTES))
    except (CheckpointError, ReadError) as error:
        raise VerifyError(str(error)) from error


def _check_fields(
    path: Path,
    document: Mapping[str, Any],
    needed: Mapping[str, tuple[type, ...]],
    later: Mapping[str, tuple[type, ...]],
    where: str,
) -> None:
    for name, kinds in {**needed, **later}.items():
        if name not in document and name in later:
            continue
        if name not in document or not isinstance(document[name], kinds):
            what = "no" if name not in document else "another kind of"
            raise CheckpointError(
                f"{path} has {what} entry {where}{name}: it is damaged, or no document of a training state; "
                "take another checkpoint"
            )
