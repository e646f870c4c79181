"""Training states that others wrote, in the words of our own: their documents made from what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.assembling import TrainingContents
from zerostart.checkpoint.formats.training import training_states
from zerostart.state.resuming.values import encoded

#: The world size in their documents: it is of no use, as random states of ranks are not there.
OTHERS = 0
#: Settings of a parameter group that JSON can hold.
_SIMPLE = (bool, int, float, str, type(None))


def foreign_state(path: Path) -> tuple[dict[str, Any], Catalog, Catalog] | None:
    """The document and the catalogs of a state of DeepSpeed's, torch's or accelerate's.

    It has what these save of a model and its optimizer; random states, schedules and the positions in the
    data are left to who saved them. None where ``path`` is no such directory.
    """
    if not path.is_dir() or (read := training_states(path)) is None:
        return None
    found, model, state = read
    return _document(found), model, state


def _document(found: TrainingContents) -> dict[str, Any]:
    engine: dict[str, Any] = {"name": "deepspeed", **found.engine} if found.engine else {"name": "torch"}
    if found.schedule is not None:
        engine["schedule"] = _simple(found.schedule)
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
                {"settings": _simple(group.settings), "parameters": list(group.parameters)}
                for group in found.groups
            ],
        }
        if found.groups
        else {},
        "engine": engine,
        "extra": None,
    }


def _simple(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings that are numbers, words, or tuples and lists of these."""
    return {
        str(key): encoded(value, str(key), {})
        for key, value in values.items()
        if type(value) in _SIMPLE
        or (type(value) in (tuple, list) and all(type(item) in _SIMPLE for item in value))
    }
