"""The document of a training state: what it has to say, its digest, and the limits that it has to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.assembling import Scalar, TrainingContents
from zerostart.checkpoint.formats.training import training_states
from zerostart.checkpoint.manifest import check_seal
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, read_json
from zerostart.errors import CheckpointError, ConfigError
from zerostart.recipe.dtypes import torch_dtype
from zerostart.state.resuming.training_state import FORMAT, MARKER
from zerostart.state.resuming.values import encoded
from zerostart.state.saving.writing import Entry

#: Entries of a document and of its entry ``optimizer``, and the types that they have.
_FIELDS = {
    "world_size": int,
    "ties": dict,
    "left_out": list,
    "optimizer": dict,
    "engine": dict,
    "extra": object,
}
_OPTIMIZER = {"class": str, "numbers": dict, "groups": list}
#: Entries that a document may lack.
_OPTIONAL = {"modules": dict, "beside": list, "around": dict}
#: Bytes of the document for each tensor beside its name: its digest, quotes, indentation; and for each file.
_PER_TENSOR, _PER_FILE = 48, 4096


def check_size(document: Mapping[str, object], entries: Sequence[Entry]) -> None:
    """Raise ConfigError, before anything is written, for a document that could not be read again.

    ``entries`` are the tensors whose digests come to it.
    """
    size = len(json.dumps(document, indent=1)) + _PER_FILE
    size += sum(len(json.dumps(name)) + _PER_TENSOR for name, _, _ in entries)
    if size > MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"the document of the training state would have {size} bytes for {len(entries)} tensors, but at "
            f"most {MAX_DOCUMENT_BYTES} can be read back: train fewer parameters, join small ones, or pass "
            "less in extra"
        )


def read_document(state: Path) -> dict[str, object]:
    """The document of the training state in a directory.

    Raises ReadError, and CheckpointError for a damaged one.
    """
    path = state / MARKER
    document = read_json(path, "training state", MAX_DOCUMENT_BYTES)
    version = document.get("format")
    if type(version) is not int or version > FORMAT:
        raise CheckpointError(
            f"{path} has the format {version!r}, and this zerostart knows formats up to {FORMAT}; update "
            "zerostart"
        )
    check_seal(document, path)
    optional = {name: kind for name, kind in _OPTIONAL.items() if name in document}
    _check_fields(path, document, {**_FIELDS, **optional}, "")
    if document["optimizer"]:
        _check_fields(path, document["optimizer"], _OPTIMIZER, "optimizer.")
    return document


def _check_fields(path: Path, found: Mapping[str, object], fields: Mapping[str, type], where: str) -> None:
    for name, kind in fields.items():
        if name not in found or not isinstance(found[name], kind):
            what = "no" if name not in found else "another kind of"
            raise CheckpointError(
                f"{path} has {what} entry {where}{name}: it is damaged, or is not the document of a "
                "training state; use another checkpoint"
            )


# Training states that others wrote, in the words of our own.

#: The world size in their documents: it is of no use, as random states of ranks are not there.
OTHERS = 0
#: Settings of a parameter group that JSON can hold.
_SIMPLE = (bool, int, float, str, type(None))


def foreign_state(place: Path) -> tuple[dict[str, object], Catalog, Catalog] | None:
    """The document and the catalogs of a state of DeepSpeed's, torch's or accelerate's.

    It has what these save of a model and its optimizer; random states, schedules and the positions in the
    data are left to who saved them. None where ``place`` is no such directory.
    """
    if not place.is_dir() or (read := training_states(place)) is None:
        return None
    found, model, state = read
    return _document(found), model, state


def _document(found: TrainingContents) -> dict[str, object]:
    engine: dict[str, object] = {"name": "deepspeed", **found.engine} if found.engine else {"name": "torch"}
    if found.schedule is not None:
        engine["schedule"] = _encoded(found.schedule)
    return {
        "format": 1,
        "world_size": OTHERS,
        "ties": found.ties,
        "left_out": [],
        "optimizer": {
            "class": "",
            "numbers": {
                key: [[value, [name]] for name, value in by_name.items()]
                for key, by_name in found.numbers.items()
            },
            "groups": [
                {"settings": _encoded(group.settings), "parameters": list(group.parameters)}
                for group in found.groups
            ],
        }
        if found.groups
        else {},
        "engine": engine,
        "extra": None,
    }


def plain_settings(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings that are numbers (in tensors, too), words, or tuples and lists of these."""
    return {
        str(key): torch.tensor(value.value, dtype=torch_dtype(value.dtype), device="cpu")
        if isinstance(value, Scalar)
        else value
        for key, value in values.items()
        if type(value) in (*_SIMPLE, Scalar)
        or (type(value) in (tuple, list) and all(type(item) in _SIMPLE for item in value))
    }


def _encoded(values: Mapping[Any, Any]) -> dict[str, object]:
    return {key: encoded(value, key, {}) for key, value in plain_settings(values).items()}
